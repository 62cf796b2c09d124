"""Backward planning of whole slates, for a batch of contexts at once.

With repeats (the paper), V_{H+1} = 0 and for h = H … 1

    Q_h(k) = f_kh e_k + (1 − f_kh) s_kh V_{h+1}        V_h = max_k Q_h(k)

where s_kh is the share of the users without a click who go on (`answers.py`), 1 in the paper, and f_kh depends on the
position through the model's effects of positions. The greedy arm is the argmax of Q_h, the optimistic one that of Q_h
plus a bonus (docs/math.md §3). Both need only the continuation values V of the greedy plan, so positions are
independent given V. Without repeats see `ordering.py`.

Rules that hold in this file:

- **A row's result depends on that row alone**, never on its neighbours or on how a batch is split, to the bit: planning
  again after a crash must give the same slate. The model's heads hold it for f and widths (`click_model.py`); all else
  is elementwise or runs along one row.
- The kernel computes in float32 by default: enough to choose. Reported values are computed in float64.
- Arms that are not active do not enter the kernel; arms excluded for one row score −inf there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

from worker.bandit.answers import AnswerRates, Cascade
from worker.bandit.arrays import NO_ARM, Array, Floats, Ints, Keys, frozen_array, sigmoid
from worker.bandit.bonuses import Bonus, Spread
from worker.bandit.click_model import ClickModel
from worker.errors import InputError

ELEMENTS = 1 << 18  # contexts × arms that are planned at once: fewer cost more calls, more leave the cache
LEAST_ROWS = 32  # contexts that are planned at once however many arms there are

Exclusions = Sequence[Sequence[int]]  # per row, the indices of arms that may not be shown
Holes = tuple[Ints, Ints]  # rows and columns that may not be chosen


@dataclass(frozen=True, slots=True)
class Masked:
    """Excluded (row, column) pairs, sorted by row."""

    rows: Ints
    columns: Ints

    def within(self, rows: slice) -> Holes:
        """Return the pairs of a slice of rows, as indices into it."""
        low, high = np.searchsorted(self.rows, (rows.start, rows.stop))
        return self.rows[low:high] - rows.start, self.columns[low:high]


@dataclass(frozen=True, slots=True)
class Alike:
    """Arms that greedy plans cannot tell apart, such as new ones of the same price: sessions show them by turns.

    order : the kernel columns, those that are alike next to each other
    firsts, sizes, places : (columns,), where in `order` those like a column begin, their number, and its place there
    """

    order: Ints
    firsts: Ints
    sizes: Ints
    places: Ints

    @classmethod
    def of(cls, numbers: Array) -> Alike | None:
        """Return the columns with the same numbers, (…, columns); None if they all differ."""
        order = np.lexsort(numbers)
        differs = (numbers[:, order[1:]] != numbers[:, order[:-1]]).any(axis=0)
        if differs.all():
            return None
        starts = np.flatnonzero(np.append(True, differs))
        sizes = np.diff(np.append(starts, len(order)))
        rank = np.argsort(order)
        firsts = np.repeat(starts, sizes)[rank]
        return cls(order, firsts, np.repeat(sizes, sizes)[rank], rank - firsts)

    def turned(self, columns: Ints, turns: Ints) -> Ints:
        """Return the columns that take the place of these, `turns` further among those like them.

        >>> Alike.of(np.array([[5.0, 7.0, 5.0, 5.0]])).turned(np.array([0, 1, 3]), np.array([2, 2, 2]))
        array([3, 1, 2])
        """
        return self.order[self.firsts[columns] + (self.places[columns] + turns) % self.sizes[columns]]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The best slates under the estimate, and with repeats the optimistic arms that were asked for.

    arms : (n, H), NO_ARM where nothing is eligible
    continuations : (n, H+1), V
    optimistic : (n, H), argmax_k of Q_h(k) + bonus under the same V
    """

    arms: Ints
    continuations: Array
    optimistic: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimism:
    """How a bonus is added to Q: its strength, its rule, and how sessions spread it."""

    beta: float
    bonus: Bonus
    spread: Spread | None = None


class Planner:
    """Plans under one version of the estimate; built once per version, used for every batch.

    Parameters
    ----------
    model : the belief about clicks
    rewards : (K,), revenue e_k > 0 of each arm
    horizon : the most displays H in a session
    active : (K,) of bool, the arms that may be shown; all by default
    repeats : whether a session may show an arm twice
    answers : how likely users who do not click go on; everybody does by default
    arm_keys : (K,), a stable number for each arm, by which optimism is spread (`policies.py`); its index by default
    dtype : float32 for serving, float64 for checks

    Examples
    --------
    Expensive, unlikely ads come first; the sure one is kept for the end.

    >>> from worker.bandit.additive import AdditiveModel
    >>> model = AdditiveModel.certain(np.zeros(1), np.array([2.0, -1.0]))
    >>> Planner(model, [1.0, 3.0], horizon=3).plan(np.zeros((1, 1))).arms
    array([[1, 1, 0]])
    """

    def __init__(
        self,
        model: ClickModel,
        rewards: object,
        *,
        horizon: int,
        active: NDArray[np.bool_] | None = None,
        repeats: bool = True,
        answers: AnswerRates | None = None,
        arm_keys: Keys | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.model = model
        self.rewards = frozen_array(rewards, (model.arms,))
        self.horizon = horizon
        self.repeats = repeats
        self.dtype = np.dtype(dtype)
        mask = np.ones(model.arms, dtype=bool) if active is None else np.asarray(active, dtype=bool)
        self.shown = np.flatnonzero(mask)  # kernel column → arm
        self._column = np.full(model.arms, NO_ARM, dtype=np.intp)
        self._column[self.shown] = np.arange(len(self.shown))
        self._rewards = self.rewards[self.shown].astype(self.dtype)
        self.heads = model.heads(self.shown, self.dtype)
        self.answers = None if answers is None or answers.are_all_one else answers
        self.cascade = Cascade.of(model.position_effects, answers, shown=self.shown, horizon=self.horizon)
        self._cascade = self.cascade.astype(self.dtype)
        keys = np.arange(model.arms, dtype=np.uint32) if arm_keys is None else arm_keys
        self.arm_keys = keys[self.shown]

    def masked(self, excluded: Exclusions | None) -> Masked | None:
        """Turn exclusions per row into kernel columns; None if there are none."""
        if excluded is None or not any(map(len, excluded)):
            return None
        rows = np.repeat(np.arange(len(excluded)), [len(arms) for arms in excluded])
        columns = self._column[np.fromiter((arm for arms in excluded for arm in arms), dtype=np.intp)]
        known = columns != NO_ARM
        return Masked(rows[known], columns[known])

    # ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def by_falling_revenue(self) -> Ints:
        """The kernel columns sorted by falling revenue, ties by their index."""
        return np.argsort(-self.rewards[self.shown], kind="stable")

    @cached_property
    def alike(self) -> Alike | None:
        """The kernel columns with the same price, click probabilities and rates; None if they all differ."""
        rates = [] if self.cascade.rates is None else [self.cascade.rates]
        return Alike.of(np.vstack([self.heads.coefficients, self._rewards, *rates]))

    def columns_of(self, arms: Ints) -> Ints:
        """Return the kernel columns of active arms."""
        return self._column[arms]

    def slices(self, contexts: Floats) -> Iterator[slice]:
        """Yield the slices of contexts (n, d) that are planned at once; none if no arm is active."""
        if contexts.ndim != 2 or contexts.shape[1] != self.model.dim:
            raise InputError(f"contexts of shape {contexts.shape}, not (n, {self.model.dim})")
        rows = max(LEAST_ROWS, ELEMENTS // max(1, len(self.shown)))
        for first in range(0, len(contexts) if len(self.shown) else 0, rows):
            yield slice(first, min(first + rows, len(contexts)))

    def plan(
        self,
        contexts: Floats,
        masked: Masked | None = None,
        optimism: Optimism | None = None,
        *,
        steps: int | None = None,
    ) -> Plan:
        """Plan each row (with repeats), for the first `steps` positions: the whole slate by default."""
        steps, leaving = steps or self.horizon, self._cascade.rates is not None
        arms = np.full((len(contexts), steps), NO_ARM, dtype=np.intp)
        optimistic = np.full(arms.shape, NO_ARM, dtype=np.intp)
        values = np.zeros((len(contexts), steps + 1), dtype=self.dtype)
        for rows in self.slices(contexts):
            chances = self.heads.probabilities(contexts[rows])
            holes = None if masked is None else masked.within(rows)
            raising = None if optimism is None else self._raising(contexts, rows, chances, optimism)
            for h in range(steps - 1, -1, -1):
                kept = values[rows, h + 1]
                ahead, here = self._cascade.ahead(kept, h), self._cascade.chances(chances, h)
                gains = self._rewards - ahead
                arms[rows, h], best = self._best(gains * here + ahead if leaving else gains * here, holes)
                if optimism is not None and raising is not None:
                    scores = optimism.bonus.scores(gains, here, raising(here, h), leaving=leaving)
                    optimistic[rows, h], _ = self._best(scores + ahead if leaving else scores, holes)
                values[rows, h] = np.where(arms[rows, h] == NO_ARM, kept, best if leaving else kept + best)
        return Plan(arms, values, optimistic)

    def _raising(
        self, contexts: Floats, rows: slice, chances: Array, optimism: Optimism
    ) -> Callable[[Array, int], Array]:
        """Return what gives `Bonus.raised` of some rows for the click probabilities at a position, and its number."""
        bonus, spread = optimism.bonus, optimism.spread
        widths = self.heads.widths(contexts[rows])
        widths *= optimism.beta
        prepared = bonus.prepared(widths)
        if spread is not None:
            hashes = spread.hashes(rows, self.arm_keys)
            return lambda here, h: bonus.raised(here, widths, spread.factors_at(h, hashes, self.dtype), prepared)
        if self._cascade.odds is not None:
            return lambda here, _: bonus.raised(here, widths, None, prepared)
        alike = bonus.raised(chances, widths, None, prepared)  # all positions have the same probabilities
        return lambda *_: alike

    def _best(self, scores: Array, holes: Holes | None) -> tuple[Ints, Array]:
        """Return the arm of the highest score in each row, NO_ARM where none is eligible, and that score."""
        if holes is not None:
            scores[holes] = -np.inf
        best = scores.argmax(axis=1)
        highest = scores[np.arange(len(scores)), best]
        return np.where(highest > -np.inf, self.shown[best], NO_ARM), highest

    def slate_values(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the estimated revenue from each position on, in float64: arms (n, H) → (n, H)."""
        return slate_values(self.model, self.rewards, contexts, arms, self.answers)


def slate_chances(model: ClickModel, contexts: Floats, arms: Ints) -> Floats:
    """Return the click probability of each display of slates, 0 where there is no arm: (n, d), (n, H) → (n, H)."""
    effects = model.position_effects
    later = np.minimum(np.arange(arms.shape[1]), len(effects) - 1)
    return sigmoid(model.log_odds_of(contexts, arms) + effects[later])


def slate_values(
    model: ClickModel, rewards: Floats, contexts: Floats, arms: Ints, answers: AnswerRates | None = None
) -> Floats:
    """Return the expected revenue of slates under a model from each position on: arms (n, H) → (n, H).

    NO_ARM is never clicked, and neither is the index K if `rewards` has an entry for it.
    """
    rates = None if answers is None else answers.of_slates(arms)
    return values_of_slates(slate_chances(model, contexts, arms), rewards[arms], rates)


def values_of_slates(chances: Floats, rewards: Floats, rates: Floats | None = None) -> Floats:
    """Return the expected revenue of slates from each position on: (n, H), (n, H) → (n, H).

    `rates` (n, H) are the shares of the users without a click who go on, 1 without.

    >>> values_of_slates(np.array([[0.5, 0.5]]), np.array([[2.0, 1.0]]))
    array([[1.25, 0.5 ]])
    """
    values = np.zeros_like(chances)
    ahead = np.zeros(len(chances))
    for h in range(chances.shape[1] - 1, -1, -1):
        if rates is not None:
            ahead = ahead * rates[:, h]
        ahead = ahead + chances[:, h] * (rewards[:, h] - ahead)
        values[:, h] = ahead
    return values


def optimal_values(chances: Floats, rewards: Floats, horizon: int, cascade: Cascade | None = None) -> Floats:
    """Return V_1 … V_H of the best slates with repeats when probabilities are given: (n, K) → (n, H), float64.

    Probabilities are those of the first position.
    """
    cascade = cascade or Cascade()
    values = np.zeros((len(chances), horizon))
    best = np.zeros(len(chances))
    for h in range(horizon - 1, -1, -1):
        ahead = cascade.ahead(best, h)
        best = (ahead + cascade.chances(chances, h) * (rewards - ahead)).max(axis=1)
        values[:, h] = best
    return values
