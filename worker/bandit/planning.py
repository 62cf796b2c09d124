"""Backward planning of whole slates, for a batch of contexts at once.

With repeats (the paper), V_{H+1} = 0 and for h = H … 1

    Q_h(k) = V_{h+1} + f_k (e_k − V_{h+1})        V_h = max_k Q_h(k)

The greedy arm is the argmax of Q_h, the optimistic one that of Q_h plus a bonus (docs/math.md §3). Both need only the
continuation values V of the greedy plan, so positions are independent given V. Without repeats see `ordering.py`. With
answer rates, both Q_h and the bonus are multiplied by the rate of the display (`answers.py`).

Rules that hold in this file:

- **A row's result depends on that row alone**, never on its neighbours or on how a batch is split, to the bit: planning
  again after a crash must give the same slate. The model's heads hold it for f and widths (`click_model.py`); all else
  is elementwise or runs along one row.
- The kernel computes in float32 by default: enough to choose. Reported values are computed in float64.
- Arms that are not active do not enter the kernel; arms excluded for one row score −inf there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import NO_ARM, Array, Floats, Ints, check_rewards, sigmoid
from worker.bandit.bonuses import Bonus
from worker.bandit.click_model import BLOCK, ClickModel, HeadBatch
from worker.bandit.rows import ROWS
from worker.errors import InputError

NARROWED = 256  # arms from which on a plan drops those that have become useless
LITTLE = 1 << 15  # scores of a batch that are made at once, for all steps: of so few, most of the time is set-up
FEW = 16  # rows that are faster in Python than in numpy
ELEMENTS = 128 * BLOCK  # of one slice: fewer cost more calls, more leave the cache

Exclusions = Sequence[Sequence[int]]  # per row, the indices of arms that may not be shown


@dataclass(frozen=True, slots=True)
class Masked:
    """Excluded (row, column) pairs, sorted by row."""

    rows: Ints
    columns: Ints

    def within(self, start: int, stop: int, first: int, last: int) -> tuple[Ints, Ints]:
        """Return the pairs of rows [start, stop) and columns [first, last), counted from there."""
        low, high = np.searchsorted(self.rows, (start, stop))
        rows, columns = self.rows[low:high] - start, self.columns[low:high] - first
        inside = (columns >= 0) & (columns < last - first)
        return rows[inside], columns[inside]

    def select(self, rows: Ints) -> Masked:
        """Return the pairs of the given rows (sorted), renumbered."""
        inside = np.isin(self.rows, rows)
        return Masked(np.searchsorted(rows, self.rows[inside]), self.columns[inside])


@dataclass(frozen=True, slots=True, eq=False)
class GreedyPlan:
    """The best slates under the estimate: arms (n, H), NO_ARM where nothing is eligible; continuations V (n, H+1)."""

    arms: Ints
    continuations: Array


class Planner:
    """Plans under one version of the estimate; built once per version, used for every batch.

    Parameters
    ----------
    model : the belief about clicks
    rewards : (K,), revenue e_k > 0 of each arm
    horizon : the most displays H in a session
    active : (K,) of bool, the arms that may be shown; all by default
    repeats : whether a session may show an arm twice
    answers : how likely each display is answered; every one is by default
    dtype : float32 for serving, float64 for checks

    Examples
    --------
    Expensive, unlikely ads come first; the sure one is kept for the end.

    >>> from worker.bandit.additive import AdditiveModel
    >>> model = AdditiveModel.certain(np.zeros(1), np.array([2.0, -1.0]))
    >>> Planner(model, [1.0, 3.0], horizon=3).greedy(np.zeros((1, 1))).arms
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
        dtype: DTypeLike = np.float32,
    ) -> None:
        if horizon < 1:
            raise InputError(f"the horizon must be at least 1, not {horizon}")
        self.model = model
        self.rewards = check_rewards(rewards)
        if len(self.rewards) != model.arms:
            raise InputError(f"{len(self.rewards)} rewards for {model.arms} arms")
        self.horizon = int(horizon)
        self.repeats = repeats
        self.dtype = np.dtype(dtype)
        mask = np.ones(model.arms, dtype=bool) if active is None else np.asarray(active, dtype=bool)
        if mask.shape != (model.arms,):
            raise InputError(f"{mask.size} active marks for {model.arms} arms")
        self.shown = np.flatnonzero(mask)  # kernel column → arm
        self._column = np.full(model.arms, NO_ARM, dtype=np.intp)
        self._column[self.shown] = np.arange(len(self.shown))
        self._rewards = self.rewards[self.shown].astype(self.dtype)
        self._heads = model.heads(self.shown, self.dtype)
        self.answers = None if answers is None or answers.are_all_one else answers
        self._answers = None if self.answers is None else self.answers.of_arms(self.shown).astype(self.dtype)

    def batch(self, contexts: Floats | HeadBatch) -> HeadBatch:
        """Return the contexts (n, d) as the kernel needs them; a batch stays what it is."""
        if not isinstance(contexts, np.ndarray):
            return contexts
        if contexts.ndim != 2 or contexts.shape[1] != self.model.dim:
            raise InputError(f"contexts of shape {contexts.shape}, not (n, {self.model.dim})")
        return self._heads.batch(contexts)

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
    def frontier(self) -> Ints:
        """The kernel columns that can be greedy-optimal: no other arm is both likelier for everyone and dearer.

        A dominated arm never attains the maximum of f (e − V). Where users leave, an arm may be shown to keep them.
        """
        ranking = self._heads.ranking
        if ranking is None or self.answers is not None:
            return np.arange(len(self.shown))
        order = np.lexsort((-ranking, -self.rewards[self.shown]))
        best = np.maximum.accumulate(np.concatenate([[-np.inf], ranking[order][:-1]]))
        return np.sort(order[ranking[order] > best])

    @cached_property
    def by_falling_revenue(self) -> Ints:
        """The kernel columns sorted by falling revenue, ties by their index."""
        return np.argsort(-self.rewards[self.shown], kind="stable")

    @cached_property
    def contenders(self) -> Ints:
        """The kernel columns that fewer than H others beat in both revenue and probability, by falling revenue.

        Without repeats, an arm that H others beat is in no best slate: one of them is free to replace it.
        """
        ranking = self._heads.ranking
        if ranking is None or self.answers is not None:
            return self.by_falling_revenue
        best: list[float] = []  # the H highest ranks among arms of at least this revenue, rising
        kept = []
        for index, rank in enumerate(ranking[self.by_falling_revenue].tolist()):
            if len(best) < self.horizon or rank > best[0]:
                kept.append(index)
                insort(best, rank)
                del best[: -self.horizon]
        return self.by_falling_revenue[kept]

    def greedy(self, contexts: Floats | HeadBatch, masked: Masked | None = None) -> GreedyPlan:
        """Plan each row for the highest expected revenue under the estimate (with repeats)."""
        batch = self.batch(contexts)
        if masked is not None and len(self.frontier) == len(self.shown):
            return self._backward(batch, self.frontier, masked)
        plan = self._backward(batch, self.frontier, None)
        if masked is None:
            return plan
        # Taking away arms that are dominated anyway changes nothing; only where a frontier arm is missing is the
        # shortcut not exact.
        hit = np.unique(masked.rows[np.isin(masked.columns, self.frontier)])
        if len(hit):
            whole = self._backward(batch.select(hit), np.arange(len(self.shown)), masked.select(hit))
            plan.arms[hit], plan.continuations[hit] = whole.arms, whole.continuations
        return plan

    def _backward(self, batch: HeadBatch, columns: Ints, masked: Masked | None) -> GreedyPlan:
        count = len(batch)
        arms = np.full((count, self.horizon), NO_ARM, dtype=np.intp)
        values = np.zeros((count, self.horizon + 1), dtype=self.dtype)
        if not len(columns):
            return GreedyPlan(arms, values)
        names = self.shown[columns]
        whole = slice(0, len(columns)) if len(columns) == len(self.shown) else columns
        for start, stop in _slices(count, max(1, ELEMENTS // len(columns) // ROWS) * ROWS):
            chances = batch.probabilities(start, stop, whole)
            holes = masked.within(start, stop, 0, len(columns)) if masked else None
            if self._answers is None and not holes:
                self._climb(chances, columns, arms[start:stop], values[start:stop])
                continue
            rows = np.arange(stop - start)
            gains = np.empty_like(chances)
            for h in range(self.horizon - 1, -1, -1):
                ahead = values[start:stop, h + 1]
                np.subtract(self._rewards[columns], ahead[:, None], out=gains)
                gains *= chances
                if self._answers is not None:  # Q_h − V_{h+1} from Q_h = rate · (V_{h+1} + f (e − V_{h+1}))
                    gains += ahead[:, None]
                    gains *= self._answers[h]
                    gains -= ahead[:, None]
                if holes:
                    gains[holes] = -np.inf
                best = gains.argmax(axis=1)
                gain = gains[rows, best]
                possible = gain > -np.inf
                arms[start:stop, h] = np.where(possible, names[best], NO_ARM)
                values[start:stop, h] = ahead + np.where(possible, gain, 0)
        return GreedyPlan(arms, values)

    def _climb(self, chances: Array, columns: Ints, arms: Ints, values: Array) -> None:
        """Fill in arms (n, H) and V (n, H+1) where nothing is excluded and every display is answered."""
        if len(columns) <= NARROWED:
            self._climb_plainly(chances, columns, arms, values)
            return
        every = rewards = self._rewards[columns]
        likely, names, gains = chances, self.shown[columns], np.empty_like(chances)
        rows = np.arange(len(chances))
        for h in range(self.horizon - 1, -1, -1):
            ahead = values[:, h + 1]
            if len(names) > NARROWED and h < self.horizon - 1:
                # An arm that earns no more than V gains nothing, and V only rises towards the first position.
                dear = np.flatnonzero(rewards > ahead.min())
                if 0 < 2 * len(dear) < len(names):  # none is left where V is the highest revenue: a sure click
                    rewards, names, likely = rewards[dear], names[dear], likely.take(dear, axis=1)
                    gains = np.empty_like(likely)
            np.subtract(rewards, ahead[:, None], out=gains)
            gains *= likely
            best = gains.argmax(axis=1)
            gain = gains[rows, best]
            arms[:, h] = names[best]
            if len(names) < len(every) and not (gain > 0).all():
                # Then arms left out may tie, and which one is first must not depend on the other rows.
                for row in np.flatnonzero(~(gain > 0)):
                    here = (every - ahead[row]) * chances[row]
                    arms[row, h], gain[row] = self.shown[columns[here.argmax()]], here.max()
            np.add(ahead, gain, out=values[:, h])

    def _climb_plainly(self, chances: Array, columns: Ints, arms: Ints, values: Array) -> None:
        """Fill in the same with as few calls as can be, and without dropping arms."""
        rewards, gains = self._rewards[columns], np.empty_like(chances)
        best = np.empty((self.horizon, len(chances)), dtype=np.intp)
        ahead = values[:, self.horizon]
        for h in range(self.horizon - 1, -1, -1):
            np.subtract(rewards, ahead[:, None], out=gains)
            np.multiply(gains, chances, out=gains)
            gains.argmax(axis=1, out=best[h])
            ahead = ahead + np.maximum.reduce(gains, axis=1)
            values[:, h] = ahead
        arms[:] = self.shown[columns].take(best.T)

    def optimistic(
        self,
        contexts: Floats | HeadBatch,
        continuations: Array,
        *,
        beta: float,
        bonus: Bonus,
        masked: Masked | None = None,
    ) -> Ints:
        """Return argmax_k of Q_h(k) + bonus for each row and step: continuations (n, H+1) → (n, H).

        Columns of `continuations` that are all equal (a myopic plan) are computed once for each column given, so pass
        only as many as there are different steps.
        """
        batch = self.batch(contexts)
        count, steps = len(batch), continuations.shape[1] - 1
        if masked is None and self._answers is None and 0 < count * len(self.shown) * steps <= LITTLE:
            whole = slice(0, len(self.shown))
            widths = batch.widths(0, count, whole)
            widths *= beta
            scores: Array = bonus.all_scores(batch.probabilities(0, count, whole), widths, self._rewards, continuations)
            best_columns: Ints = scores.argmax(axis=2).T
            return self.shown.take(best_columns)
        arms = np.full((count, steps), NO_ARM, dtype=np.intp)
        blocks = list(_slices(len(self.shown), BLOCK))
        per_slice = max(1, ELEMENTS // max(1, min(BLOCK, len(self.shown))) // ROWS) * ROWS
        for start, stop in _slices(count, per_slice):
            rows = np.arange(stop - start)
            found = np.empty((len(blocks), steps, stop - start), dtype=np.intp)  # the best column of each block …
            top = np.empty(found.shape, dtype=self.dtype)  # … and its score
            for block, (first, last) in enumerate(blocks):
                columns = slice(first, last)
                chances = batch.probabilities(start, stop, columns)
                widths = batch.widths(start, stop, columns)
                widths *= beta
                holes = masked.within(start, stop, first, last) if masked else None
                rates = None if self._answers is None else self._answers[:, columns]
                steps_ahead = bonus.scores(chances, widths, self._rewards[columns], continuations[start:stop], rates)
                for h, scores in enumerate(steps_ahead):
                    if holes:
                        scores[holes] = -np.inf
                    here = scores.argmax(axis=1)
                    top[block, h] = scores[rows, here]
                    np.add(here, first, out=found[block, h])
            if blocks:
                best = top.argmax(axis=0)[None]  # of equal scores the first, as within a block
                chosen = self.shown[np.take_along_axis(found, best, axis=0)[0]]
                possible = np.take_along_axis(top, best, axis=0)[0] > -np.inf
                arms[start:stop] = np.where(possible, chosen, NO_ARM).T
        return arms

    def slate_values(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the estimated revenue from each position on, in float64: arms (n, H) → (n, H)."""
        rates = None if self.answers is None else self.answers.of_slates(arms)
        return values_of_slates(sigmoid(self.model.log_odds_of(contexts, arms)), self.rewards[arms], rates)


def values_of_slates(chances: Floats, rewards: Floats, answers: Floats | None = None) -> Floats:
    """Return the expected revenue of slates from each position on: (n, H), (n, H) → (n, H).

    `answers` (n, H) are the answer rates of the displays, 1 without.

    >>> values_of_slates(np.array([[0.5, 0.5]]), np.array([[2.0, 1.0]]))
    array([[1.25, 0.5 ]])
    """
    if answers is None and len(chances) <= FEW:
        return np.array(list(map(_values_of_slate, chances.tolist(), rewards.tolist()))).reshape(chances.shape)
    values = np.zeros_like(chances)
    ahead = np.zeros(len(chances))
    for h in range(chances.shape[1] - 1, -1, -1):
        ahead = ahead + chances[:, h] * (rewards[:, h] - ahead)
        if answers is not None:
            ahead = ahead * answers[:, h]
        values[:, h] = ahead
    return values


def _values_of_slate(chances: list[float], rewards: list[float]) -> list[float]:
    """Return the values of one slate, to the bit as `values_of_slates` computes many."""
    ahead, values = 0.0, []
    for chance, reward in zip(reversed(chances), reversed(rewards), strict=True):
        ahead += chance * (reward - ahead)
        values.append(ahead)
    values.reverse()
    return values


def optimal_values(chances: Floats, rewards: Floats, horizon: int, answers: Floats | None = None) -> Floats:
    """Return V_1 … V_H of the best slates with repeats when probabilities are given: (n, K) → (n, H), float64.

    `answers` (H, K) are the answer rates of each arm at each position, 1 without.
    """
    values = np.zeros((len(chances), horizon))
    ahead = np.zeros(len(chances))
    for h in range(horizon - 1, -1, -1):
        if answers is None:
            ahead = ahead + (chances * (rewards - ahead[:, None])).max(axis=1)
        else:
            ahead = (answers[h] * (ahead[:, None] + chances * (rewards - ahead[:, None]))).max(axis=1)
        values[:, h] = ahead
    return values


def _slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)
