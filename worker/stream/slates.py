"""From arrivals to slates of arm ids, under one version of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies import Policy, Random, Slates, policy_named, random_slates
from worker.errors import AdcascadeError, InputError
from worker.stream.chance import lottery, session_uniforms, stable_keys
from worker.stream.contexts import stack_packed
from worker.stream.events import Arrival, Mode
from worker.stream.parameters import Parameters


class Slate(NamedTuple):
    """The plan of one session, per position; `propensities` is None where nothing was left to chance."""

    arms: tuple[str, ...]
    modes: tuple[Mode, ...]
    propensities: tuple[float, ...] | None
    values: tuple[float, ...]


_NOTHING = Slate((), (), None, ())


class SlatePlanner:
    """Plans arrivals under one version. What it prepares for that, it prepares once."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.names = [arm.arm for arm in parameters.arms]
        self.index = parameters.indices

    @cached_property
    def _planner(self) -> Planner:
        planner = self.parameters.planner()
        if planner is None:
            raise InputError("no arm is active")
        return planner

    @cached_property
    def slate_bytes(self) -> int:
        """The most bytes that a slate adds to a record: for each position an id, a mode, a token and two numbers."""
        longest = max(map(len, map(str.encode, self.names)), default=0)
        return (self.parameters.settings.horizon + 1) * (2 * longest + 120)

    @cached_property
    def _policy(self) -> Policy:
        return self.parameters.policy()

    def prepare(self) -> None:
        """Do now, in any thread, what the first plan would do."""
        if any(arm.active for arm in self.parameters.arms):
            nobody = Arrival(session_id="", occurred_at=0, context=())
            self._planned(None, [nobody], np.zeros((1, self.parameters.settings.dim)))

    def plan(self, arrivals: Sequence[Arrival], contexts: Sequence[bytes]) -> list[Slate]:
        """Plan a batch; `contexts` are the packed contexts of the arrivals. A slate depends on its arrival alone."""
        if not any(arm.active for arm in self.parameters.arms):
            return [_NOTHING] * len(arrivals)
        parts = self._by_mode(arrivals)
        if len(parts) == 1:
            return self._planned(parts[0][0], arrivals, stack_packed(contexts, self.parameters.settings.dim))
        slates = [_NOTHING] * len(arrivals)
        for mode, rows in parts:
            part = [arrivals[row] for row in rows]
            stacked = stack_packed([contexts[row] for row in rows], self.parameters.settings.dim)
            for row, slate in zip(rows, self._planned(mode, part, stacked), strict=True):
                slates[row] = slate
        return slates

    def _by_mode(self, arrivals: Sequence[Arrival]) -> list[tuple[Mode | None, Sequence[int]]]:
        """Split rows into sessions drawn at random as a whole, and sessions that the policy plans (None)."""
        settings = self.parameters.settings
        if self.parameters.is_warming_up:
            rest: Mode | None = "warmup"
        else:
            rest = "random" if policy_named(settings.policy) is Random else None
        if not settings.random_share:
            return [(rest, range(len(arrivals)))]
        drawn = [lottery(settings.salt, arrival.session_id) < settings.random_share for arrival in arrivals]
        chosen = [row for row, hit in enumerate(drawn) if hit]
        others = [row for row, hit in enumerate(drawn) if not hit]
        return [(mode, rows) for mode, rows in (("random", chosen), (rest, others)) if rows]

    def _planned(self, mode: Mode | None, arrivals: Sequence[Arrival], contexts: Floats) -> list[Slate]:
        settings = self.parameters.settings
        try:
            masked = self._masked(arrivals)
            needed = mode is not None or self._policy.needs_chance
            names = [arrival.session_id for arrival in arrivals]
            uniforms = session_uniforms(settings.salt, names, settings.horizon) if needed else None
            with np.errstate(all="ignore"):
                contexts = self.parameters.prepared(contexts)
                if mode is not None and uniforms is not None:
                    slates = random_slates(self._planner, len(arrivals), uniforms[:, :, 1], masked)
                else:
                    keys = stable_keys(names, settings.salt) if settings.spread else None
                    slates = self._policy.slates(self._planner, contexts, masked, uniforms, keys)
                values = self._planner.slate_values(contexts, slates.arms)
        except (AdcascadeError, ArithmeticError, ValueError, IndexError):
            # There is always an answer: under an unusable version, the ads with the highest rewards.
            return [self.fallback(arrival) for arrival in arrivals]
        planned = self._named(mode, slates, values)
        # A row without an arm has no eligible arm, or scores that are not numbers.
        sound, first = np.isfinite(values), slates.arms[:, 0] != NO_ARM
        if sound.all() and first.all():
            return planned
        doubtful = ~(sound.all(axis=1) & first)
        for row in np.flatnonzero(doubtful).tolist():
            planned[row] = self.fallback(arrivals[row])
        return planned

    def _masked(self, arrivals: Sequence[Arrival]) -> Masked | None:
        if not any(arrival.exclude for arrival in arrivals):
            return None
        index = self.index
        return self._planner.masked([[index[arm] for arm in arrival.exclude if arm in index] for arrival in arrivals])

    def _named(self, mode: Mode | None, slates: Slates, values: Floats) -> list[Slate]:
        """Turn indices into ids."""
        bits = slates.explored.dot(1 << np.arange(slates.arms.shape[1])).tolist() if mode is None else [0] * len(values)
        names = self.names.__getitem__
        certain = bool((slates.propensities == 1).all())
        return [
            Slate(
                tuple(map(names, arms[:length])),
                _modes(mode, explored, length),
                None if certain else tuple(propensities[:length]),
                tuple(worth[:length]),
            )
            for arms, explored, worth, propensities, length in zip(
                slates.arms.tolist(),
                bits,
                values.tolist(),
                slates.propensities.tolist(),
                (slates.arms != NO_ARM).sum(axis=1).tolist(),
                strict=True,
            )
        ]

    @cached_property
    def _highest_paying_first(self) -> list[str]:
        active = (arm for arm in self.parameters.arms if arm.active)
        return [arm.arm for arm in sorted(active, key=lambda arm: -arm.reward)]

    def fallback(self, arrival: Arrival) -> Slate:
        """Return the eligible ads with the highest rewards: a slate without planning."""
        settings, excluded = self.parameters.settings, set(arrival.exclude)
        eligible = (arm for arm in self._highest_paying_first if arm not in excluded)
        arms = list(islice(eligible, settings.horizon))
        if settings.repeats:
            arms = arms[:1] * settings.horizon
        mode: Mode = "fallback"
        return Slate(tuple(arms), (mode,) * len(arms), None, (0.0,) * len(arms))


def prepared(parameters: Parameters) -> SlatePlanner:
    """Return the planner of a version with all that serving and the status page need of it; this can take a second.

    Call it in a thread: large versions are factorised without the interpreter lock.
    """
    parameters.sha256  # noqa: B018 - computed once, here
    planner = SlatePlanner(parameters)
    planner.prepare()
    if parameters.arms:
        with np.errstate(all="ignore"), suppress(AdcascadeError, ArithmeticError, ValueError):
            nobody = np.zeros((1, parameters.settings.dim))
            parameters.model.squared_widths_of(nobody, np.zeros((1, 1), dtype=np.intp))
    return planner


@lru_cache(maxsize=4096)
def _modes(mode: Mode | None, explored: int, length: int) -> tuple[Mode, ...]:
    """Return the modes of a slate: one for all, or by the bits of the positions that explored."""
    if mode is not None:
        return (mode,) * length
    return tuple("explore" if explored >> position & 1 else "exploit" for position in range(length))
