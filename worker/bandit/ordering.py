"""Slates without repeats: each arm at most once in a session (docs/math.md §7).

Whatever set of arms is shown, its best order is by falling revenue (exchange argument), so the best slate is an exact
dynamic programme over arms sorted that way, m being the displays left:

    V(i, m) = max( V(i+1, m),  f_i e_i + (1 − f_i) V(i+1, m−1) )

Where a share s of the users who do not click goes on, the same argument orders a set by f e / (1 − s (1 − f)), which
depends on the user; with s = 1 it is e. For this s and f are those of a mean position. The probabilities and rates of
each position themselves enter the programme, position H − m + 1 being the one with m displays left. The order is exact
where positions are alike, and close where they differ slowly.

A slate is never shorter than it has to be: it has H arms, or all that are eligible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.answers import Cascade, shifted
from worker.bandit.arrays import NO_ARM, Array, Floats, Ints, Keys
from worker.bandit.planning import Masked, Optimism, Planner

ARMS_AT_ONCE = 128  # whose probabilities at all positions are computed in one call


class _Way(NamedTuple):
    """Probabilities to plan slates on, (rows, K), and what must not be shown."""

    chances: Callable[[slice], Array]
    masked: Masked | None


def greedy_slates(planner: Planner, contexts: Floats, masked: Masked | None = None) -> Ints:
    """Return the best slates under the estimate: (n, d) → (n, H), NO_ARM at the end of shorter ones."""
    (greedy,) = _best(planner, contexts, _estimated(planner, contexts, masked, None))
    return greedy


def optimistic_slates(planner: Planner, contexts: Floats, optimism: Optimism, masked: Masked | None = None) -> Ints:
    """Return the best slates under the optimistic probabilities of the bonus: (n, d) → (n, H)."""
    (optimistic,) = _best(planner, contexts, _hoped(planner, contexts, optimism, masked))
    return optimistic


def both_slates(
    planner: Planner, contexts: Floats, optimism: Optimism, masked: Masked | None = None
) -> tuple[Ints, Ints]:
    """Return the greedy and the optimistic slates. In small batches, both together take the time of one of them.

    Where optimism is spread, greedy sessions show by turns what is alike: each is planned for the arms that are some
    turns before those that it is shown.
    """
    keys = None if optimism.spread is None else optimism.spread.keys
    estimated = _estimated(planner, contexts, masked, keys)
    greedy, optimistic = _best(planner, contexts, estimated, _hoped(planner, contexts, optimism, masked))
    return _by_turns(planner, greedy, keys), optimistic


def _estimated(planner: Planner, contexts: Floats, masked: Masked | None, keys: Keys | None) -> _Way:
    if masked is not None and keys is not None and planner.alike is not None:
        turns = keys.astype(np.intp)
        masked = Masked(masked.rows, planner.alike.turned(masked.columns, -turns[masked.rows]))
    return _Way(lambda rows: planner.heads.probabilities(contexts[rows]), masked)


def _by_turns(planner: Planner, slates: Ints, keys: Keys | None) -> Ints:
    """Return what sessions with these keys are shown in place of slates: what is alike by turns."""
    if keys is None or planner.alike is None:
        return slates
    shown = planner.shown[planner.alike.turned(planner.columns_of(slates), keys.astype(np.intp)[:, None])]
    return np.where(slates == NO_ARM, NO_ARM, shown)


def _hoped(planner: Planner, contexts: Floats, optimism: Optimism, masked: Masked | None) -> _Way:
    def chances(rows: slice) -> Array:
        spread = optimism.spread
        factors = None if spread is None else spread.factors(rows, planner.arm_keys, planner.dtype)
        log_odds, widths = planner.heads.log_odds(contexts[rows]), planner.heads.widths(contexts[rows])
        return optimism.bonus.optimistic(log_odds, optimism.beta * widths, factors)

    return _Way(chances, masked)


def _best(planner: Planner, contexts: Floats, *ways: _Way) -> list[Ints]:
    """Return the best slates of each way, (n, H)."""
    columns = planner.by_falling_revenue
    cascade = planner.cascade.choose(columns).astype(planner.dtype)
    shown = planner.shown[columns]
    slates = [np.full((len(contexts), planner.horizon), NO_ARM, dtype=np.intp) for _ in ways]
    rewards = planner.rewards[shown].astype(planner.dtype)
    place = np.argsort(columns)
    for part in planner.slices(contexts):
        f = np.concatenate([way.chances(part) for way in ways]).T[columns]
        eligible = np.ones(f.shape, dtype=bool)
        starts = range(0, f.shape[1], part.stop - part.start)
        for way, start in zip(ways, starts, strict=True):
            if way.masked is not None:
                rows, excluded = way.masked.within(part)
                eligible[place[excluded], start + rows] = False
                f[place[excluded], start + rows] = 0
        picks = _pick(f, rewards, eligible, planner.horizon, cascade)
        arms = np.where(picks == NO_ARM, NO_ARM, shown[picks])
        for found, start in zip(slates, starts, strict=True):
            found[part] = arms[start : start + part.stop - part.start]
    return slates


def _pick(f: Array, rewards: Array, eligible: NDArray[np.bool_], horizon: int, cascade: Cascade) -> Ints:
    """Return the best slates of arms by falling revenue, as indices into them: f and eligible (arms, rows) → (rows, H).

    An arm with f = 0 is never taken: it leaves V as it is, to the bit, because V rises with m. That V rises whatever
    the rounding is why the programme has (1 − f) V and not V + f (e − V). Where users leave, or positions differ, V may
    fall with m.
    """
    taken = np.zeros((horizon, *f.shape), dtype=bool)
    if cascade.rates is None:
        _programme(f, rewards[:, None], horizon, cascade, taken=taken)
        picks = _walk(taken if cascade.odds is None else taken & eligible)
    else:
        order = by_worth(f, rewards, cascade.rates, cascade.odds)
        ranked = np.take_along_axis(f, order, axis=0)
        _programme(ranked, rewards[order], horizon, cascade, order, taken)
        taken &= np.take_along_axis(eligible, order, axis=0)
        picks = _walk(taken)
        picks = np.where(picks == NO_ARM, NO_ARM, order.T[np.arange(len(picks))[:, None], picks])
    _fill(picks, eligible, leaving=cascade.rates is not None)
    return picks


def best_values(chances: Floats, rewards: Floats, horizon: int, cascade: Cascade | None = None) -> Floats:
    """Return the revenue of the best slates without repeats when probabilities are given: (n, K) → (n,), float64.

    Probabilities are those of the first position.
    """
    cascade = cascade or Cascade()
    if cascade.rates is None:
        falling = np.argsort(-rewards, kind="stable")
        return np.asarray(_programme(chances.T[falling], rewards[falling, None], horizon, cascade)[-1])
    order = by_worth(chances.T, rewards, cascade.rates, cascade.odds)
    ranked = np.take_along_axis(chances.T, order, axis=0)
    return np.asarray(_programme(ranked, rewards[order], horizon, cascade, order)[-1])


def _programme(
    f: Array,
    rewards: Array,
    horizon: int,
    cascade: Cascade,
    order: Ints | None = None,
    taken: NDArray[np.bool_] | None = None,
    earned: Array | None = None,
) -> Array:
    """Return V with m = 0 … H displays left, for f (arms, rows) in the order of showing: (H+1, rows).

    `order` (arms, rows) are the columns of the cascade in that order. The arms that it takes with m displays left are
    noted in `taken`, and what each earns with the best slate after it in `earned`, (H, arms, rows) both.
    """
    values = np.zeros((horizon + 1, f.shape[1]), dtype=f.dtype)
    with_it = np.empty_like(values[1:])
    # The position with m displays left is H − m + 1: along the first axis of `values`, positions run backwards.
    odds = None if cascade.odds is None else cascade.odds[::-1, None]
    rates = None if cascade.rates is None else cascade.rates[::-1]
    for end in range(len(f), 0, -ARMS_AT_ONCE):
        part = slice(max(0, end - ARMS_AT_ONCE), end)
        clicked = f[part, None] if odds is None else shifted(f[part, None], odds)
        missed, gained = 1 - clicked, clicked * rewards[part, None]
        for i in range(end - 1, part.start - 1, -1):
            np.multiply(values[:-1], missed[i - part.start], out=with_it)
            if rates is not None and order is not None:
                with_it *= rates[:, order[i]]
            with_it += gained[i - part.start]
            if earned is not None:
                earned[:, i] = with_it
            if taken is not None:
                np.greater(with_it, values[1:], out=taken[:, i])
            np.maximum(values[1:], with_it, out=values[1:])
    return values


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


def by_worth(f: Array, rewards: Array, rates: Array, odds: Array | None = None) -> Ints:
    """Return the order in which a set of arms is best shown where users leave: (arms, rows) → (arms, rows).

    `rates` (H, arms) and `odds` (H,) are those of the cascade.
    """
    if odds is not None:
        f = shifted(f, np.exp(np.log(odds).mean()))
    going_on = rates.mean(axis=0)[:, None] * (1 - f)
    worth = f * rewards[:, None] / np.maximum(1 - going_on, np.finfo(f.dtype).tiny)
    return np.argsort(-worth, axis=0, kind="stable")


def order_of_showing(chances: Floats, rewards: Floats, cascade: Cascade) -> Ints:
    """Return the order in which a user with these click probabilities is shown arms: (K,) → (K,)."""
    falling, rates = np.argsort(-rewards, kind="stable"), cascade.rates
    if rates is None:
        return falling
    return falling[by_worth(chances[falling, None], rewards[falling], rates[:, falling], cascade.odds)[:, 0]]


def earned_in_order(chances: Floats, rewards: Floats, horizon: int, cascade: Cascade, order: Ints) -> Floats:
    """Return what each arm earns with the best slate after it, with m = 1 … H displays left: (K,) → (H, K) in order."""
    earned = np.empty((horizon, len(order), 1))
    _programme(chances[order, None], rewards[order, None], horizon, cascade, order[:, None], earned=earned)
    return earned[:, :, 0]


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


def fixed_slates(planner: Planner, count: int, order: Sequence[int] = (), masked: Masked | None = None) -> Ints:
    """Return the first eligible arms of an order for each of `count` sessions, each arm once: (n, H).

    Arms that are not in the order follow by their index.
    """
    active, horizon = dict.fromkeys(planner.shown.tolist()), planner.horizon
    ranked = [arm for arm in dict.fromkeys((*order, *active)) if arm in active]
    arms = np.full((count, horizon), NO_ARM, dtype=np.intp)
    arms[:, : len(ranked)] = ranked[:horizon]
    gone: dict[int, set[int]] = {}
    if masked is not None:
        for row, arm in zip(masked.rows.tolist(), planner.shown[masked.columns].tolist(), strict=True):
            gone.setdefault(row, set()).add(arm)
    for row, out in gone.items():
        left = list(islice((arm for arm in ranked if arm not in out), horizon))
        arms[row] = left + [NO_ARM] * (horizon - len(left))
    return arms
