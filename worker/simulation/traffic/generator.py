"""Simulated users in real time: their records, their answers to decisions, and the worth of the slates served.

This module has no clock and moves no bytes: the time goes in, records come out. The users are those of
`worker.simulation.users`, drawn in small cohorts. They arrive at their times for any latency of decisions, so that
delays are measured, not hidden.

Times are nanoseconds since the epoch, for latencies; events have milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats
from worker.metrics.history import Histogram
from worker.simulation.environments import make_environment
from worker.simulation.users import Habits, Sent, Users
from worker.simulation.world import Chance, Environment
from worker.simulation.worth import Valuer, Worth
from worker.stream.decoding import Rejected, decode_decision
from worker.stream.events import Decision
from worker.stream.settings import LearningSettings

NANOSECONDS: Final = 1_000_000  # in a millisecond
PERIOD: Final = 50  # milliseconds of a cohort: short, because nothing is sent while it is drawn
MOST_BEHIND: Final = 2_000  # milliseconds; if this process is slower, users are left out
GRACE: Final = 10_000  # milliseconds without any decision, after which the wait for one ends
SETTLE_EVERY: Final = 250  # milliseconds between two updates of the accounts
LATENCY_BOUNDS: Final = (1e-5 * 1.02 ** np.arange(1_000)).tolist()  # seconds, up to an hour

#: The defaults of serving, which the workers have too.
_LEARNING = LearningSettings(dim=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings(Habits):
    """The settings of traffic: its users, their habits, and how long they come; `rate` is in users per second.

    The traffic ends after `sessions` or `duration`, whichever comes first. The network is the real one, except for
    records that are held up on purpose.
    """

    environment: str = "tastes"
    dim: int = _LEARNING.dim
    arms: int = 10
    stay: float = 1.0
    horizon: int = _LEARNING.horizon
    repeats: bool = _LEARNING.repeats
    seed: int = 0
    rate: float = 50.0
    sessions: int | None = None
    duration: int | None = None
    transit: tuple[int, int] = (0, 0)
    disorder: int = 0

    def world(self) -> Environment:
        """Draw the world of the users."""
        generator = Chance.of(self.seed).environment
        return make_environment(self.environment, dim=self.dim, arms=self.arms, generator=generator, stay=self.stay)


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of the traffic.

    records : sent, by topic; second copies and poison included
    decided : sessions that got their first decision
    forsaken : sessions that got no later decision in time
    decisions, others : decisions that a user waited for; repeated, foreign and undecodable ones
    """

    records: dict[str, int] = field(default_factory=lambda: {"arrivals": 0, "clicks": 0})
    sessions: int = 0
    decided: int = 0
    forsaken: int = 0
    decisions: int = 0
    others: int = 0
    clicks: int = 0
    earned: float = 0.0
    version: int = -1  # the newest in a decision

    @property
    def events(self) -> int:
        """All records sent."""
        return sum(self.records.values())


class _Waiting(NamedTuple):
    """A user who waits for the decision at a position since a time in nanoseconds."""

    position: int
    since: int


class Traffic:
    """Users who act as time passes; `now` (nanoseconds) also makes the session ids unique.

    >>> traffic = Traffic(TrafficSettings(rate=1000, sessions=3, poison=0, duplicates=0), now=10**18)
    >>> records = traffic.due(10**18 + 50_000_000)
    >>> len(records), traffic.waiting, traffic.finished
    (3, 3, False)
    """

    def __init__(self, settings: TrafficSettings, *, now: int) -> None:
        self.settings = settings
        self.start = now // NANOSECONDS
        self.counts = Counts()
        self.latencies = Histogram(LATENCY_BOUNDS)  # of first decisions
        self.longest = 0.0
        self.worth = Worth()  # of all slates
        self.seconds: list[Worth] = []  # by second since the start
        world = settings.world()
        self._users = Users(
            world,
            horizon=settings.horizon,
            rate=settings.rate * PERIOD / 1000,
            period=PERIOD,
            start=self.start - self.start % PERIOD,
            seed=settings.seed,
            habits=settings,
            name=f"t{now // 1000:x}",
        )
        self._valuer = Valuer(world, horizon=settings.horizon, repeats=settings.repeats)
        self._queue: list[tuple[int, int, Sent]] = []  # time, number and record
        self._numbers = count()  # records of the same time stay in order
        self._period = 0  # the next whose users enter
        self._entered = 0  # users
        self._closing = False  # whether no more users enter
        self._received = self._sent = self._settled = self.start  # milliseconds
        self._coming: set[bytes] = set()  # sessions whose arrival is in the queue
        self._waiting: dict[str, _Waiting] = {}  # by session; those that wait the longest first
        self._clicks: dict[bytes, float] = {}  # clicks in the queue and their revenue
        self._fresh: list[tuple[Floats, list[int]]] = []  # contexts and slates without a value yet

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
        while queue and queue[0][0] <= time:
            record = heappop(queue)[2]
            records.append(record)
            self._sent = time
            counts.records[record.topic] += 1
            if record.key in self._coming:  # not yet a copy or poison, which come after the arrival
                self._coming.remove(record.key)
                self._waiting[record.key.decode()] = _Waiting(1, now)
                counts.sessions += 1
            elif record.value in self._clicks:
                counts.clicks += 1
                counts.earned += self._clicks.pop(record.value)  # a second copy earns nothing
        return records

    @property
    def finished(self) -> bool:
        """Whether no more users enter, everything is sent and no session waits."""
        return self._closing and not self._queue and not self._waiting

    def stalled(self, now: int) -> bool:
        """Return whether no more users enter, everything is sent, and no decision has arrived for a long time."""
        return self._closing and not self._queue and now // NANOSECONDS - self._received > GRACE

    @property
    def waiting(self) -> int:
        """Sessions that wait for a decision."""
        return len(self._waiting)

    @property
    def forsaken(self) -> int:
        """Sessions that got a decision and then no other, or still wait for it."""
        return self.counts.forsaken + sum(waiting.position > 1 for waiting in self._waiting.values())

    @property
    def active_seconds(self) -> float:
        """The time from the start to the last record sent."""
        return max(1, self._sent - self.start) / 1000

    # ── users ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter_users(self, time: int) -> None:
        """Let the users enter whose time has come."""
        settings, users = self.settings, self._users
        if settings.duration is not None and time >= self.start + settings.duration:
            self._closing = True
        self._period = max(self._period, users.period_of(time - MOST_BEHIND))
        while not self._closing and users.start + self._period * PERIOD <= time:
            self._enter(self._period)
            self._period += 1

    def _enter(self, period: int) -> None:
        """Put the arrivals and poison of a period's users into the queue."""
        users, settings = self._users, self.settings
        entering = len(users.cohort(period))
        if settings.sessions is not None and self._entered + entering >= settings.sessions:
            entering = settings.sessions - self._entered
            self._closing = True
        self._entered += entering
        sessions = {users.session_id(period, index).encode() for index in range(entering)}
        self._coming |= sessions
        self._push(record for record in users.arrivals(period) if record.key in sessions)

    def _push(self, records: Iterable[Sent]) -> None:
        for record in records:
            heappush(self._queue, (record.time, next(self._numbers), record))

    def _gone(self, time: int) -> int:
        """Return a time before which users came whose patience has ended, and to whom no decision is on its way."""
        return time - self.settings.patience - self.settings.disorder - GRACE

    def _expire(self, time: int) -> None:
        """Drop the users who are gone, and count the sessions that have waited as long."""
        gone = self._gone(time)
        self._users.expire(gone)
        while self._waiting:
            session_id, waiting = next(iter(self._waiting.items()))
            if waiting.since >= gone * NANOSECONDS:
                break
            del self._waiting[session_id]
            self.counts.forsaken += waiting.position > 1

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, values: Iterable[bytes | None], now: int) -> None:
        """Handle decisions; the answers will be due."""
        self._received = now // NANOSECONDS
        for value in values:
            try:
                self._show(decode_decision(value or b""), now)
            except Rejected:
                self.counts.others += 1

    def _show(self, decision: Decision, now: int) -> None:
        users, counts, time = self._users, self.counts, now // NANOSECONDS
        waiting = self._waiting.get(decision.session_id)
        period, index = users.user_of(decision.session_id) or (-1, -1)
        is_gone = period < users.period_of(self._gone(time))
        if waiting is None or is_gone or decision.position < waiting.position:
            counts.others += 1
            return
        cohort = users.cohort(period)
        counts.decisions += 1
        counts.version = max(counts.version, decision.parameters_version)
        del self._waiting[decision.session_id]
        if waiting.position == 1:
            counts.decided += 1
            seconds = max(0, now - waiting.since) / 1e9
            self.latencies.observe(seconds)
            self.longest = max(self.longest, seconds)
            if decision.position == 1:  # later ones do not contain the whole slate
                self._fresh.append((cohort.contexts[index], users.arm_indices(decision.slate)))
        records = users.answer(decision, time)
        self._push(records)
        clicked, answered = cohort.clicked[index], cohort.answered[index]
        last = min(decision.position + len(decision.slate) - 1, self.settings.horizon)
        if clicked != NO_ARM:
            self._clicks[records[-1].value] = users.arms[clicked].reward
        elif records and not cohort.prefetching[index] and answered < last:
            self._waiting[decision.session_id] = _Waiting(answered + 1, now)

    def settle(self, now: int) -> None:
        """Bring the accounts up to date."""
        self._settled = now // NANOSECONDS
        if self._fresh:
            contexts, slates = zip(*self._fresh, strict=True)
            self._fresh = []
            worth = self._valuer.worth(np.array(contexts), np.array(slates, dtype=np.intp))
            second = (self._settled - self.start) // 1000
            self.worth += worth
            self.seconds += [Worth()] * (second + 1 - len(self.seconds))
            self.seconds[second] += worth

    def latency(self, share: float) -> float | None:
        """Return a quantile of the seconds from an arrival to its first decision; None without decisions."""
        seconds = self.latencies.quantile(share)
        return None if seconds is None else min(seconds, self.longest)
