"""Simulated users in real time: their records, their answers to decisions, and the worth of the slates served.

This module has no clock and moves no bytes: the time goes in, records come out. The users are those of
`worker.simulation.users`, drawn in small cohorts:

- at a rate, users arrive at their times for any latency of decisions, so that delays are measured, not hidden;
- flat out, the next cohort arrives as soon as few enough sessions wait for a decision.

Times are nanoseconds since the epoch, for latencies; events have milliseconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import msgspec
import numpy as np

from worker.errors import InputError
from worker.metrics.history import DELAY_BOUNDS, Histogram
from worker.simulation.environments import Environment, seeded_environment
from worker.simulation.traffic.accounts import Latencies, WorthHistory
from worker.simulation.users import Cohort, Habits, Sent, Users
from worker.simulation.worth import Valuer, Worth
from worker.stream.decoding import Rejected, decode_decision
from worker.stream.events import MODES, Decision
from worker.stream.settings import LearningSettings

NANOSECONDS: Final = 1_000_000  # in a millisecond
PERIOD: Final = 50  # milliseconds of a cohort at a rate: short, because nothing is sent while it is drawn
CROWD: Final = 200  # users of a cohort, flat out
MOST_AT_ONCE: Final = 1_000  # users that enter before their records are sent
MOST_BEHIND: Final = 2_000  # milliseconds; users who are later than that are skipped
GRACE: Final = 10_000  # milliseconds without any decision, after which the wait for one ends
DISORDERED: Final = 0.03  # share of the records that are held up, if any are
SETTLE_EVERY: Final = 250  # milliseconds between two updates of the accounts
_SCORED_AT_ONCE: Final = 512

#: The defaults of serving, which the workers have too.
_LEARNING = LearningSettings(dim=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings:
    """The settings of traffic; times in milliseconds.

    `rate` is in users per second, None for flat out; then at most `waiting` sessions wait for a decision. The traffic
    ends after `sessions` or `duration`, whichever comes first. The last settings are shares.
    """

    environment: str = "tastes"
    dim: int = _LEARNING.dim
    arms: int = 10
    stay: float = 1.0
    horizon: int = _LEARNING.horizon
    repeats: bool = _LEARNING.repeats
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
            raise InputError("waiting must be at least 1")
        self.habits()

    def habits(self) -> Habits:
        """Return the behaviour of the users; the network is the real one, except for records held up on purpose."""
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

    def world(self) -> Environment:
        """Draw the world of the users."""
        return seeded_environment(self.environment, dim=self.dim, arms=self.arms, seed=self.seed, stay=self.stay)


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of the traffic.

    records : sent, by topic; second copies and poison included
    decided, undecided : sessions that got their first decision, or did not in time
    forsaken : sessions that got no later decision in time
    decisions, others : decisions that a user waited for; repeated, foreign and undecodable ones
    skipped : milliseconds whose users were left out because this process could not keep up with the rate
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
    version: int = -1  # the newest in a decision
    modes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(MODES, 0)))

    @property
    def events(self) -> int:
        """All records sent."""
        return sum(self.records.values())


class _Waiting(NamedTuple):
    position: int
    since: int


class _Entry(NamedTuple):
    """A record in the queue; `opens` is the user whose session it opens, `reward` the revenue of its click."""

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
    """Users who act as time passes; `now` (nanoseconds) also makes the session ids unique.

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
        self.delays = Histogram(DELAY_BOUNDS)  # the latencies for Prometheus
        self.history = WorthHistory()
        world = settings.world()
        self._rewards = {arm.arm: arm.reward for arm in world.catalogue()}
        period = 1 if settings.rate is None else PERIOD
        self._users = Users(
            world,
            tuple(self._rewards),
            horizon=settings.horizon,
            rate=CROWD if settings.rate is None else settings.rate * PERIOD / 1000,
            period=period,
            start=self.start - self.start % period,
            seed=settings.seed,
            habits=settings.habits(),
            name=f"t{now // 1000:x}",
        )
        self._valuer = Valuer(world, horizon=settings.horizon, repeats=settings.repeats)
        self._queue: list[_Entry] = []
        self._number = 0  # of the next record
        self._period = 0  # the next whose users enter
        self._entered = 0  # users
        self.closing = False  # whether no more users enter
        self._received = self._sent = self._settled = self.start  # milliseconds
        self._expects: dict[int, dict[int, _Waiting]] = {}  # period → index of the user → the decision expected
        self._first = 0  # sessions that wait for their first decision
        self._later = 0  # … for another one
        self._current: deque[tuple[int, int]] = deque()  # periods with users present, and the end of their patience
        self._fresh: list[tuple[Cohort, int, tuple[str, ...]]] = []  # slates without a value yet

    # ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, now: int) -> list[Sent]:
        """Return the records to be sent by now, in order, and count them as sent."""
        time = now // NANOSECONDS
        self._enter_users(time)
        self._expire(time)
        if time - self._settled >= SETTLE_EVERY:
            self.settle(now)
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

    @property
    def finished(self) -> bool:
        """Whether no more users enter, everything is sent and no session waits."""
        return self.closing and not self._queue and not self.waiting

    def stalled(self, now: int) -> bool:
        """Return whether no more users enter, everything is sent, and no decision has arrived for a long time."""
        return self.closing and not self._queue and now // NANOSECONDS - self._received > GRACE

    @property
    def waiting(self) -> int:
        """Sessions that wait for a decision."""
        return self._first + self._later

    @property
    def forsaken(self) -> int:
        """Sessions that got a decision and then no other, or still wait for it."""
        return self.counts.forsaken + self._later

    @property
    def active_seconds(self) -> float:
        """The time from the start to the last record sent."""
        return max(1, self._sent - self.start) / 1000

    # ── users ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter_users(self, time: int) -> None:
        """Let the users enter whose time has come."""
        settings, users = self.settings, self._users
        if settings.duration is not None and time >= self.start + settings.duration:
            self.closing = True
        if settings.rate is None:
            entered = 0  # these wait too, though their arrivals are not sent yet
            while not self.closing and self.waiting + entered < settings.waiting and entered < MOST_AT_ONCE:
                cohort = users.cohort(self._period)
                _shift(cohort, time - users.start - self._period)
                entered += self._enter(self._period, cohort, time)
                self._period += 1
            return
        oldest = users.period_of(time - MOST_BEHIND)
        if not self.closing and self._period < oldest:
            self.counts.skipped += (oldest - self._period) * users.period
            self._period = oldest
        while not self.closing and users.start + self._period * users.period <= time:
            self._enter(self._period, users.cohort(self._period), users.start + (self._period + 1) * users.period)
            self._period += 1

    def _enter(self, period: int, cohort: Cohort, last: int) -> int:
        """Put the arrivals and poison of a cohort into the queue; return the number of users."""
        users, settings = self._users, self.settings
        count = len(cohort)
        if settings.sessions is not None and self._entered + count >= settings.sessions:
            count = settings.sessions - self._entered
            self.closing = True
        self._entered += count
        self._expects[period] = {}
        self._current.append((period, last + settings.patience + settings.disorder + GRACE))
        opened: set[int] = set()
        for record in users.arrivals(period):
            user = users.user_of(record.key.decode())
            if user is None or user[1] >= count:
                continue
            # The first record of a user is the arrival: copies and poison come after it.
            self._push(record, None if user[1] in opened else user, 0.0)
            opened.add(user[1])
        return count

    def _push(self, record: Sent, opens: tuple[int, int] | None, reward: float) -> None:
        self._number += 1
        heappush(self._queue, _Entry(record.time, self._number, record, opens, reward))

    def _expire(self, time: int) -> None:
        """Drop the users whose patience ended long ago, and count those who still wait."""
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
            users.expire(users.start + (period + 1) * users.period)

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, values: Iterable[bytes | None], now: int) -> None:
        """Handle decisions; the answers will be due."""
        time = now // NANOSECONDS
        self._received = time
        for value in values:
            try:
                self._show(decode_decision(value or b""), now, time)
            except Rejected:
                self.counts.others += 1
        if len(self._fresh) >= _SCORED_AT_ONCE:
            self.settle(now)

    def _show(self, decision: Decision, now: int, time: int) -> None:
        users, counts = self._users, self.counts
        period, index = users.user_of(decision.session_id) or (-1, -1)
        expects = self._expects.get(period, {})
        waiting = expects.get(index)
        if waiting is None or decision.position < waiting.position:
            counts.others += 1
            return
        cohort = users.cohort(period)
        counts.decisions += 1
        counts.modes[decision.mode] += 1
        counts.version = max(counts.version, decision.parameters_version)
        del expects[index]
        if waiting.position == 1:
            self._first -= 1
            counts.decided += 1
            seconds = max(0, now - waiting.since) / 1e9
            self.latencies.add(seconds)
            self.delays.observe(seconds)
            if decision.position == 1:  # later ones do not contain the whole slate
                self._fresh.append((cohort, index, decision.slate))
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
        answered = cohort.answered[index]
        last = decision.position + len(decision.slate) - 1
        if not (answer.clicked or cohort.prefetching[index] or answered >= min(last, self.settings.horizon)):
            expects[index] = _Waiting(answered + 1, now)
            self._later += 1

    def settle(self, now: int) -> None:
        """Bring the accounts up to date."""
        self._settled = now // NANOSECONDS
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        contexts = np.array([cohort.contexts[index] for cohort, index, _ in fresh])
        slates = np.array([self._users.arm_indices(slate) for _, _, slate in fresh], dtype=np.intp)
        self.history.add(self._settled - self.start, self._valuer.worth(contexts, slates))

    @property
    def worth(self) -> Worth:
        """The worth of all sessions settled so far."""
        return self.history.whole


def _shift(cohort: Cohort, by: int) -> None:
    """Move a cohort in time."""
    cohort.arrived_at = [time + by for time in cohort.arrived_at]
    cohort.dues = [[time + by for time in dues] for dues in cohort.dues]
