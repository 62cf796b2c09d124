"""Slates without repeats: each arm at most once in a session (docs/math.md §7).

Whatever set of arms is shown, its best order is by falling revenue (exchange argument), so the best slate is an exact
dynamic programme over arms sorted that way, m being the displays left:

    V(i, m) = max( V(i+1, m),  f_i e_i + (1 − f_i) V(i+1, m−1) )

An arm that at least H others beat in both revenue and probability is in no best slate. So where the order by
probability is the same for every context, the arms beaten by fewer than H suffice under the estimate.

Where displays of arm k are answered with probability ρ = ρ_k r, the same argument orders a set by
ρ f e / (1 − ρ (1 − f)), which depends on the user; with ρ = 1 it is e. For this r is the mean of the rates of
positions. The rates themselves enter the programme, position H − m + 1 being the one with m displays left. The order is
exact where these are equal, and close where they fall slowly.

A slate is never shorter than it has to be: it has H arms, or all that are eligible.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import NO_ARM, Array, Floats, Ints
from worker.bandit.bonuses import VALUE, Bonus
from worker.bandit.click_model import HeadBatch
from worker.bandit.planning import ELEMENTS, Masked, Planner
from worker.bandit.rows import ROWS

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


def optimistic_slates(
    planner: Planner, contexts: Floats, *, beta: float, bonus: Bonus = VALUE, masked: Masked | None = None
) -> Ints:
    """Return the best slates under the optimistic probabilities of the bonus: (n, d) → (n, H)."""
    batch, order, everything = planner.batch(contexts), planner.by_falling_revenue, slice(0, len(planner.shown))

    def chances(start: int, stop: int) -> Array:
        odds = batch.log_odds(start, stop, everything)
        return bonus.optimistic(odds, beta * batch.widths(start, stop, everything)).T[order]

    return _best(planner, len(contexts), order, chances, masked)


def _best(planner: Planner, count: int, columns: Ints, chances: Chances, masked: Masked | None) -> Ints:
    horizon = planner.horizon
    slates = np.full((count, horizon), NO_ARM, dtype=np.intp)
    if not len(columns):
        return slates
    rewards = planner.rewards[planner.shown][columns].astype(planner.dtype)
    row_of = np.empty(len(planner.shown), dtype=np.intp)
    row_of[columns] = np.arange(len(columns))
    rows = max(1, 2 * ELEMENTS // len(columns) // ROWS) * ROWS
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        f = chances(start, stop)
        eligible = np.ones(f.shape, dtype=bool)
        if masked:
            holes, arms = masked.within(start, stop, 0, len(planner.shown))
            eligible[row_of[arms], holes] = False
            f[row_of[arms], holes] = 0
        if planner.answers is None:
            picks = _pick(f, rewards, horizon)
        else:
            rates = planner.answers.arms[planner.shown][columns].astype(planner.dtype)
            picks = _pick_leaving(f, rewards, rates, planner.answers.positions, eligible)
        _fill(picks, eligible, leaving=planner.answers is not None)
        slates[start:stop] = np.where(picks == NO_ARM, NO_ARM, planner.shown[columns[picks]])
    return slates


def best_values(chances: Floats, rewards: Floats, horizon: int, answers: AnswerRates | None = None) -> Floats:
    """Return the revenue of the best slates without repeats when probabilities are given: (n, K) → (n,), float64.

    `answers` are the rates of the K arms given.
    """
    if answers is not None:
        order = by_worth(chances.T, rewards, answers.arms, answers.positions)
        ranked = _ranked(order, chances.T, rewards, answers.arms)
        return np.asarray(_programme(*ranked, answers.positions)[0][-1])
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
    return _walk(taken)


def _walk(taken: NDArray[np.bool_]) -> Ints:
    """Return the arms that the programme took on its best way, (H, arms, rows) → (rows, H)."""
    horizon, arms, rows = taken.shape
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


def by_worth(f: Array, rewards: Array, rates: Array, positions: Floats) -> Ints:
    """Return the order in which a set of arms is best shown where users leave: (arms, rows) → (arms, rows)."""
    answered = np.minimum(1, rates * f.dtype.type(positions.mean()))[:, None]
    kept = answered * (1 - f)
    worth = answered * f * rewards[:, None] / np.maximum(1 - kept, np.finfo(f.dtype).tiny)
    return np.argsort(-worth, axis=0, kind="stable")


def _ranked(order: Ints, f: Array, rewards: Array, rates: Array) -> tuple[Array, Array, Array]:
    return np.take_along_axis(f, order, axis=0), rewards[order], rates[order]


def _programme(f: Array, rewards: Array, rates: Array, positions: Floats) -> tuple[Array, Array]:
    """Run the programme with answer rates, all (arms, rows); return V (H+1, rows) and the choices (H, arms, rows)."""
    horizon, (arms, rows) = len(positions), f.shape
    left = positions[::-1].astype(f.dtype)[:, None]  # with m = 1 … H displays left
    values = np.zeros((horizon + 1, rows), dtype=f.dtype)
    taken = np.zeros((horizon, arms, rows), dtype=bool)
    for i in range(arms - 1, -1, -1):
        with_it = np.minimum(1, left * rates[i]) * (f[i] * rewards[i] + (1 - f[i]) * values[:-1])
        np.greater(with_it, values[1:], out=taken[:, i])
        np.maximum(values[1:], with_it, out=values[1:])
    return values, taken


def _pick_leaving(f: Array, rewards: Array, rates: Array, positions: Floats, eligible: NDArray[np.bool_]) -> Ints:
    """Pick as `_pick`, where displays are answered with a probability; return indices into the arms, (rows, H)."""
    order = by_worth(f, rewards, rates, positions)
    _, taken = _programme(*_ranked(order, f, rewards, rates), positions)
    taken &= np.take_along_axis(eligible, order, axis=0)
    picks = _walk(taken)
    rows = np.arange(len(picks))[:, None]
    return np.where(picks == NO_ARM, NO_ARM, order.T[rows, picks])


def _fill(picks: Ints, eligible: NDArray[np.bool_], *, leaving: bool) -> None:
    """Add eligible arms to slates that are too short because the rest adds less than rounding shows.

    By falling revenue, or where users leave at the end.
    """
    sizes = (picks != NO_ARM).sum(axis=1)
    for row in np.flatnonzero(sizes < np.minimum(picks.shape[1], eligible.sum(axis=0))):
        chosen = picks[row, : sizes[row]]
        spare = np.setdiff1d(np.flatnonzero(eligible[:, row]), chosen)[: picks.shape[1] - len(chosen)]
        whole = np.concatenate([chosen, spare])
        picks[row, : len(whole)] = whole if leaving else np.sort(whole)
