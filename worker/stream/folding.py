"""From a closed window to the next estimate, and to the exploration of the next sessions.

Rules that hold in this file:

- The same parent, window and settings give the same bits: sessions are in the order of their keys, every sum has one
  order, and BLAS runs in one thread under any settings of the caller.
- The gate: the estimate is finite, its precision positive definite, Newton's method converged, the step bounded, also
  after the information is rounded (`packing.py`).
  Otherwise, and after any other error of the computation, `EstimationError`, and the parent stays in force. Only an
  error that the machine causes (no memory) is passed on: another machine may have more.
- Exploration is planned for as many users as the window had. N = sessions of this window, t = the episode that comes,
  folds so far + 1: M_t = max(1, ⌊N e^{−t/ln T}⌋) of them are to explore; under `aucbbp`, τ_h is the score of rank M_t
  among the window's own contexts under the new estimate (docs/math.md §5). Where several have that very score, a share
  of them explores. Sessions of the control group and those drawn at random (`random_share`) explore nothing, so the
  rank is scaled up to the share of the others.
- How well the parent predicted the window, and what it may miss, are summed before anything is learned
  (`calibration.py`, `misfit.py`).
- Answers are counted for every window that makes a version (`answers.py`), and fade as the estimate does.
- Centre and scale of contexts come from all sessions up to the first fold, at least `LEAST_SESSIONS`
  (`contexts.py`). As long as there are fewer, the version keeps them, and no fold happens. A number that was declared
  later gets its scale from the first sessions that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import Floats, spread
from worker.bandit.bonuses import BONUSES, explore_budget, restarted
from worker.bandit.click_model import ClickModel, Fit
from worker.bandit.learning import AUTO, changes_after
from worker.bandit.planning import Planner
from worker.bandit.policies import POLICIES, Ucbbp, exploration_scores
from worker.errors import AdcascadeError, EstimationError
from worker.stream.calibration import SESSIONS, Predicted, predict
from worker.stream.contexts import LEAST_SESSIONS, ObservedSessions, Standardisation
from worker.stream.feature_changes import contexts_of
from worker.stream.joining import ClosedWindow, SessionPlan
from worker.stream.misfit import misfit_after
from worker.stream.packing import rounded
from worker.stream.parameters import NEVER, Parameters, first_model
from worker.stream.session import excluded_indices, packed_indices

#: Contexts × arms that are scored for the thresholds; a larger window is sampled.
MOST_SCORED = 20_000_000
#: Fewest contexts scored.
LEAST_SCORED = 500
ROWS_AT_ONCE = 4096


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()  # slow: it inspects all loaded libraries


def one_thread() -> AbstractContextManager[object]:
    """Return a context manager that holds BLAS to one thread."""
    limit: AbstractContextManager[object] = _blas().limit(limits=1, user_api="blas")
    return limit


def fold(parent: Parameters, window: ClosedWindow, predicted: Predicted | None = None) -> Parameters:
    """Fold a window into the parent's estimate, under the parent's settings; raise `EstimationError` at the gate.

    Return the parent with the new estimate, not yet numbered, or with the sessions of the window if these only wait for
    more. `predicted` is what the parent expected of the window.
    """
    settings = parent.settings
    try:
        with one_thread(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            sessions = observed(parent, window)
            if parent.awaits_standardisation:
                if len(sessions) < LEAST_SESSIONS:
                    return replace(parent, pending=sessions, answers=_answers(parent, window, 1.0))
                parent = replace(parent, pending=None, standardisation=_standardisation(parent, sessions))
                first = first_model(settings, parent.arms, parent.prepared(sessions.contexts))
                parent = replace(parent, model=first)
            elif parent.standardisation is not None:
                parent = replace(parent, standardisation=parent.standardisation.completed(sessions.contexts))
            data = sessions.observations(parent.prepared)
            fit = parent.model.fold(
                data, estimator=settings.estimator, forgetting=settings.forgetting, changes=parent.changes
            )
            forgotten = fit.forgotten(sum(arm.active for arm in parent.arms))
            clock = restarted(parent.clock + 1, forgotten, settings.horizon_episodes)
            folded = replace(
                parent,
                model=rounded(fit.model, intercept=settings.intercept),
                folds=parent.folds + 1,
                clock=clock,
                kept=fit.kept,
                changed=tuple(parent.arms[index].arm for index in fit.changed),
                changes=changes_after(parent.changes, forgotten),
                observations=parent.observations + len(data),
                expected_sessions=window.sessions,
                explore_budget=explore_budget(window.sessions, clock + 1, settings.horizon_episodes),
                answers=_answers(parent, window, fit.kept),
            )
            return with_thresholds(replace(folded, **_compared(parent, predicted, fit)), window.plans)
    except MemoryError:
        raise
    except Exception as error:  # a window must not be able to stop the learner
        reason = str(error) if isinstance(error, AdcascadeError) else f"{type(error).__name__}: {error}"
        raise EstimationError(reason) from error


def predicted_by(parent: Parameters, window: ClosedWindow) -> Predicted | None:
    """Return what a version expects of the displays of a window; None if nothing is folded, or after an error."""
    if not parent.folds:
        return None
    try:
        with one_thread(), np.errstate(all="ignore"):
            sessions = observed(parent, window)
            names = ("control" if plan.control else "random" if plan.random else "chosen" for plan in window.plans)
            kinds = np.fromiter(map(SESSIONS.index, names), np.intp, len(window.plans))
            return predict(parent.model, sessions.observations(parent.prepared), kinds[sessions.rows])
    except MemoryError:
        raise
    except Exception:  # the fold says why
        return None


def _compared(parent: Parameters, predicted: Predicted | None, fit: Fit[ClickModel]) -> dict[str, Any]:
    """Return the sums of how well the parent predicted, with the window of a fold."""
    if predicted is None:
        return {}
    arms = len(parent.arms)
    sums = {"calibration": parent.calibration.plus(predicted, arms=arms, kept=fit.kept)}
    if parent.settings.forgetting == AUTO and (fit.kept < 1 or fit.changed):  # what has changed is no misfit
        return sums
    return sums | {"misfit": misfit_after(parent.misfit, parent.settings, predicted.data, predicted.chances, arms=arms)}


def observed(parameters: Parameters, window: ClosedWindow) -> ObservedSessions:
    """Return the sessions that the next fold learns from: those that wait, and those of the window.

    A display without an answer was not clicked. Displays of arms that the version does not have are left out.
    """
    arms = window.slates.arms(window.codes, parameters.indices)
    known = arms >= 0
    sessions = ObservedSessions(
        contexts=contexts_of(parameters, window.plans),
        rows=window.rows[known],
        arms=arms[known],
        positions=window.positions[known],
        clicked=window.clicked[known].astype(np.float64),
    )
    return sessions if parameters.pending is None else parameters.pending.followed_by(sessions)


def _standardisation(parameters: Parameters, sessions: ObservedSessions) -> Standardisation:
    features = parameters.settings.features
    numbers = features.number_columns if features is not None and features.context else None
    return Standardisation.estimate(sessions.contexts, numbers)


def _answers(parent: Parameters, window: ClosedWindow, keep: float) -> AnswerCounts | None:
    """Return the counts of who goes on, with those of the window; clicks and unknown arms are left out."""
    counts = parent.answers
    if counts is None:
        return None
    arms = window.slates.arms(window.codes, parent.indices)
    counted = (arms >= 0) & ~window.clicked
    return (counts if keep == 1 else counts.faded(keep)).plus(
        positions=window.positions[counted] - 1,
        arms=arms[counted],
        answered=window.answered[counted].astype(np.float64),
    )


# ── thresholds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def with_thresholds(parameters: Parameters, plans: Sequence[SessionPlan]) -> Parameters:
    """Return a version whose thresholds let its budget of the expected sessions explore, judged by the plans of some.

    A threshold is τ_h, a tie the share of the sessions with exactly that score that explore; no ties if all do.
    """
    settings = parameters.settings
    # The sessions that the policy plans are neither in the control group nor drawn at random.
    planned_for = parameters.expected_sessions * (1 - settings.control_share) * (1 - settings.random_share)
    planner = parameters.planner()
    everybody = (0.0,) * settings.horizon
    if planner is None or not POLICIES[settings.policy].is_selective or parameters.explore_budget >= planned_for:
        return replace(parameters, thresholds=everybody, ties=())
    rows = spread(len(plans), max(LEAST_SCORED, MOST_SCORED // len(planner.shown)))
    rank = parameters.explore_budget * len(rows) / planned_for
    scores = _scores(parameters, planner, [plans[row] for row in rows.tolist()])
    thresholds, ties = zip(*(score_of_rank(column, rank) for column in scores.T), strict=True)
    return replace(parameters, thresholds=thresholds, ties=ties if min(ties) < 1 else ())


def with_new_arms(changed: Parameters, plans: Sequence[SessionPlan]) -> Parameters:
    """Return a version with new arms whose thresholds keep the budget until the next fold.

    The thresholds of the parent would not: the width of a new arm exceeds them for nearly every session. `plans` are
    the sessions of open windows. Of too few to find a session in M_t by, none explores.
    """
    settings = changed.settings
    if not any(changed.thresholds) or not POLICIES[settings.policy].is_selective:
        return changed
    if changed.explore_budget * len(plans) < max(1, changed.expected_sessions):
        return replace(changed, thresholds=(NEVER,) * settings.horizon, ties=())
    with one_thread():
        return with_thresholds(changed, plans)


def _scores(parameters: Parameters, planner: Planner, plans: list[SessionPlan]) -> Floats:
    """Return zᵀA⁻¹z at the optimistic arm of each step, as serving computes it: (n, H)."""
    settings = parameters.settings
    policy = Ucbbp(beta=settings.beta, bonus=BONUSES[settings.bonus], spread=settings.spread)
    indices = packed_indices(parameters.indices) if any([plan.exclude for plan in plans]) else {}  # noqa: C419 - twice as fast
    parts = []
    for start in range(0, len(plans), ROWS_AT_ONCE):
        part = plans[start : start + ROWS_AT_ONCE]
        contexts = parameters.prepared(contexts_of(parameters, part))
        masked = planner.masked([excluded_indices(plan.exclude, indices) for plan in part] if indices else None)
        # Any keys will do: scores are ranked.
        keys = np.arange(start, start + len(part), dtype=np.uint32)
        slates = policy.slates(planner, contexts, masked, keys=keys)
        parts.append(exploration_scores(planner, contexts, slates.arms))
    return np.concatenate(parts)


def score_of_rank(scores: Floats, rank: float) -> tuple[float, float]:
    """Return the score of a rank counted from the highest, and the share of the sessions with that score to take.

    Between two ranks, the score is in between; where the scores of both are equal, the share is what is left to take.

    >>> [score_of_rank(np.array([1.0, 4.0, 2.0]), rank) for rank in (2, 1.5)]
    [(2.0, 1.0), (3.0, 1.0)]
    >>> score_of_rank(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 2)
    (1.0, 0.25)
    """
    falling = -np.sort(-scores)
    rank = min(max(rank, 1.0), float(len(falling)))
    above = int(rank)
    last = float(falling[above - 1])
    first, end = (int(np.searchsorted(-falling, -last, side=side)) for side in ("left", "right"))
    if end > rank:
        return last, (rank - first) / (end - first)
    if rank == above:
        return last, 1.0
    share = rank - above
    return float(last * (1 - share) + falling[above] * share), 1.0
