"""From arrivals to slates of arm ids, under one version of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from worker.bandit.planning import NO_ARM, Masked, Planner
from worker.bandit.policies import Policy, Slates, make_policy, random_slates
from worker.bandit.precision import Floats
from worker.errors import AdcascadeError
from worker.stream.chance import lottery, session_uniforms
from worker.stream.contexts import stack_packed
from worker.stream.events import Arrival, Mode
from worker.stream.parameters import Parameters


@dataclass(slots=True)
class Slate:
    """What was planned for one session, per position; `propensities` is None where nothing was left to chance."""

    arms: tuple[str, ...]
    modes: tuple[Mode, ...]
    propensities: tuple[float, ...] | None
    values: tuple[float, ...]


class SlatePlanner:
    """Plans arrivals under one version; what depends on the version alone is prepared once."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.names = [arm.arm for arm in parameters.arms]
        self.index = {arm: index for index, arm in enumerate(self.names)}

    @cached_property
    def _planner(self) -> Planner:
        settings = self.parameters.settings
        return Planner(
            self.parameters.posterior,
            self.parameters.rewards,
            horizon=settings.horizon,
            active=np.array([arm.active for arm in self.parameters.arms]),
            repeats=settings.repeats,
        )

    @cached_property
    def _policy(self) -> Policy:
        settings = self.parameters.settings
        return make_policy(
            settings.policy,
            beta=self.parameters.beta,
            bonus=settings.bonus,
            epsilon=settings.epsilon,
            thresholds=self.parameters.thresholds or (0.0,) * settings.horizon,
        )

    def plan(self, arrivals: Sequence[Arrival], contexts: Sequence[bytes]) -> list[Slate]:
        """Plan a batch; `contexts` are the packed contexts of the arrivals. A slate depends on its arrival alone."""
        if not any(arm.active for arm in self.parameters.arms):
            return [Slate((), (), None, ())] * len(arrivals)
        slates: list[Slate] = [Slate((), (), None, ())] * len(arrivals)
        for mode, rows in self._by_mode(arrivals):
            part = [arrivals[row] for row in rows]
            stacked = stack_packed([contexts[row] for row in rows], self.parameters.settings.dim)
            for row, slate in zip(rows, self._planned(mode, part, stacked), strict=True):
                slates[row] = slate
        return slates

    def _by_mode(self, arrivals: Sequence[Arrival]) -> list[tuple[Mode | None, Sequence[int]]]:
        """Split rows into those whose whole session is drawn at random, and those that the policy plans (None)."""
        settings = self.parameters.settings
        if self.parameters.folds < settings.warmup:
            rest: Mode | None = "warmup"
        else:
            rest = "random" if settings.policy == "random" else None
        if not settings.random_share:
            return [(rest, range(len(arrivals)))]
        drawn = [lottery(settings.salt, arrival.session_id) < settings.random_share for arrival in arrivals]
        chosen = [row for row, hit in enumerate(drawn) if hit]
        others = [row for row, hit in enumerate(drawn) if not hit]
        return [(mode, rows) for mode, rows in (("random", chosen), (rest, others)) if rows]

    def _planned(self, mode: Mode | None, arrivals: list[Arrival], contexts: Floats) -> list[Slate]:
        settings = self.parameters.settings
        try:
            masked = self._masked(arrivals)
            needed = mode is not None or settings.policy == "epsilon-greedy"
            names = [arrival.session_id for arrival in arrivals]
            uniforms = session_uniforms(settings.salt, names, settings.horizon) if needed else None
            with np.errstate(all="ignore"):
                if mode is not None and uniforms is not None:
                    slates = random_slates(self._planner, len(arrivals), uniforms[:, :, 1], masked)
                else:
                    slates = self._policy.slates(self._planner, contexts, masked, uniforms)
                values = self._planner.slate_values(contexts, slates.arms)
        except (AdcascadeError, ArithmeticError, ValueError, IndexError):
            # There is always an answer: whatever is wrong with this version, the user gets the dearest ads.
            return [self._fallback(arrival) for arrival in arrivals]
        planned = self._named(mode, slates, values)
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            planned[row] = self._fallback(arrivals[row])
        return planned

    def _masked(self, arrivals: list[Arrival]) -> Masked | None:
        index = self.index
        return self._planner.masked(
            [[index[arm] for arm in a.exclude if arm in index] if a.exclude else () for a in arrivals]
        )

    def _named(self, mode: Mode | None, slates: Slates, values: Floats) -> list[Slate]:
        names, horizon = self.names, slates.arms.shape[1]
        bits = slates.explored @ (1 << np.arange(horizon)) if mode is None else None
        certain = bool((slates.propensities == 1).all())
        planned = []
        for row, (arms, worth) in enumerate(zip(slates.arms.tolist(), values.tolist(), strict=True)):
            length = horizon
            if arms[-1] == NO_ARM:
                length = arms.index(NO_ARM)
            planned.append(
                Slate(
                    tuple([names[arm] for arm in arms[:length]]),
                    _modes(int(bits[row]), length) if bits is not None else (mode,) * length,
                    None if certain else tuple(slates.propensities[row, :length].tolist()),
                    tuple(worth[:length]),
                )
            )
        return planned

    def _fallback(self, arrival: Arrival) -> Slate:
        settings = self.parameters.settings
        excluded = set(arrival.exclude)
        eligible = [arm for arm in self.parameters.arms if arm.active and arm.arm not in excluded]
        eligible.sort(key=lambda arm: -arm.reward)
        arms = [arm.arm for arm in eligible[: settings.horizon]]
        if settings.repeats:
            arms = arms[:1] * settings.horizon
        mode: Mode = "fallback"
        return Slate(tuple(arms), (mode,) * len(arms), None, (0.0,) * len(arms))


@lru_cache(maxsize=4096)
def _modes(bits: int, length: int) -> tuple[Mode, ...]:
    return tuple("explore" if bits >> position & 1 else "exploit" for position in range(length))
