"""Answer rates: how likely a display is answered at all, by a click or a pass (docs/math.md §8).

Users leave, at some arms and positions more than at others, and some arms never get an answer (a broken creative, a
lost pixel). A display of arm k at position h is answered with probability min(1, ρ_k r_h); otherwise the session is
over. So

    Q_h(k) = ρ_k r_h · [f_k e_k + (1 − f_k) V_{h+1}]

Both rates are learned from counts of a closed window: of each session, the displays up to the highest answered position
were answered, and the one after it, unless that answer was a click, was displayed and not answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.arrays import Floats, Ints, frozen_array
from worker.errors import InputError

#: Displays at the rate of all arms (ρ_k), and answers as expected (r_h), that a rate starts from.
PRIOR_DISPLAYS = 20.0
PRIOR_ANSWERS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerRates:
    """ρ_k of each arm, (K,), and r_h of each position, (H,)."""

    arms: Floats
    positions: Floats

    @classmethod
    def everybody(cls, *, arms: int, horizon: int) -> AnswerRates:
        """Return the rates where every display is answered."""
        return cls(arms=np.ones(arms), positions=np.ones(horizon))

    @property
    def are_all_one(self) -> bool:
        """Whether every display is answered."""
        return bool((self.arms == 1).all() and (self.positions == 1).all())

    def choose_arms(self, arms: Ints) -> AnswerRates:
        """Return the rates of these arms alone."""
        return AnswerRates(arms=self.arms[arms], positions=self.positions)

    def of_arms(self, shown: Ints) -> Floats:
        """Return the rates of these arms at each position, (H, len(shown))."""
        return np.minimum(1.0, np.multiply.outer(self.positions, self.arms[shown]))

    def of_slates(self, arms: Ints) -> Floats:
        """Return the rates of the displays of slates, 1 where there is no known arm: (n, h) → (n, h)."""
        known = (arms >= 0) & (arms < len(self.arms))
        rates = self.arms.take(arms, mode="clip") if len(self.arms) else np.ones(arms.shape)
        positions = np.concatenate([self.positions, np.repeat(self.positions[-1:], max(0, arms.shape[1]))])
        return np.where(known, np.minimum(1.0, rates * positions[: arms.shape[1]]), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerCounts:
    """Displays and answers so far, by position and arm, (H, K) each.

    Examples
    --------
    >>> counts = AnswerCounts.none(arms=2, horizon=1)
    >>> mute = counts.plus(positions=np.zeros(80, dtype=int), arms=np.ones(80, dtype=int), answered=np.zeros(80))
    >>> both = mute.plus(positions=np.zeros(80, dtype=int), arms=np.zeros(80, dtype=int), answered=np.ones(80))
    >>> both.rates().arms.round(2)
    array([0.9, 0.1])
    """

    displayed: Floats
    answered: Floats

    def __post_init__(self) -> None:
        for name in ("displayed", "answered"):
            array = frozen_array(getattr(self, name))
            if array.ndim != 2 or (array < 0).any():
                raise InputError(f"answers.{name} must be counts, a row per position and a column per arm")
            object.__setattr__(self, name, array)
        if self.displayed.shape != self.answered.shape or (self.answered > self.displayed).any():
            raise InputError("answers.answered must be at most answers.displayed, of the same shape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AnswerCounts):
            return NotImplemented
        return np.array_equal(self.displayed, other.displayed) and np.array_equal(self.answered, other.answered)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def none(cls, *, arms: int, horizon: int) -> AnswerCounts:
        """Return the counts before any display."""
        return cls(displayed=np.zeros((horizon, arms)), answered=np.zeros((horizon, arms)))

    @property
    def arms(self) -> int:
        """The number K of arms."""
        return int(self.displayed.shape[1])

    @property
    def horizon(self) -> int:
        """The number H of positions."""
        return int(self.displayed.shape[0])

    def plus(self, *, positions: Ints, arms: Ints, answered: Floats) -> AnswerCounts:
        """Add displays at `positions` (from 0; beyond the horizon they count for no position), 1.0 where answered."""
        inside = positions < self.horizon
        cells = positions[inside] * self.arms + arms[inside]
        shape, size = self.displayed.shape, self.displayed.size
        return AnswerCounts(
            displayed=self.displayed + np.bincount(cells, minlength=size).reshape(shape),
            answered=self.answered + np.bincount(cells, weights=answered[inside], minlength=size).reshape(shape),
        )

    def rates(self) -> AnswerRates:
        """Return ρ_k and r_h, drawn towards the rate of all arms and towards 1."""
        by_arm, answers = self.displayed.sum(axis=0), self.answered.sum(axis=0)
        # One answer more than counted: were the rate of all arms 0, no arm could be told from a mute one.
        overall = (float(answers.sum()) + 1) / (float(by_arm.sum()) + 1)
        arms = (answers + PRIOR_DISPLAYS * overall) / (by_arm + PRIOR_DISPLAYS)
        expected = self.displayed @ arms
        positions = (self.answered.sum(axis=1) + PRIOR_ANSWERS) / (expected + PRIOR_ANSWERS)
        return AnswerRates(arms=arms, positions=positions)

    def faded(self, keep: float) -> AnswerCounts:
        """Forget as the estimate does."""
        return replace(self, displayed=keep * self.displayed, answered=keep * self.answered)

    def with_arms(self, count: int) -> AnswerCounts:
        """Append arms that were never displayed."""
        more = ((0, 0), (0, count))
        return replace(self, displayed=np.pad(self.displayed, more), answered=np.pad(self.answered, more))

    def choose_arms(self, arms: Sequence[int]) -> AnswerCounts:
        """Return the counts of these arms alone, in this order."""
        chosen = list(arms)
        return replace(self, displayed=self.displayed[:, chosen], answered=self.answered[:, chosen])

    def with_horizon(self, horizon: int) -> AnswerCounts:
        """Cut the counts to the horizon, or add positions that were never displayed."""
        more = ((0, max(0, horizon - self.horizon)), (0, 0))
        return replace(
            self, displayed=np.pad(self.displayed[:horizon], more), answered=np.pad(self.answered[:horizon], more)
        )
