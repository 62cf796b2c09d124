"""Slates without repeats: each arm at most once in a session (docs/math.md §7).

Whatever set of arms is shown, its best order is by falling revenue (exchange argument), so the best slate is an exact
dynamic programme over arms sorted that way, m being the displays left:

    V(i, m) = max( V(i+1, m),  f_i e_i + (1 − f_i) V(i+1, m−1) )

An arm that at least H others beat in both revenue and probability is in no best slate. So where the order by
probability is the same for every context, the arms beaten by fewer than H suffice under the estimate.

A slate is never shorter than it has to be: it has H arms, or all that are eligible.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Array, Floats, Ints, sigmoid
from worker.bandit.click_model import ROWS, HeadBatch
from worker.bandit.planning import ELEMENTS, Masked, Planner

Chances = Callable[[int, int], Array]  # (first row, last row) → probabilities (columns, rows), an array of its own


def greedy_slates(planner: Planner, contexts: Floats, masked: Masked | None = None) -> Ints:
    """Return the best slates under the estimate: (n, d) → (n, H), NO_ARM at the end of shorter ones."""
    batch = planner.batch(contexts)

    def best(batch: HeadBatch, columns: Ints, masked: Masked | None) -> Ints:
        def chances(start: int, stop: int) -> Array:
            return batch.probabilities(start, stop, columns).T.copy()

        return _best(planner, len(batch), columns, chances, masked)

    slates = best(batch, planner.contenders, None)
    if masked is not None:
        hit = np.unique(masked.rows[np.isin(masked.columns, planner.contenders)])
        slates[hit] = best(batch.select(hit), planner.by_falling_revenue, masked.select(hit))
    return slates


def optimistic_slates(planner: Planner, contexts: Floats, *, beta: float, masked: Masked | None = None) -> Ints:
    """Return the best slates under the optimistic probabilities σ(u + β·width): (n, d) → (n, H)."""
    batch, order, everything = planner.batch(contexts), planner.by_falling_revenue, slice(0, len(planner.shown))

    def chances(start: int, stop: int) -> Array:
        odds = batch.log_odds(start, stop, everything)
        odds += beta * batch.widths(start, stop, everything)
        return sigmoid(odds).T[order]

    return _best(planner, len(contexts), order, chances, masked)


def _best(planner: Planner, count: int, columns: Ints, chances: Chances, masked: Masked | None) -> Ints:
    horizon = planner.horizon
    slates = np.full((count, horizon), NO_ARM, dtype=np.intp)
    if not len(columns):
        return slates
    rewards = planner.rewards[planner.shown][columns].astype(planner.dtype)
    row_of = np.empty(len(planner.shown), dtype=np.intp)
    row_of[columns] = np.arange(len(columns))
    rows = max(1, 8 * ELEMENTS // len(columns) // ROWS) * ROWS
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        f = chances(start, stop)
        eligible = np.ones(f.shape, dtype=bool)
        if masked:
            holes, arms = masked.within(start, stop, 0, len(planner.shown))
            eligible[row_of[arms], holes] = False
            f[row_of[arms], holes] = 0
        picks = _pick(f, rewards, horizon)
        _fill(picks, eligible)
        slates[start:stop] = np.where(picks == NO_ARM, NO_ARM, planner.shown[columns[picks]])
    return slates


def best_values(chances: Floats, rewards: Floats, horizon: int) -> Floats:
    """Return the revenue of the best slates without repeats when probabilities are given: (n, K) → (n,), float64."""
    values = np.zeros((horizon + 1, len(chances)))
    for arm in np.argsort(rewards, kind="stable"):
        values[1:] = np.maximum(values[1:], values[:-1] + chances[:, arm] * (rewards[arm] - values[:-1]))
    return np.asarray(values[-1])


def _pick(f: Array, rewards: Array, horizon: int) -> Ints:
    """Run the programme for f (arms, rows), arms by falling revenue; return indices in that order, (rows, H).

    An arm with f = 0 is never picked: it leaves V as it is, to the bit, because V rises with m. Written with (1 − f) V
    instead of V + f (e − V), every operation rises with V whatever the rounding, so V does rise.
    """
    arms, rows = f.shape
    values = np.zeros((horizon + 1, rows), dtype=f.dtype)
    taken = np.zeros((horizon, arms, rows), dtype=bool)
    stays, gains = 1 - f, f * rewards[:, None]
    with_it = np.empty((horizon, rows), dtype=f.dtype)
    for i in range(arms - 1, -1, -1):
        np.multiply(values[:-1], stays[i], out=with_it)
        with_it += gains[i]
        np.greater(with_it, values[1:], out=taken[:, i])
        np.maximum(values[1:], with_it, out=values[1:])
    picks = np.full((rows, horizon), NO_ARM, dtype=np.intp)
    last = np.full(rows, NO_ARM, dtype=np.intp)
    for h in range(horizon):
        options = taken[horizon - 1 - h].T.copy()
        options &= np.arange(arms) > last[:, None]
        best = options.argmax(axis=1)
        found = options[np.arange(rows), best]
        picks[found, h] = best[found]
        last = np.where(found, best, arms)
    return picks


def _fill(picks: Ints, eligible: NDArray[np.bool_]) -> None:
    """Add eligible arms to slates that are too short because the rest adds less than rounding shows."""
    sizes = (picks != NO_ARM).sum(axis=1)
    for row in np.flatnonzero(sizes < np.minimum(picks.shape[1], eligible.sum(axis=0))):
        chosen = picks[row, : sizes[row]]
        spare = np.setdiff1d(np.flatnonzero(eligible[:, row]), chosen)[: picks.shape[1] - len(chosen)]
        picks[row, : len(chosen) + len(spare)] = np.sort(np.concatenate([chosen, spare]))
