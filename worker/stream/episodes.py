"""The episode record of a closed window: sessions, clicks, revenue and regret, what was forgotten and is missed.

- `reward` and `expected_reward` are by the version that served each session, with its prices; if that version is no
  longer kept, by the parent of the fold.
- `explored` counts a session by the share of its positions that explored, so that it compares with M_t.
- `regret_bound` is the mean optimistic gap V^ucb − V̂^π per session, `regret_posterior` the mean posterior regret, of
  the slates as served, under the estimate after the window (docs/math.md §6). Both hold if the model is right. Both are
  means over an evenly spread sample of the sessions, and both take every arm as eligible that is active or in one of
  these slates: else a slate with a retired arm could be better than the best.
- A number that cannot be computed, or that leaves the floating-point range, is null (0 for the two rewards). An
  assessment never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import TypeVar

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints, spread
from worker.bandit.planning import slate_values
from worker.bandit.regret import optimistic_gap, posterior_regret
from worker.stream.accounts import click_prices
from worker.stream.calibration import Predicted, window_figures
from worker.stream.events import CalibrationRecord, Episode
from worker.stream.feature_changes import contexts_of
from worker.stream.folding import one_thread
from worker.stream.joining import ClosedWindow
from worker.stream.lift import Lift
from worker.stream.misfit import missed_by
from worker.stream.parameters import Parameters

T = TypeVar("T")

#: Bounds on the contexts sampled for the two regrets, and on contexts × arms (× draws).
MOST_BOUNDED, BOUNDED_ELEMENTS = 512, 4_000_000
MOST_DRAWN, DRAWN_ELEMENTS, DRAWS = 64, 8_000_000, 32
LEAST = 8


def episode_of(
    window: ClosedWindow,
    parent: Parameters,
    current: Parameters,
    kept: Mapping[int, Parameters],
    predicted: Predicted | None = None,
    *,
    lift: Lift | None,
    rejected: str | None,
) -> Episode:
    """Return the episode of a window that was closed under `parent`, with `current` in force since.

    `kept` are the versions that may have served it; `predicted` is what the parent expected of its displays; `lift` is
    the comparison up to its end; `rejected` is why there is no usable estimate.
    """
    nothing: tuple[float | None, float | None] = (None, None)
    folded = current.folds > parent.folds
    with one_thread(), np.errstate(all="ignore"):
        reward, expected = _tried(lambda: _revenue(window, parent, kept), nothing)
        bound, posterior = _tried(lambda: _regrets(window, current), nothing)
        calibration = _tried(lambda: _calibration(predicted, current, folded=folded), None)
        missing = _tried(lambda: missed_by(current), None)
    explored = [sum(plan.explored) / max(1, len(plan.slate)) for plan in window.plans]
    return Episode(
        version=current.version,
        window_start=window.start,
        window_end=window.end,
        sessions=window.sessions,
        displays=int(window.answered.sum()),
        clicks=int(window.clicked.sum()),
        reward=_finite(reward) or 0.0,
        expected_reward=_finite(expected) or 0.0,
        explored=float(sum(explored)),
        regret_bound=_finite(bound),
        regret_posterior=_finite(posterior),
        frozen=current.frozen,
        rejected=rejected,
        calibration=calibration,
        kept=current.kept if folded and current.kept < 1 else None,
        changed_arms=(current.changed or None) if folded else None,
        lift=None if lift is None else lift.figures,
        guarded=current.guarded,
        missed=missing or None,
    )


def _calibration(predicted: Predicted | None, current: Parameters, *, folded: bool) -> CalibrationRecord | None:
    """Return the figures of a window; if it made no version, the sums per ad have it in its episode only."""
    if predicted is None:
        return None
    sums = current.calibration if folded else current.calibration.plus(predicted, arms=len(current.arms))
    return window_figures(predicted, sums, [arm.arm for arm in current.arms])


def _finite(number: float | None) -> float | None:
    return number if number is not None and isfinite(number) else None


def _tried(compute: Callable[[], T], otherwise: T) -> T:
    """Return what is computed, or `otherwise` after an error that the data caused."""
    try:
        return compute()
    except MemoryError:
        raise
    except Exception:
        return otherwise


def _revenue(
    window: ClosedWindow, parent: Parameters, kept: Mapping[int, Parameters]
) -> tuple[float | None, float | None]:
    """Return the revenue and the expected revenue."""
    numbers, expected = np.array([plan.parameters_version for plan in window.plans]), 0.0
    for number in np.unique(numbers).tolist():
        version = kept.get(number, parent)
        if version.arms:
            rows = np.flatnonzero(numbers == number)
            contexts, slates = _contexts(version, window, rows), window.slates.indices(rows, version.indices)
            revenue = slate_values(version.model, version.rewards, contexts, slates, version.rates)[:, 0]
            expected += float(revenue.sum())
    return float(sum(click_prices(window, parent, kept).tolist())), expected


def _regrets(window: ClosedWindow, current: Parameters) -> tuple[float | None, float | None]:
    arms = len(current.arms)
    rows = spread(len(window.plans), min(MOST_BOUNDED, max(LEAST, BOUNDED_ELEMENTS // max(1, arms))))
    slates = window.slates.indices(rows, current.indices)
    shown = np.unique(slates[slates != NO_ARM])
    eligible = list(current.arms)
    for index in shown.tolist():
        eligible[index] = replace(eligible[index], active=True)
    planner = replace(current, arms=tuple(eligible)).planner(dtype=np.float64)
    if planner is None:
        return None, None
    gaps = optimistic_gap(planner, _contexts(current, window, rows), slates, beta=current.settings.beta)
    bound = gaps.mean()
    rows = rows[spread(len(rows), min(MOST_DRAWN, max(LEAST, DRAWN_ELEMENTS // (arms * DRAWS))))]
    losses = posterior_regret(
        planner,
        _contexts(current, window, rows),
        window.slates.indices(rows, current.indices),
        # The same window and version give the same draws in every learner.
        generator=np.random.default_rng([current.version, window.end]),
        draws=DRAWS,
    )
    return float(bound), float(losses.mean())


def _contexts(version: Parameters, window: ClosedWindow, rows: Ints) -> Floats:
    return version.prepared(contexts_of(version, [window.plans[row] for row in rows.tolist()]))
