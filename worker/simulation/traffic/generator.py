"""Simulated users in real time: when they come, what they make of decisions, and what that was worth.

No runner in here and no clock: the time goes in, records come out. The users are those of
`worker.simulation.users`, drawn in small cohorts:

- at a rate, users come when they come, however long decisions take; nobody waits for the worker, so that its delays
  are measured and not hidden;
- flat out, the next cohort comes as soon as not too many sessions wait for a decision.

Times are nanoseconds since the epoch (for delays), events have milliseconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import msgspec
import numpy as np

from worker.bandit.planning import NO_ARM
from worker.errors import InputError
from worker.metrics.histogram import DELAY_BOUNDS, Histogram
from worker.simulation.environments import Chance, make_environment
from worker.simulation.traffic.accounts import History, Latencies, Valuer, Worth
from worker.simulation.users import Cohort, Habits, Sent, Users
from worker.stream.codec import Rejected, decode_decision
from worker.stream.events import MODES, Decision
from worker.stream.parameters import Arm

NANOSECONDS: Final = 1_000_000  # in a millisecond
PERIOD: Final = 50  # milliseconds of a cohort at a rate: short, so that its drawing holds nothing up
CROWD: Final = 200  # users of a cohort, flat out
MOST_AT_ONCE: Final = 1_000  # users called before what they send goes out
MOST_BEHIND: Final = 2_000  # milliseconds; users who should have come before that stay away
GRACE: Final = 10_000  # milliseconds without any decision, after which nobody waits for one any more
DISORDERED: Final = 0.03  # share of the records that are held up, if any are
_SCORED_AT_ONCE: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings:
    """What traffic is. `rate` is in users per second, None for flat out; times in milliseconds, the rest are shares.

    It ends after `sessions` or `duration`, whichever comes first, or when it is told to. `waiting` is how many sessions
    may wait for a decision, flat out.
    """

    environment: str = "opposite"
    dim: int = 5
    arms: int = 10
    horizon: int = 5
    repeats: bool = True
    seed: int = 0
    rate: float | None = 50.0
    sessions: int | None = None
    duration: int | None = None
    waiting: int = 5_000
    look: tuple[int, int] = (1_500, 6_500)
    patience: int = 50_000
    duplicates: float = 0.02
    disorder: int = 0
    silence: float = 0.03
    poison: float = 0.01
    prefetching: float = 0.2

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise InputError("the rate must be above 0")
        if self.waiting < 1:
            raise InputError("at least one session must be allowed to wait for a decision")
        self.habits()

    def habits(self) -> Habits:
        """Return how the users behave; the network is the real one, but for records held up on purpose."""
        return Habits(
            look=self.look,
            patience=self.patience,
            silent=self.silence,
            prefetching=self.prefetching,
            transit=(0, 0),
            held_up=self.disorder,
            disordered=DISORDERED if self.disorder else 0.0,
            duplicated=self.duplicates,
            poison=self.poison,
        )

    def arm_names(self) -> tuple[str, ...]:
        """Return the ids of the arms."""
        return tuple(f"ad-{place:0{len(str(self.arms))}}" for place in range(1, self.arms + 1))

    def catalogue(self) -> list[Arm]:
        """Return the arms with their rewards, as a worker must know them to serve these users.

        >>> TrafficSettings(arms=2).catalogue()[0].arm
        'ad-1'
        """
        world = make_environment(
            self.environment, dim=self.dim, arms=self.arms, generator=Chance.of(self.seed).environment
        )
        return [Arm(arm=arm, reward=e) for arm, e in zip(self.arm_names(), world.rewards.tolist(), strict=True)]


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was counted. `records` are those sent by topic, second copies and poison among them.

    `decided` sessions got their first decision, `undecided` ones did not in time, `forsaken` ones waited in vain for a
    later one. `decisions` are those that were waited for, `others` came again or were for somebody else. `skipped` are
    the milliseconds in which nobody came because this process could not keep up with its rate.
    """

    records: dict[str, int] = field(default_factory=lambda: {"arrivals": 0, "clicks": 0})
    sessions: int = 0
    decided: int = 0
    undecided: int = 0
    forsaken: int = 0
    decisions: int = 0
    others: int = 0
    clicks: int = 0
    earned: float = 0.0
    skipped: int = 0
    version: int = -1  # the newest that a decision named
    modes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(MODES, 0)))

    @property
    def events(self) -> int:
        """All records sent."""
        return sum(self.records.values())


class _Waiting(NamedTuple):
    position: int
    since: int


class _Entry(NamedTuple):
    """A record in the queue; `opens` says whose first arrival it is, `reward` what it earns if it is a click."""

    time: int
    number: int
    record: Sent
    opens: tuple[int, int] | None
    reward: float


class _Answer(msgspec.Struct, gc=False):
    arm: str
    clicked: bool


_read_answer: Final = msgspec.json.Decoder(_Answer).decode


class Traffic:
    """A crowd that acts as time goes by.

    Parameters
    ----------
    settings : who they are
    now : nanoseconds; makes the session ids of this crowd its own

    Examples
    --------
    >>> traffic = Traffic(TrafficSettings(rate=None, sessions=3, poison=0, duplicates=0), now=10**18)
    >>> records = traffic.due(10**18)
    >>> len(records), traffic.waiting, traffic.finished
    (3, 3, False)
    """

    def __init__(self, settings: TrafficSettings, *, now: int) -> None:
        self.settings = settings
        self.start = now // NANOSECONDS
        self.counts = Counts()
        self.latencies = Latencies()
        self.delays = Histogram(DELAY_BOUNDS)  # the same for Prometheus
        self.history = History()
        world = make_environment(
            settings.environment, dim=settings.dim, arms=settings.arms, generator=Chance.of(settings.seed).environment
        )
        names = settings.arm_names()
        flat_out = settings.rate is None
        period = 1 if flat_out else PERIOD
        self._users = Users(
            world,
            names,
            horizon=settings.horizon,
            rate=CROWD if settings.rate is None else settings.rate * PERIOD / 1000,
            period=period,
            start=self.start - self.start % period,
            seed=settings.seed,
            habits=settings.habits(),
            name=f"t{now // 1000:x}",
        )
        self._valuer = Valuer(world, horizon=settings.horizon, repeats=settings.repeats)
        self._places = {arm: place for place, arm in enumerate(names)}
        self._rewards = dict(zip(names, world.rewards.tolist(), strict=True))
        self._queue: list[_Entry] = []
        self._number = 0
        self._period = 0
        self._called = 0
        self._closing = False
        self._heard = self._sent = self.start
        self._expects: dict[int, dict[int, _Waiting]] = {}  # period → place → what is waited for
        self._first = 0  # sessions that wait for their first decision
        self._later = 0  # … for another one
        self._current: deque[tuple[int, int]] = deque()  # periods whose users may be there, and until when
        self._fresh: list[tuple[Cohort, int, tuple[str, ...]]] = []

    # ── what they send ───────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, now: int) -> list[Sent]:
        """Return what is to be sent by now, in order; it counts as sent at this time."""
        time = now // NANOSECONDS
        self._call(time)
        self._let_go(time)
        queue, counts = self._queue, self.counts
        records = []
        while queue and queue[0].time <= time:
            _, _, record, opens, reward = heappop(queue)
            records.append(record)
            self._sent = time
            counts.records[record.topic] += 1
            if opens is not None:
                self._expects[opens[0]][opens[1]] = _Waiting(1, now)
                self._first += 1
                counts.sessions += 1
            if reward:
                counts.clicks += 1
                counts.earned += reward
        return records

    def close(self) -> None:
        """Call no more users; those who are there may go on."""
        self._closing = True

    @property
    def closing(self) -> bool:
        """Whether no more users come."""
        return self._closing

    @property
    def finished(self) -> bool:
        """Whether all that was to come has come, and everybody has gone."""
        return self._closing and not self._queue and not self.waiting

    def forlorn(self, now: int) -> bool:
        """Say whether no more users come, those there have nothing to send, and no decision has come for long."""
        return self._closing and not self._queue and now // NANOSECONDS - self._heard > GRACE

    @property
    def waiting(self) -> int:
        """Sessions that wait for a decision."""
        return self._first + self._later

    @property
    def forsaken(self) -> int:
        """Sessions that got a decision and then waited in vain for another, or still wait."""
        return self.counts.forsaken + self._later

    @property
    def active_seconds(self) -> float:
        """How long records were sent."""
        return max(1, self._sent - self.start) / 1000

    # ── who they are ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, time: int) -> None:
        """Call the users whose time has come."""
        settings, users = self.settings, self._users
        if settings.duration is not None and time >= self.start + settings.duration:
            self._closing = True
        if settings.rate is None:
            # Before those called in this very millisecond are sent, they wait as well.
            called = 0
            while not self._closing and self.waiting + called < settings.waiting and called < MOST_AT_ONCE:
                cohort = users.cohort(self._period)
                _shift(cohort, time - users.start - self._period)
                called += self._enter(self._period, cohort, time)
                self._period += 1
            return
        oldest = users.period_of(time - MOST_BEHIND)
        if not self._closing and self._period < oldest:
            self.counts.skipped += (oldest - self._period) * users.period
            self._period = oldest
        while not self._closing and users.start + self._period * users.period <= time:
            self._enter(self._period, users.cohort(self._period), users.start + (self._period + 1) * users.period)
            self._period += 1

    def _enter(self, period: int, cohort: Cohort, last: int) -> int:
        """Put what a cohort will send unasked for into the queue; return how many users that are."""
        users, settings = self._users, self.settings
        count = len(cohort)
        if settings.sessions is not None and self._called + count >= settings.sessions:
            count = settings.sessions - self._called
            self._closing = True
        self._called += count
        self._expects[period] = {}
        self._current.append((period, last + settings.patience + settings.disorder + GRACE))
        opened: set[int] = set()
        for record in users.arrivals(period):
            place = users.whose(record.key.decode())
            if place is None or place[1] >= count:
                continue
            # The first record of a user is the arrival: copies and what abuses its id come after it.
            opens = None if place[1] in opened else place
            opened.add(place[1])
            self._push(record, opens, 0.0)
        return count

    def _push(self, record: Sent, opens: tuple[int, int] | None, reward: float) -> None:
        self._number += 1
        heappush(self._queue, _Entry(record.time, self._number, record, opens, reward))

    def _let_go(self, time: int) -> None:
        """Forget the users whose patience has long ended, whatever they still wait for."""
        users = self._users
        while self._current and self._current[0][1] < time:
            period, _ = self._current.popleft()
            for waiting in self._expects.pop(period).values():
                if waiting.position == 1:
                    self._first -= 1
                    self.counts.undecided += 1
                else:
                    self._later -= 1
                    self.counts.forsaken += 1
            users.forget(users.start + (period + 1) * users.period)

    # ── what they are shown ──────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, values: Iterable[bytes | None], now: int) -> None:
        """Let users see decisions; what they do about them will be due."""
        time = now // NANOSECONDS
        self._heard = time
        for value in values:
            try:
                self._show(decode_decision(value or b""), now, time)
            except Rejected:
                self.counts.others += 1
        if len(self._fresh) >= _SCORED_AT_ONCE:
            self.settle(now)

    def _show(self, decision: Decision, now: int, time: int) -> None:
        users, counts = self._users, self.counts
        whose = users.whose(decision.session_id)
        expects = None if whose is None else self._expects.get(whose[0])
        waiting = None if whose is None or expects is None else expects.get(whose[1])
        if whose is None or expects is None or waiting is None or decision.position < waiting.position:
            counts.others += 1
            return
        period, place = whose
        cohort = users.cohort(period)
        counts.decisions += 1
        counts.modes[decision.mode] += 1
        counts.version = max(counts.version, decision.parameters_version)
        del expects[place]
        if waiting.position == 1:
            self._first -= 1
            counts.decided += 1
            seconds = max(0, now - waiting.since) / 1e9
            self.latencies.add(seconds)
            self.delays.observe(seconds)
            if decision.position == 1:  # later ones do not tell the whole slate
                self._fresh.append((cohort, place, decision.slate))
        else:
            self._later -= 1
        records = users.answer(decision, time)
        if not records:
            return
        final = records[-1].value
        answer = _read_answer(final)
        reward = self._rewards.get(answer.arm, 0.0) if answer.clicked else 0.0
        for record in records:
            if record.value == final:
                self._push(record, None, reward)
                reward = 0.0  # a second copy earns nothing
            else:
                self._push(record, None, 0.0)
        answered = cohort.answered[place]
        last = decision.position + len(decision.slate) - 1
        if not (answer.clicked or cohort.prefetching[place] or answered >= min(last, self.settings.horizon)):
            expects[place] = _Waiting(answered + 1, now)
            self._later += 1

    def settle(self, now: int) -> None:
        """Bring the accounts up to date."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        contexts = np.array([cohort.contexts[place] for cohort, place, _ in fresh])
        slates = np.array([self._row(slate) for _, _, slate in fresh], dtype=np.intp)
        self.history.add(now // NANOSECONDS - self.start, self._valuer.worth(contexts, slates))

    def _row(self, slate: Sequence[str]) -> list[int]:
        horizon = self.settings.horizon
        row = [self._places.get(arm, len(self._places)) for arm in slate[:horizon]]
        return row + [NO_ARM] * (horizon - len(row))

    @property
    def worth(self) -> Worth:
        """What all sessions scored so far were worth."""
        return self.history.whole


def _shift(cohort: Cohort, by: int) -> None:
    """Let a cohort come at another time."""
    cohort.arrived_at = [time + by for time in cohort.arrived_at]
    cohort.dues = [[time + by for time in dues] for dues in cohort.dues]
