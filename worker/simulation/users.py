"""Simulated users: they come, look at what they are shown, click or pass, and are as untidy as real ones.

The users of a period (a cohort) are drawn all at once from the seed and the number of the period: when they come, who
they are, how patient they are, how they would answer anything shown at any position. So a user's behaviour is a
function of the seed and of what is shown, never of how the run went: after a restart the same users go on as if nothing
had happened, and every policy meets the same crowd.

No runner in here: decisions go in, records come out, each with the time at which it reaches the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worker.bandit.planning import NO_ARM
from worker.bandit.precision import Floats, Ints
from worker.errors import InputError
from worker.simulation.environments import Environment
from worker.simulation.poison import KINDS, spoilt
from worker.stream.codec import encode_arrival, encode_feedback, session_key
from worker.stream.events import Arrival, Decision, Feedback

Bools = NDArray[np.bool_]
Topic: TypeAlias = Literal["arrivals", "clicks"]

#: Where the time of a simulation begins: a whole minute, and the same in every run.
BEGINNING = 1_767_225_600_000  # 2026-01-01 00:00 UTC


class Sent(NamedTuple):
    """A record and when it reaches the worker; `topic` without prefix."""

    time: int
    topic: Topic
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How users and their network behave, whatever is shown; times in milliseconds, the rest are shares.

    A display is looked at for `look`, shortest to longest. `silent` users never answer, any user is `leaving` at a
    display with that probability, and nobody stays for longer than `patience`. `prefetching` clients go through the
    slate of their first decision, the others ask for every display. A record takes `transit` to arrive; some are
    `disordered`, held up for as long as `held_up` so that later ones overtake them; some come again (`duplicated`).
    `poison` records come beside the good ones, as a share of the users.
    """

    look: tuple[int, int] = (1_500, 6_500)
    patience: int = 50_000
    silent: float = 0.03
    leaving: float = 0.01
    prefetching: float = 0.2
    transit: tuple[int, int] = (20, 300)
    held_up: int = 3_500
    disordered: float = 0.03
    duplicated: float = 0.02
    poison: float = 0.01

    def __post_init__(self) -> None:
        for name in ("silent", "leaving", "prefetching", "disordered", "duplicated", "poison"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        for name in ("look", "transit"):
            shortest, longest = getattr(self, name)
            if not 0 <= shortest <= longest:
                raise InputError(f"{name} must go from a shorter to a longer time, not from {shortest} to {longest}")
        if min(self.patience, self.held_up) < 0:
            raise InputError("patience and held_up must not be negative")


#: Users who answer everything at once, in order, on a perfect network.
TIDY = Habits(silent=0, leaving=0, prefetching=0, disordered=0, duplicated=0, poison=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Cohort:
    """The users of one period, by rising time of arrival; n users, H positions.

    `offsets` (n,) is x·θ_x of the truth, `needs` (n, H) the log-odds that an arm must exceed to be clicked there.
    `dues` (n, H) are the times at which a display will have been looked at if nothing outside delays it, `stays` (n, H)
    whether the user answers it. `transits` and `copies` (n, H+1) are of the arrival and of each answer: how long the
    record takes, and how long its second copy takes (0: there is none). `answered` counts positions, and changes.
    """

    arrived_at: list[int]
    contexts: Floats
    offsets: Floats
    needs: Floats
    dues: list[list[int]]
    stays: Bools
    prefetching: list[bool]
    transits: list[list[int]]
    copies: list[list[int]]
    answered: list[int]

    def __len__(self) -> int:
        return len(self.arrived_at)


class Users:
    """A crowd with a known truth.

    Parameters
    ----------
    world : the true model
    arms : the ids of its arms, in its order; a user never clicks any other
    horizon : the most displays H that they look at
    rate : users per period, on average
    period : milliseconds
    start : when period 0 begins
    name : makes the session ids of several crowds differ

    Examples
    --------
    >>> from worker.simulation.environments import make_environment
    >>> world = make_environment("opposite", dim=2, arms=2, generator=np.random.default_rng(1))
    >>> users = Users(world, ["shoes", "hats"], horizon=3, rate=5, start=0, habits=TIDY)
    >>> users.arrivals(0)[0].key
    b'user:0-0'
    """

    def __init__(
        self,
        world: Environment,
        arms: Sequence[str],
        *,
        horizon: int,
        rate: float,
        period: int = 60_000,
        start: int = BEGINNING,
        seed: int = 0,
        habits: Habits | None = None,
        name: str = "user",
    ) -> None:
        if len(arms) != len(world.rewards):
            raise InputError(f"{len(arms)} names for {len(world.rewards)} arms")
        self.world = world
        self.habits = habits or Habits()
        self.horizon, self.rate, self.period, self.start = horizon, rate, period, start
        self._names = tuple(arms)
        self._index = {arm: place for place, arm in enumerate(arms)}
        # The last place stands for what the world does not know, and for no arm at all: nobody clicks there.
        self.biases = np.append(world.truth.theta_arms, -np.inf)
        self.rewards = np.append(world.rewards, 0.0)
        self._bias_of = dict(zip(arms, world.truth.theta_arms.tolist(), strict=True))
        self._seed = seed
        self._name = name
        self._cohorts: dict[int, Cohort] = {}

    # ── who they are ─────────────────────────────────────────────────────────────────────────────────────────────────

    def period_of(self, time: int) -> int:
        """Return the number of the period that a time is in."""
        return (time - self.start) // self.period

    def cohort(self, period: int) -> Cohort:
        """Return the users of a period; drawn when first asked for."""
        cohort = self._cohorts.get(period)
        if cohort is None:
            self._cohorts[period] = cohort = self._drawn(period)
        return cohort

    def forget(self, before: int) -> None:
        """Let go of the cohorts of periods that ended before a time."""
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
        copied = generator.random((count, horizon + 1)) < habits.duplicated
        copies = np.where(copied, transits + generator.integers(1, 2 + habits.held_up, copied.shape), 0)
        # Without prefetching, the next display is there only when the worker has heard of the one before.
        waits = np.where(prefetching[:, None], 0, transits[:, 1:-1])
        waits = np.concatenate([transits[:, :1], waits], axis=1)
        dues = arrived[:, None] + np.cumsum(waits + looks, axis=1)
        stays = generator.random((count, horizon)) >= habits.leaving
        stays &= (generator.random(count) >= habits.silent)[:, None]
        stays &= dues <= arrived[:, None] + habits.patience
        with np.errstate(divide="ignore"):
            needs = np.log(moods) - np.log1p(-moods)
        return Cohort(
            arrived_at=arrived.tolist(),
            contexts=contexts,
            offsets=contexts @ self.world.truth.theta_context,
            needs=needs,
            dues=dues.tolist(),
            stays=np.logical_and.accumulate(stays, axis=1),
            prefetching=prefetching.tolist(),
            transits=transits.tolist(),
            copies=copies.tolist(),
            answered=[0] * count,
        )

    def _transits(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Ints:
        usual = generator.integers(*self.habits.transit, shape, endpoint=True)
        held_up = generator.integers(0, self.habits.held_up, shape, endpoint=True)
        disordered = generator.random(shape) < self.habits.disordered
        return np.where(disordered, np.maximum(usual, held_up), usual)

    def _generator(self, period: int, purpose: int) -> np.random.Generator:
        # Children 0 to 3 of the seed are the streams of `worker.simulation.environments.Chance`.
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(4, period, purpose)))

    # ── what they send ───────────────────────────────────────────────────────────────────────────────────────────────

    def session_id(self, period: int, place: int) -> str:
        """Return the session id of a user."""
        return f"{self._name}:{period}-{place}"

    def arrivals(self, period: int) -> list[Sent]:
        """Return all that reaches the worker unasked for: arrivals, second copies, poison; by time."""
        cohort = self.cohort(period)
        records = []
        for place in range(len(cohort)):
            time, key, value = self._arrival(cohort, period, place)
            records.extend(
                _twice(Sent(time, "arrivals", key, value), cohort.transits[place][0], cohort.copies[place][0])
            )
        records.extend(self._poison(cohort, period))
        records.sort(key=lambda record: record.time)
        return records

    def again(self, since: int, now: int) -> list[Sent]:
        """Return the arrivals of everybody who came since a time, sent once more: how clients recover an answer."""
        records = []
        for period in range(max(0, self.period_of(since)), self.period_of(now) + 1):
            cohort = self.cohort(period)
            for place, arrived_at in enumerate(cohort.arrived_at):
                if since < arrived_at <= now:
                    _, key, value = self._arrival(cohort, period, place)
                    records.append(Sent(now, "arrivals", key, value))
        return records

    def _arrival(self, cohort: Cohort, period: int, place: int) -> tuple[int, bytes, bytes]:
        session_id = self.session_id(period, place)
        time = cohort.arrived_at[place]
        arrival = Arrival(session_id=session_id, occurred_at=time, context=tuple(cohort.contexts[place].tolist()))
        return time, session_key(session_id), encode_arrival(arrival)

    def _poison(self, cohort: Cohort, period: int) -> list[Sent]:
        generator = self._generator(period, 1)
        records = []
        for place in np.flatnonzero(generator.random(len(cohort)) < self.habits.poison).tolist():
            time, key, value = self._arrival(cohort, period, place)
            topic, record = spoilt(
                KINDS[int(generator.integers(len(KINDS)))], value, arm=self._names[0], horizon=self.horizon
            )
            # After the good one has surely come: what abuses an id must not be the first to use it.
            records.append(Sent(time + self.habits.held_up + self.habits.transit[1] + 1, topic, key, record))
        return records

    def answer(self, decision: Decision, now: int) -> list[Sent]:
        """Return what the user of a decision, seen at `now`, does about it: at most once for each position."""
        whose = self.whose(decision.session_id)
        if whose is None:
            return []
        period, place = whose
        cohort = self.cohort(period)
        if decision.position <= cohort.answered[place]:
            return []
        slate = decision.slate if cohort.prefetching[place] else decision.slate[:1]
        tokens = decision.tokens or (None,) * len(slate)
        records: list[Sent] = []
        for step, (arm, token) in enumerate(zip(slate, tokens, strict=False)):
            position = decision.position + step
            if position > self.horizon or not cohort.stays[place, position - 1]:
                break
            need, bias = cohort.needs[place, position - 1], self._bias_of.get(arm, -np.inf)
            clicked = bool(need < cohort.offsets[place] + bias)
            occurred_at = max(cohort.dues[place][position - 1], now)
            feedback = Feedback(
                session_id=decision.session_id,
                occurred_at=occurred_at,
                position=position,
                arm=arm,
                clicked=clicked,
                token=token,
            )
            record = Sent(occurred_at, "clicks", session_key(decision.session_id), encode_feedback(feedback))
            records.extend(_twice(record, cohort.transits[place][position], cohort.copies[place][position]))
            cohort.answered[place] = position
            if clicked:
                break
        return records

    def whose(self, session_id: str) -> tuple[int, int] | None:
        """Return the period and the place of a session's user; None if it is none of this crowd."""
        name, _, rest = session_id.partition(":")
        period, _, place = rest.partition("-")
        if name != self._name or not (period.isdecimal() and place.isdecimal()):
            return None
        return int(period), int(place)

    # ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────

    def slates(self, period: int, served: Mapping[str, tuple[str, ...]]) -> tuple[Ints, Ints]:
        """Turn slates by session into the users served (m,) of a cohort, and their arms (m, H) as places.

        An arm that the world does not know has a place of its own, beyond its arms (see `biases` and `rewards`).
        """
        places, rows = [], []
        for place in range(len(self.cohort(period))):
            slate = served.get(self.session_id(period, place))
            if slate is not None:
                places.append(place)
                arms = [self._index.get(arm, len(self._index)) for arm in slate]
                rows.append(arms + [NO_ARM] * (self.horizon - len(arms)))
        return np.array(places, dtype=np.intp), np.array(rows, dtype=np.intp).reshape(len(rows), self.horizon)

    def outcomes(self, period: int, places: Ints, slates: Ints) -> tuple[Ints, Ints]:
        """Return what users (m,) make of slates (m, H), the same as `answer` does step by step.

        Returns
        -------
        clicked : (m,), the position clicked, counted from 0, or −1
        answered : (m,), how many positions were answered
        """
        cohort = self.cohort(period)
        odds = cohort.offsets[places][:, None] + self.biases[slates]
        answers = cohort.stays[places] & (slates != NO_ARM)
        clicks = answers & (cohort.needs[places] < odds)
        any_click = clicks.any(axis=1)
        first = clicks.argmax(axis=1)
        return np.where(any_click, first, -1), np.where(any_click, first + 1, answers.sum(axis=1))


def _twice(record: Sent, transit: int, copy: int) -> list[Sent]:
    """Return a record as it arrives, and its second copy if there is one."""
    arriving = [record._replace(time=record.time + transit)]
    if copy:
        arriving.append(record._replace(time=record.time + copy))
    return arriving
