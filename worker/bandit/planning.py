"""Backward planning of whole slates, for a batch of contexts at once.

With repeats (the paper), V_{H+1} = 0 and for h = H … 1

    Q_h(k) = V_{h+1} + f_k (e_k − V_{h+1})        V_h = max_k Q_h(k)

The greedy arm is the argmax of Q_h, the optimistic one that of Q_h plus a bonus (math.md §3); both need the
continuation values V of the greedy plan only, so positions are independent given V. Without repeats see `ordering.py`.

Rules that hold in this file:

- **A row's result depends on that row alone**, never on its neighbours or on how a batch was split, to the bit: a
  re-plan after a crash must give the same slate. BLAS sums in another order for another number of rows, and within one
  product for rows that fall into another of its tiles. So every product is made in blocks of exactly `ROWS` rows, few
  enough for one tile on every kernel of OpenBLAS, padded with zeros, and never with a single column, which would be
  a product of another kind; all else is elementwise or runs along one row.
- The kernel computes in float32 by default: enough to choose. What is reported (values) is computed in float64.
- Arms that are not active do not enter the kernel at all; arms excluded for one row score −inf there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from worker.bandit.model import Posterior, check_rewards, sigmoid
from worker.bandit.precision import Floats, Ints
from worker.errors import InputError

ROWS = 8  # rows of every matrix product; see the first rule
BLOCK = 1024  # arms in one block of the kernel
ELEMENTS = 32 * BLOCK  # of one slice: that many float32 stay in the second-level cache

Array = NDArray[Any]  # of the kernel's dtype
Exclusions = Sequence[Sequence[int]]  # per row, the indices of arms that may not be shown

NO_ARM = -1


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
    posterior : what is believed about the click model
    rewards : (K,), revenue e_k > 0 of each arm
    horizon : the most displays H in a session
    active : (K,) of bool, the arms that may be shown; all by default
    repeats : whether a session may show an arm twice
    dtype : float32 for serving, float64 for checks

    Examples
    --------
    Expensive, unlikely ads come first; the sure one is kept for the end.

    >>> belief = Posterior(theta_context=np.zeros(1), theta_arms=np.array([2.0, -1.0]),
    ...                    precision=Posterior.prior(dim=1, arms=2, ridge=1.0).precision)
    >>> Planner(belief, [1.0, 3.0], horizon=3).greedy(np.zeros((1, 1))).arms
    array([[1, 1, 0]])
    """

    def __init__(
        self,
        posterior: Posterior,
        rewards: object,
        *,
        horizon: int,
        active: NDArray[np.bool_] | None = None,
        repeats: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:
        if horizon < 1:
            raise InputError(f"the horizon must be at least 1, not {horizon}")
        self.posterior = posterior
        self.rewards = check_rewards(rewards)
        if len(self.rewards) != posterior.arms:
            raise InputError(f"{len(self.rewards)} rewards for {posterior.arms} arms")
        self.horizon = int(horizon)
        self.repeats = repeats
        self.dtype = np.dtype(dtype)
        mask = np.ones(posterior.arms, dtype=bool) if active is None else np.asarray(active, dtype=bool)
        if mask.shape != (posterior.arms,):
            raise InputError(f"{mask.size} active marks for {posterior.arms} arms")
        self.shown = np.flatnonzero(mask)  # kernel column → arm
        self._column = np.full(posterior.arms, NO_ARM, dtype=np.intp)
        self._column[self.shown] = np.arange(len(self.shown))
        self._theta = posterior.theta_arms[self.shown]
        self._rewards = self.rewards[self.shown].astype(self.dtype)
        # e^{−(s+θ)} = e^{−s} e^{−θ} saves an exponential per arm, as long as neither factor leaves the number range.
        self._steep = 80.0 if self.dtype == np.float32 else 600.0
        self._flattest = float(np.abs(self._theta).max(initial=0.0))
        self._decay = np.exp(-np.clip(self._theta, -self._steep, self._steep)).astype(self.dtype)

    # ── what the context is to the kernel ────────────────────────────────────────────────────────────────────────────

    def offsets(self, contexts: Floats) -> Floats:
        """Return s = x·θ_x, through which alone a context enters the click model: (n, d) → (n,)."""
        if contexts.ndim != 2 or contexts.shape[1] != self.posterior.dim:
            raise InputError(f"contexts of shape {contexts.shape}, not (n, {self.posterior.dim})")
        # A sum along the rows takes another order if the memory lies along the columns.
        return np.asarray((np.ascontiguousarray(contexts) * self.posterior.theta_context).sum(axis=1))

    def masked(self, excluded: Exclusions | None) -> Masked | None:
        """Turn exclusions per row into kernel columns; None if there are none."""
        if excluded is None or not any(map(len, excluded)):
            return None
        rows = np.repeat(np.arange(len(excluded)), [len(arms) for arms in excluded])
        columns = self._column[np.fromiter((arm for arms in excluded for arm in arms), dtype=np.intp)]
        known = columns != NO_ARM
        return Masked(rows[known], columns[known])

    def probabilities(self, offsets: Floats, columns: slice | Ints = slice(None)) -> Array:
        """Return the click probabilities of kernel columns: (n,) → (n, columns)."""
        steep = np.abs(offsets) + self._flattest > self._steep
        decay = np.exp(-np.clip(offsets, -self._steep, self._steep)).astype(self.dtype)
        with np.errstate(over="ignore", divide="ignore"):
            result: Array = np.multiply.outer(decay, self._decay[columns])
            result += 1
            np.reciprocal(result, out=result)
        for row in np.flatnonzero(steep):
            result[row] = sigmoid(offsets[row] + self._theta[columns])
        return result

    @cached_property
    def _whitened_arms(self) -> Array:
        """[L(U_k − ū); ‖·‖² + 1/D_k; 1] of the arms, (d+2, columns + 1): the right factor of the squared widths."""
        precision, count = self.posterior.precision, len(self.shown)
        there = (precision.centres[self.shown] - self._middle) @ precision.whitening.T
        right = np.zeros((precision.dim + 2, count + 1), dtype=self.dtype)
        right[:-2, :count] = there.T
        right[-2, :count] = (there**2).sum(axis=1) + 1 / precision.arms[self.shown]
        right[-1, :count] = 1
        return right

    @cached_property
    def _narrowest(self) -> Array:
        """1 / D_k of the arms: no squared width is below, so rounding must not take one there."""
        return np.asarray(1 / self.posterior.precision.arms[self.shown]).astype(self.dtype)

    @cached_property
    def _middle(self) -> Floats:
        return np.asarray(self.posterior.precision.centres.mean(axis=0))

    def whitened(self, contexts: Floats) -> Array:
        """Return [−2 L(x − ū); 1; ‖·‖²], the left factor of the squared widths, in blocks: (b, ROWS, d+2)."""
        count, dim = contexts.shape
        padded = np.zeros((-(-count // ROWS) * ROWS, dim))
        padded[:count] = contexts - self._middle
        here = padded.reshape(-1, ROWS, dim) @ self.posterior.precision.whitening.T
        left = np.empty((len(here), ROWS, dim + 2), dtype=self.dtype)
        left[:, :, :dim] = -2 * here
        left[:, :, dim] = 1
        left[:, :, dim + 1] = (here**2).sum(axis=2)
        return left

    def widths(self, whitened: Array, first: int = 0, last: int | None = None) -> Array:
        """Return sqrt(zᵀA⁻¹z) for blocks of contexts and columns [first, last): (b, ROWS, d+2) → (b·ROWS, columns)."""
        floor = self._narrowest[first:last]
        right = self._whitened_arms[:, first : first + max(2, len(floor))]
        squares = np.matmul(whitened, right).reshape(len(whitened) * ROWS, right.shape[1])[:, : len(floor)]
        np.maximum(squares, floor, out=squares)
        return np.asarray(np.sqrt(squares, out=squares))

    # ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def frontier(self) -> Ints:
        """The kernel columns that can be greedy-optimal: no other arm has both a higher bias and a higher revenue.

        f is monotone in θ_k whatever the context, so a dominated arm never attains the maximum of f (e − V).
        """
        order = np.lexsort((-self._theta, -self.rewards[self.shown]))
        best = np.maximum.accumulate(np.concatenate([[-np.inf], self._theta[order][:-1]]))
        return np.sort(order[self._theta[order] > best])

    @cached_property
    def by_falling_revenue(self) -> Ints:
        """The kernel columns sorted by falling revenue, ties by their place."""
        return np.argsort(-self.rewards[self.shown], kind="stable")

    @cached_property
    def contenders(self) -> Ints:
        """The kernel columns beaten by fewer than H others in both revenue and bias, by falling revenue.

        Without repeats, an arm that H others beat is in no best slate: one of them is free to take its place.
        """
        best: list[float] = []  # the H highest biases among arms of at least this revenue, rising
        kept = []
        for place, bias in enumerate(self._theta[self.by_falling_revenue].tolist()):
            if len(best) < self.horizon or bias > best[0]:
                kept.append(place)
                insort(best, bias)
                del best[: -self.horizon]
        return self.by_falling_revenue[kept]

    def greedy(self, contexts: Floats, masked: Masked | None = None) -> GreedyPlan:
        """Plan each row for the highest expected revenue under the estimate (with repeats)."""
        offsets = self.offsets(contexts)
        plan = self._backward(offsets, self.frontier, None)
        if masked is None:
            return plan
        # Taking away arms that are dominated anyway changes nothing; only where a frontier arm is missing is the
        # shortcut not exact.
        hit = np.unique(masked.rows[np.isin(masked.columns, self.frontier)])
        if len(hit):
            whole = self._backward(offsets[hit], np.arange(len(self.shown)), masked.select(hit))
            plan.arms[hit], plan.continuations[hit] = whole.arms, whole.continuations
        return plan

    def _backward(self, offsets: Floats, columns: Ints, masked: Masked | None) -> GreedyPlan:
        count = len(offsets)
        arms = np.full((count, self.horizon), NO_ARM, dtype=np.intp)
        values = np.zeros((count, self.horizon + 1), dtype=self.dtype)
        if not len(columns):
            return GreedyPlan(arms, values)
        rewards = self._rewards[columns]
        names = self.shown[columns]
        for start, stop in _slices(count, max(1, ELEMENTS // len(columns))):
            chances = self.probabilities(offsets[start:stop], columns)
            holes = masked.within(start, stop, 0, len(columns)) if masked else None
            rows = np.arange(stop - start)
            gains = np.empty_like(chances)
            for h in range(self.horizon - 1, -1, -1):
                ahead = values[start:stop, h + 1]
                np.subtract(rewards, ahead[:, None], out=gains)
                gains *= chances
                if holes:
                    gains[holes] = -np.inf
                best = gains.argmax(axis=1)
                gain = gains[rows, best]
                if holes:  # else there is always an arm
                    possible = gain > -np.inf
                    arms[start:stop, h] = np.where(possible, names[best], NO_ARM)
                    values[start:stop, h] = ahead + np.where(possible, gain, 0)
                else:
                    arms[start:stop, h] = names[best]
                    np.add(ahead, gain, out=values[start:stop, h])
        return GreedyPlan(arms, values)

    def optimistic(
        self, contexts: Floats, continuations: Array, *, beta: float, bonus: str, masked: Masked | None = None
    ) -> Ints:
        """Return argmax_k of Q_h(k) + bonus for each row and step: continuations (n, H+1) → (n, H).

        Columns of `continuations` that are all equal (a myopic plan) are computed once for each column given, so pass
        only as many as there are different steps.
        """
        count, steps = len(contexts), continuations.shape[1] - 1
        offsets, whitened = self.offsets(contexts), self.whitened(contexts)
        best = np.full((count, steps), -np.inf, dtype=self.dtype)
        arms = np.full((count, steps), NO_ARM, dtype=np.intp)
        per_slice = max(1, ELEMENTS // max(1, min(BLOCK, len(self.shown))) // ROWS) * ROWS
        for start, stop in _slices(count, per_slice):
            left = whitened[start // ROWS : -(-stop // ROWS)]
            for first, last in _slices(len(self.shown), BLOCK):
                columns = slice(first, last)
                chances = self.probabilities(offsets[start:stop], columns)
                widths = self.widths(left, first, last)[: stop - start]
                holes = masked.within(start, stop, first, last) if masked else None
                only = last - first == len(self.shown) and not holes  # no other block, nothing excluded: an arm for all
                for h, scores in self._scores(chances, widths, columns, continuations[start:stop], beta, bonus):
                    if holes:
                        scores[holes] = -np.inf
                    here = scores.argmax(axis=1)
                    if only:
                        arms[start:stop, h] = self.shown[here]
                        continue
                    top = scores[np.arange(stop - start), here]
                    better = top > best[start:stop, h]
                    best[start:stop, h][better] = top[better]
                    arms[start:stop, h][better] = self.shown[first + here[better]]
        return arms

    def _scores(
        self, chances: Array, widths: Array, columns: slice, continuations: Array, beta: float, bonus: str
    ) -> Iterator[tuple[int, Array]]:
        """Yield, per step, Q_h + bonus − V_{h+1}, (n, columns), in a buffer that is used again."""
        rewards = self._rewards[columns]
        scores = np.empty_like(chances)
        widths *= beta
        if bonus == "value":
            # f(e−V) + βw·f(1−f)·max(e−V, 0). Some arm has e > V, and where e > V both terms share the factor e − V;
            # an arm with e ≤ V scores at most 0 either way. So one factor per arm serves every step.
            np.subtract(1, chances, out=scores)
            widths *= scores
            widths += 1
            widths *= chances
        for h in range(continuations.shape[1] - 1):
            np.subtract(rewards, continuations[:, h + 1, None], out=scores)
            if bonus == "value":
                scores *= widths
            else:
                scores *= chances
                scores += widths
            yield h, scores

    def slate_values(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the estimated revenue from each position on, in float64: arms (n, H) → (n, H)."""
        missing = arms == NO_ARM
        chances = sigmoid(self.offsets(contexts)[:, None] + self.posterior.theta_arms[arms])
        chances[missing] = 0.0
        return values_of_slates(chances, self.rewards[arms])


def values_of_slates(chances: Floats, rewards: Floats) -> Floats:
    """Return the expected revenue of slates from each position on: (n, H), (n, H) → (n, H).

    >>> values_of_slates(np.array([[0.5, 0.5]]), np.array([[2.0, 1.0]]))
    array([[1.25, 0.5 ]])
    """
    values = np.zeros_like(chances)
    ahead = np.zeros(len(chances))
    for h in range(chances.shape[1] - 1, -1, -1):
        ahead = ahead + chances[:, h] * (rewards[:, h] - ahead)
        values[:, h] = ahead
    return values


def optimal_values(chances: Floats, rewards: Floats, horizon: int) -> Floats:
    """Return V_1 … V_H of the best slates with repeats when probabilities are given: (n, K) → (n, H), float64."""
    values = np.zeros((len(chances), horizon))
    ahead = np.zeros(len(chances))
    for h in range(horizon - 1, -1, -1):
        ahead = ahead + (chances * (rewards - ahead[:, None])).max(axis=1)
        values[:, h] = ahead
    return values


def _slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)
