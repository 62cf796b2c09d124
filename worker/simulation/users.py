"""Simulated users: they arrive, look at displays, click or pass, and are as untidy as real users.

The users of a period (a cohort) are drawn together from the seed and the number of the period: arrival times, contexts,
patience, and their answer to every arm at every position. A user's behaviour is therefore a function of the seed and of
the slates, never of the course of the run. After a restart the same users go on, and every policy meets the same users.

This module runs nothing: decisions go in, records come out, each with the time at which it reaches the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import orjson

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.simulation.world import Bools, Environment
from worker.stream.decoding import LARGEST_NUMBER, Limits
from worker.stream.events import DEAD_LETTER_REASONS, Arrival, Decision, Feedback, Reason, encode_event

Topic: TypeAlias = Literal["arrivals", "clicks"]

#: The first event time of every simulation, a whole minute.
BEGINNING = 1_767_225_600_000  # 2026-01-01 00:00 UTC


class Sent(NamedTuple):
    """A record and the time at which it reaches the worker; `topic` has no prefix."""

    time: int
    topic: Topic
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The behaviour of users and network; times in milliseconds, the rest are shares.

    look, patience : shortest and longest time that a user looks at a display; longest stay
    silence, leaving : users who never answer; users who leave at a display
    prefetching : clients that go through the slate of their first decision; the others wait for every decision
    transit : shortest and longest delivery time of a record
    disordered, disorder : records that are delayed, for at most `disorder`, so that later ones overtake them
    duplicates : records that arrive twice
    poison : unusable records, as a share of the users
    """

    look: tuple[int, int] = (1_500, 6_500)
    patience: int = 50_000
    silence: float = 0.03
    leaving: float = 0.01
    prefetching: float = 0.2
    transit: tuple[int, int] = (20, 300)
    disorder: int = 3_500
    disordered: float = 0.03
    duplicates: float = 0.02
    poison: float = 0.01


#: Users who answer every display, on a perfect network.
TIDY = Habits(silence=0, leaving=0, prefetching=0, disordered=0, duplicates=0, poison=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Cohort:
    """The n users of one period in the order of arrival, for H positions and K arms.

    odds : (n, K + 1), the true log-odds of a click on each arm, −inf for an unknown arm
    needs : (n, H), the log-odds that an arm must exceed to be clicked at a position
    dues : (n, H), the times at which displays are answered if no decision is late
    stays : (n, H), whether the user answers the display, if its arm does not make the user leave
    tempers : (n, H), in [0, 1), what `stay` of the arm at a position must exceed for a pass; otherwise the user leaves
    transits, copies : (n, H + 1), the delays of the arrival and of each answer, and of their second copies (0: none)
    answered, clicked : (n,), the positions answered so far, and the index of the arm that was clicked, NO_ARM if none
    """

    arrived_at: list[int]
    contexts: Floats
    odds: Floats
    needs: Floats
    dues: list[list[int]]
    stays: Bools
    tempers: Floats
    prefetching: list[bool]
    transits: list[list[int]]
    copies: list[list[int]]
    answered: list[int]
    clicked: list[int]

    def __len__(self) -> int:
        return len(self.arrived_at)


class Users:
    """Users of a world.

    `rate` is the mean number of users per period of `period` milliseconds; period 0 begins at `start`. Session ids
    begin with `name`. Users never click an arm that is not of the world.

    >>> from worker.simulation.environments import make_environment
    >>> world = make_environment("opposite", dim=2, arms=2, generator=np.random.default_rng(1))
    >>> users = Users(world, horizon=3, rate=5, start=0, habits=TIDY)
    >>> users.arrivals(0)[0].key
    b'user:0-0'
    """

    def __init__(
        self,
        world: Environment,
        *,
        horizon: int,
        rate: float,
        period: int = 60_000,
        start: int = BEGINNING,
        seed: int = 0,
        habits: Habits | None = None,
        name: str = "user",
    ) -> None:
        self.world, self.arms = world, world.catalogue()
        self.habits = habits or Habits()
        self.horizon, self.rate, self.period, self.start = horizon, rate, period, start
        self._index = {arm.arm: index for index, arm in enumerate(self.arms)}
        self._stay = np.append(world.stay, 1.0)
        self._seed = seed
        self._name = name
        self._cohorts: dict[int, Cohort] = {}

    # ── cohorts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def period_of(self, time: int) -> int:
        """Return the number of the period of a time."""
        return (time - self.start) // self.period

    def cohort(self, period: int) -> Cohort:
        """Return the users of a period; drawn on the first call."""
        cohort = self._cohorts.get(period)
        if cohort is None:
            self._cohorts[period] = cohort = self._drawn(period)
        return cohort

    def expire(self, before: int) -> None:
        """Drop the cohorts of periods that ended before a time."""
        for period in [p for p in self._cohorts if self.start + (p + 1) * self.period <= before]:
            del self._cohorts[period]

    def _drawn(self, period: int) -> Cohort:
        habits, horizon = self.habits, self.horizon
        generator = self._generator(period, 0)
        count = int(generator.poisson(self.rate))
        arrived = np.sort(generator.integers(0, self.period, count)) + self.start + period * self.period
        contexts = self.world.contexts(generator, count)
        moods = generator.random((count, horizon))
        looks = generator.integers(*habits.look, (count, horizon), endpoint=True)
        prefetching = generator.random(count) < habits.prefetching
        transits = self._transits(generator, (count, horizon + 1))
        copied = generator.random((count, horizon + 1)) < habits.duplicates
        copies = np.where(copied, transits + generator.integers(1, 2 + habits.disorder, copied.shape), 0)
        # Without prefetching, the next display waits until the worker has the answer to the one before.
        waits = np.where(prefetching[:, None], 0, transits[:, 1:-1])
        waits = np.concatenate([transits[:, :1], waits], axis=1)
        dues = arrived[:, None] + np.cumsum(waits + looks, axis=1)
        stays = generator.random((count, horizon)) >= habits.leaving
        stays &= (generator.random(count) >= habits.silence)[:, None]
        stays &= dues <= arrived[:, None] + habits.patience
        tempers = generator.random((count, horizon))
        with np.errstate(divide="ignore"):
            needs = np.log(moods) - np.log1p(-moods)
        return Cohort(
            arrived_at=arrived.tolist(),
            contexts=contexts,
            odds=np.column_stack([self.world.log_odds(contexts), np.full(count, -np.inf)]),
            needs=needs,
            dues=dues.tolist(),
            stays=np.logical_and.accumulate(stays, axis=1),
            tempers=tempers,
            prefetching=prefetching.tolist(),
            transits=transits.tolist(),
            copies=copies.tolist(),
            answered=[0] * count,
            clicked=[NO_ARM] * count,
        )

    def _transits(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Ints:
        usual = generator.integers(*self.habits.transit, shape, endpoint=True)
        held_up = generator.integers(0, self.habits.disorder, shape, endpoint=True)
        disordered = generator.random(shape) < self.habits.disordered
        return np.where(disordered, np.maximum(usual, held_up), usual)

    def _generator(self, period: int, purpose: int) -> np.random.Generator:
        # Apart from the streams of `worker.simulation.world.Chance`, whose keys have one number.
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(4, period, purpose)))

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def session_id(self, period: int, index: int) -> str:
        """Return the session id of a user."""
        return f"{self._name}:{period}-{index}"

    def arrivals(self, period: int) -> list[Sent]:
        """Return the arrivals, second copies and poison of a period, by time."""
        cohort = self.cohort(period)
        records = []
        for index in range(len(cohort)):
            records.extend(_twice(self._arrival(period, index), cohort.transits[index][0], cohort.copies[index][0]))
        records.extend(self._poison(period))
        records.sort(key=lambda record: record.time)
        return records

    def _arrival(self, period: int, index: int) -> Sent:
        cohort, session_id = self.cohort(period), self.session_id(period, index)
        time, context = cohort.arrived_at[index], tuple(cohort.contexts[index].tolist())
        arrival = Arrival(session_id=session_id, occurred_at=time, context=context)
        return Sent(time, "arrivals", session_id.encode(), encode_event(arrival))

    def _poison(self, period: int) -> list[Sent]:
        generator = self._generator(period, 1)
        # After the good record has arrived: a record that reuses a session id must not be the first with it.
        delay = self.habits.disorder + self.habits.transit[1] + 1
        records = []
        for index in np.flatnonzero(generator.random(len(self.cohort(period))) < self.habits.poison).tolist():
            good = self._arrival(period, index)
            kind = KINDS[int(generator.integers(len(KINDS)))]
            topic, value = spoilt(kind, good.value, arm=self.arms[0].arm, horizon=self.horizon)
            records.append(Sent(good.time + delay, topic, good.key, value))
        return records

    def answer(self, decision: Decision, now: int) -> list[Sent]:
        """Return the answers of the user of a decision seen at `now`, at most one for each position."""
        user = self.user_of(decision.session_id)
        if user is None:
            return []
        period, index = user
        cohort = self.cohort(period)
        if decision.position <= cohort.answered[index]:
            return []
        slate = decision.slate if cohort.prefetching[index] else decision.slate[:1]
        tokens = decision.tokens or (None,) * len(slate)
        records: list[Sent] = []
        for step, (arm, token) in enumerate(zip(slate, tokens, strict=False)):
            position = decision.position + step
            if position > self.horizon or not cohort.stays[index, position - 1]:
                break
            arm_index = self._index.get(arm, -1)
            clicked = bool(cohort.needs[index, position - 1] < cohort.odds[index, arm_index])
            if not clicked and cohort.tempers[index, position - 1] >= self._stay[arm_index]:
                break
            occurred_at = max(cohort.dues[index][position - 1], now)
            feedback = Feedback(
                session_id=decision.session_id,
                occurred_at=occurred_at,
                position=position,
                arm=arm,
                clicked=clicked,
                token=token,
            )
            record = Sent(occurred_at, "clicks", decision.session_id.encode(), encode_event(feedback))
            records.extend(_twice(record, cohort.transits[index][position], cohort.copies[index][position]))
            cohort.answered[index] = position
            if clicked:
                cohort.clicked[index] = arm_index
                break
        return records

    def user_of(self, session_id: str) -> tuple[int, int] | None:
        """Return the period of a session's user and the index in its cohort; None for a foreign session."""
        name, _, rest = session_id.partition(":")
        period, _, index = rest.partition("-")
        if name != self._name or not (period.isdecimal() and index.isdecimal()):
            return None
        return int(period), int(index)

    # ── slates ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def arm_indices(self, slate: Sequence[str]) -> list[int]:
        """Return the arms of a slate as H indices: K for an unknown arm, NO_ARM after the end of the slate."""
        indices = [self._index.get(arm, len(self._index)) for arm in slate[: self.horizon]]
        return indices + [NO_ARM] * (self.horizon - len(indices))

    def slates(self, period: int, served: Mapping[str, tuple[str, ...]]) -> tuple[Ints, Ints]:
        """Turn slates by session into the indices of the users served, (m,), and their arm indices, (m, H)."""
        sessions = [self.session_id(period, index) for index in range(len(self.cohort(period)))]
        users = [index for index, session in enumerate(sessions) if session in served]
        slates = [self.arm_indices(served[sessions[index]]) for index in users]
        return np.array(users, dtype=np.intp), np.array(slates, dtype=np.intp).reshape(len(users), self.horizon)


def _twice(record: Sent, transit: int, copy: int) -> list[Sent]:
    """Return a record at its arrival, and its second copy if there is one."""
    arriving = [record._replace(time=record.time + transit)]
    if copy:
        arriving.append(record._replace(time=record.time + copy))
    return arriving


# ── poison ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#: The reasons that need more than one record of a session, or a secret.
_OTHERS: Final = frozenset(("arm-mismatch", "token", "parked-overflow"))

#: All kinds: the dead-letter reasons that a single record can have.
KINDS: Final[tuple[Reason, ...]] = tuple(reason for reason in DEAD_LETTER_REASONS if reason not in _OTHERS)

_LIMITS = Limits()


def spoilt(kind: Reason, arrival: bytes, *, arm: str, horizon: int) -> tuple[Topic, bytes]:
    """Turn a good arrival into a record of a kind; return its topic and value.

    `arm` is an arm of the worker. Workers with other limits than the default may accept some of the records.

    >>> good = b'{"session_id":"s","occurred_at":5,"context":[1.0]}'
    >>> spoilt("dimension", good, arm="a", horizon=5)
    ('arrivals', b'{"session_id":"s","occurred_at":5,"context":[1.0,1.0]}')
    """
    if kind == "undecodable":
        return "arrivals", arrival[: len(arrival) // 2]
    record: dict[str, Any] = orjson.loads(arrival)
    if kind in ("position", "unknown-arm"):
        del record["context"]
        record |= {
            "position": horizon + 1 if kind == "position" else 1,
            "arm": f"no-{arm}" if kind == "unknown-arm" else arm,
            "clicked": True,
        }
        return "clicks", orjson.dumps(record)
    match kind:
        case "invalid":
            record["occurred_at"] = "noon"
        case "too-large":
            record["padding"] = "x" * _LIMITS.max_record_bytes
        case "dimension":
            record["context"] = [*record["context"], 1.0]
        case "norm":
            record["context"][0] = 2 * LARGEST_NUMBER
        case "future":
            record["occurred_at"] += 60 * _LIMITS.max_ahead
        case "past":
            record["occurred_at"] //= 1_000  # seconds
        case "session-reused":
            record["context"][0] += 1.0
    return "arrivals", orjson.dumps(record)
