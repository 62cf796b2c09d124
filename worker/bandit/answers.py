"""What happens between two displays of a session: users who do not click go on, or leave (docs/math.md §8).

Users leave, at some arms and positions more than at others. A display of arm k at position h is clicked with
probability f_kh. Of the users who do not click, a share s_kh = min(1, ρ_k r_h) goes on to the next display; for the
others the session is over. So

    Q_h(k) = f_kh e_k + (1 − f_kh) s_kh V_{h+1}

Both rates are learned from counts of a closed window: of each session, the displays up to the highest answered position
are known, and the one after it, unless that answer was a click. A pass says that the user went on. A display without an
answer was not clicked, and the user left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, ArrayValue, Floats, Ints, chosen, frozen_array
from worker.errors import InputError

#: Displays at the rate of all arms (ρ_k), and passes as expected (r_h), that a rate starts from.
PRIOR_DISPLAYS = 20.0
PRIOR_ANSWERS = 50.0
#: Rounds in which both rates are fitted by turns. Pooled once, an arm that is shown only at the last position would
#: take the rate of that position for its own.
ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerRates:
    """How likely users who do not click go on: ρ_k of each arm, (K,), and r_h of each position, (H,)."""

    arms: Floats
    positions: Floats

    @property
    def are_all_one(self) -> bool:
        """Whether everybody goes on."""
        return bool((self.arms == 1).all() and (self.positions == 1).all())

    def of_arms(self, shown: Ints, horizon: int) -> Floats:
        """Return the rates of these arms at each position, (H, len(shown)); later positions have the last one's."""
        positions = self.positions[np.minimum(np.arange(horizon), len(self.positions) - 1)]
        return np.minimum(1.0, np.multiply.outer(positions, self.arms[shown]))

    def of_slates(self, arms: Ints) -> Floats:
        """Return the rates of the displays of slates, 1 where there is no known arm: (n, h) → (n, h)."""
        known = (arms >= 0) & (arms < len(self.arms))
        rates = self.arms.take(arms, mode="clip") if len(self.arms) else np.ones(arms.shape)
        positions = np.concatenate([self.positions, np.repeat(self.positions[-1:], max(0, arms.shape[1]))])
        return np.where(known, np.minimum(1.0, rates * positions[: arms.shape[1]]), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerCounts(ArrayValue):
    """Displays without a click, and those of them that were answered by a pass, by position and arm, (H, K) each.

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
        """Return ρ_k and r_h, fitted by turns, drawn towards the rate of all arms and towards 1."""
        answers, by_position = self.answered.sum(axis=0), self.answered.sum(axis=1)
        # One answer more than counted: were the rate of all arms 0, no arm could be told from a mute one.
        overall = (float(answers.sum()) + 1) / (float(self.displayed.sum()) + 1)
        positions = np.ones(self.horizon)
        for _ in range(ROUNDS):
            arms = (answers + PRIOR_DISPLAYS * overall) / (positions @ self.displayed + PRIOR_DISPLAYS)
            positions = (by_position + PRIOR_ANSWERS) / (self.displayed @ arms + PRIOR_ANSWERS)
        return AnswerRates(arms=arms, positions=positions)

    def faded(self, keep: float) -> AnswerCounts:
        """Forget as the estimate does."""
        return replace(self, displayed=keep * self.displayed, answered=keep * self.answered)

    def choose_arms(self, arms: Sequence[int]) -> AnswerCounts:
        """Return the counts of these arms alone, in this order; −1 stands for one that was never displayed."""
        columns = np.array(arms, dtype=np.intp)
        return replace(self, displayed=chosen(self.displayed, columns, 1), answered=chosen(self.answered, columns, 1))

    def with_horizon(self, horizon: int) -> AnswerCounts:
        """Cut the counts to the horizon, or add positions that were never displayed."""
        more = ((0, max(0, horizon - self.horizon)), (0, 0))
        return replace(
            self, displayed=np.pad(self.displayed[:horizon], more), answered=np.pad(self.answered[:horizon], more)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cascade:
    """How click probabilities change along a session, and who goes on.

    odds : (H,), e^{b_h}: what the odds of a click are multiplied by at each position; None if by 1 everywhere
    rates : (H, columns), s_kh; None if everybody goes on
    """

    odds: Array | None = None
    rates: Array | None = None

    @classmethod
    def of(cls, effects: Floats, rates: AnswerRates | None, *, shown: Ints, horizon: int) -> Cascade:
        """Return the cascade of the arms `shown` under effects b_h of positions and rates."""
        effects = effects[np.minimum(np.arange(horizon), len(effects) - 1)]
        return cls(
            odds=np.exp(effects) if effects.any() else None,
            rates=None if rates is None or rates.are_all_one else rates.of_arms(shown, horizon),
        )

    def astype(self, dtype: DTypeLike) -> Cascade:
        """Return the same numbers in another precision."""
        odds, rates = (None if part is None else part.astype(dtype) for part in (self.odds, self.rates))
        return Cascade(odds=odds, rates=rates)

    def choose(self, columns: Ints) -> Cascade:
        """Return the cascade of these columns alone."""
        return Cascade(odds=self.odds, rates=None if self.rates is None else self.rates[:, columns])

    def chances(self, first: Array, h: int) -> Array:
        """Return the click probabilities at position h, from 0, of arms that have `first` at the first one."""
        return first if self.odds is None or not h else shifted(first, self.odds[h])

    def ahead(self, values: Array, h: int) -> Array:
        """Return s_kh V of a display at position h that is not clicked: V (n,) → (n, columns or 1)."""
        return values[:, None] if self.rates is None else values[:, None] * self.rates[h]


def shifted(chances: Array, odds: Array) -> Array:
    """Return probabilities whose odds are multiplied.

    >>> shifted(np.array([0.5, 0.2]), np.array([1.0, 4.0]))
    array([0.5, 0.5])
    """
    raised: Array = chances * odds
    raised /= raised + (1 - chances)
    return raised
