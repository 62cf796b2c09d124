"""Optimism: arms of which little is known get a bonus; nothing but ties is left to chance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.bonuses import CURVE, Bonus
from worker.bandit.ordering import greedy_slates, optimistic_slates
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies.policy import Policy, Slates, required
from worker.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucbbp(Policy):
    """UCB with backward planning (Algorithm 1): argmax_k Q̂_h(k) + bonus at every position.

    Without repeats the best slate under the optimistic probabilities of the bonus.

    Examples
    --------
    >>> from worker.bandit.additive import AdditiveModel
    >>> planner = Planner(AdditiveModel.prior(dim=1, arms=2, ridge=1.0), [1.0, 2.0], horizon=2)
    >>> Ucbbp(beta=1.0).slates(planner, np.zeros((1, 1))).arms
    array([[1, 1]])
    """

    name: ClassVar[str] = "ucbbp"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, False)

    beta: float
    bonus: Bonus = CURVE

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        if not planner.repeats:
            arms = optimistic_slates(planner, contexts, beta=self.beta, bonus=self.bonus, masked=masked)
            return Slates.certain(arms, True)
        _, exploring = self.both(planner, contexts, masked)
        return Slates.certain(exploring, True)

    def both(self, planner: Planner, contexts: Floats, masked: Masked | None) -> tuple[Ints, Ints]:
        """Return the greedy and the optimistic arms (with repeats): (n, H) each."""
        plan = planner.greedy(contexts, masked)
        optimistic = planner.optimistic(contexts, plan.continuations, beta=self.beta, bonus=self.bonus, masked=masked)
        return plan.arms, optimistic


@dataclass(frozen=True, slots=True, kw_only=True)
class Aucbbp(Policy):
    """Active UCBBP (Algorithm 2): the optimistic arm only where it is worth the most, the greedy one elsewhere.

    A session explores at step h if its score zᵀA⁻¹z, at its optimistic arm, is among the `budget` highest of the batch,
    or on a stream, where no batch is ever whole, above `thresholds[h]` (docs/math.md §5). Of the sessions with that
    very score, as where contexts are few, the share `ties[h]` explores, all by default. Without repeats a session
    explores as a whole, by its first position.
    """

    name: ClassVar[str] = "aucbbp"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, False)
    is_selective: ClassVar[bool] = True

    beta: float
    bonus: Bonus = CURVE
    budget: int | None = None
    thresholds: tuple[float, ...] | None = None
    ties: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.thresholds is None):
            raise InputError("aucbbp needs either a budget (a batch) or thresholds (a stream)")

    @property
    def needs_chance(self) -> bool:
        """Whether some ties explore and some do not."""
        return self.ties is not None and any(share < 1 for share in self.ties)

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        if self.thresholds is not None and len(self.thresholds) != planner.horizon:
            raise InputError(f"{len(self.thresholds)} thresholds for a horizon of {planner.horizon}")
        optimist = Ucbbp(beta=self.beta, bonus=self.bonus)
        if planner.repeats:
            greedy, exploring = optimist.both(planner, contexts, masked)
        else:
            exploring = optimist.slates(planner, contexts, masked).arms
            greedy = greedy_slates(planner, contexts, masked)
        scores = exploration_scores(planner, contexts, exploring)
        # Without repeats two slates cannot be mixed: the first position decides for all.
        chosen = self._chosen(scores if planner.repeats else scores[:, :1], uniforms)
        return Slates.certain(np.where(chosen, exploring, greedy), chosen)

    def _chosen(self, scores: Floats, uniforms: Floats | None) -> NDArray[np.bool_]:
        if self.thresholds is not None:
            steps = scores.shape[1]
            thresholds = _array(self.thresholds)[:steps]
            if not self.needs_chance:
                return np.asarray(scores >= thresholds)
            drawn = required(uniforms)[:, :steps, 0] < _array(self.ties or ())[:steps]
            return np.asarray((scores > thresholds) | ((scores == thresholds) & drawn))
        chosen = np.zeros(scores.shape, dtype=bool)
        highest = np.argsort(-scores, axis=0, kind="stable")[: self.budget]
        np.put_along_axis(chosen, highest, True, axis=0)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class MyopicUcb(Policy):
    """An upper confidence bound without planning: each position as if it were the last."""

    name: ClassVar[str] = "myopic-ucb"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, True)

    beta: float
    bonus: Bonus = CURVE

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        now = np.zeros((len(contexts), 2), dtype=planner.dtype)
        columns = []
        for _ in range(planner.horizon):
            arms = planner.optimistic(contexts, now, beta=self.beta, bonus=self.bonus, masked=masked)
            columns.append(arms)
            if planner.repeats:
                columns *= planner.horizon
                break
            shown = np.hstack(columns)
            masked = _without(planner, masked, shown)
        return Slates.certain(np.hstack(columns), True)


def exploration_scores(planner: Planner, contexts: Floats, arms: Ints) -> Floats:
    """Return zᵀA⁻¹z of the arms of slates, 0 where there is none: (n, H) → (n, H), float64, row by row."""
    scores = planner.model.squared_widths_of(contexts, arms)
    scores[arms == NO_ARM] = 0.0
    return scores


def _without(planner: Planner, masked: Masked | None, shown: Ints) -> Masked | None:
    """Return the exclusions plus what was shown already: (n, h)."""
    pairs = np.argwhere(shown != NO_ARM)
    columns = np.searchsorted(planner.shown, shown[pairs[:, 0], pairs[:, 1]])
    rows = pairs[:, 0] if masked is None else np.concatenate([masked.rows, pairs[:, 0]])
    columns = columns if masked is None else np.concatenate([masked.columns, columns])
    order = np.argsort(rows, kind="stable")
    return Masked(rows[order], columns[order])


@lru_cache(maxsize=256)
def _array(numbers: tuple[float, ...]) -> Floats:
    """Return numbers of a version as an array; do not change it."""
    return np.asarray(numbers)
