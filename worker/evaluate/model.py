"""Models of the users of the log, cross-fitted: the model of a session was fitted on other sessions.

The sessions are dealt into folds, and the model of a fold is fitted on the displays of the others. The click model is
personal, with the features that serve, fitted on all displays at once: given context, arm and position, a click does
not depend on the reason why the arm was shown. A display without an answer was not clicked. With it come
rates as in serving (`worker.bandit.answers`): of the users who do not click on arm k at position h, the share
s_kh = min(1, ρ_k r_h) goes on, the others leave. With f_kh the click probability, the target's slate t_1 … t_H has

    V_h = f_h e_h + (1 − f_h) s_h V_{h+1}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.click_model import ClickModel, Observations
from worker.bandit.planning import slate_chances, values_of_slates
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported

FOLDS = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossFit:
    """The sessions by models of which each was fitted without one fold.

    folds : (n,), the fold of each session
    values : (n, H+1), the value V_h of the target's slate by the model without the session's fold, 0 at the end
    by_model : (folds, n), the value V_1 by each model
    chances : (n, H), click probabilities of the recorded slates by the model without the session's fold
    clicks : number of clicks that the models were fitted on
    """

    folds: Ints
    values: Floats
    by_model: Floats
    chances: Floats
    clicks: int

    def part(self, rows: Bools) -> CrossFit:
        """Return the same of some of the sessions."""
        return CrossFit(
            folds=self.folds[rows],
            values=self.values[rows],
            by_model=self.by_model[:, rows],
            chances=self.chances[rows],
            clicks=self.clicks,
        )


def cross_fit(sessions: Sessions, prior: ClickModel) -> CrossFit:
    """Fit models that start from `prior`; raise `Unsupported` if there are too few clicks."""
    count, clicks = len(sessions), int(sessions.clicked.sum())
    if clicks < LEAST_CLICKS:
        raise Unsupported(f"the log has {clicks} clicks, and a click model needs {LEAST_CLICKS}")
    fit = CrossFit(
        folds=np.random.default_rng(0).permutation(count) % FOLDS,
        values=np.zeros((count, sessions.horizon + 1)),
        by_model=np.zeros((FOLDS, count)),
        chances=np.zeros(sessions.slates.shape),
        clicks=clicks,
    )
    for fold in range(FOLDS):
        own = fit.folds == fold
        model, rates = fitted(sessions.part(~own), prior)
        wanted = slate_chances(model, sessions.contexts, sessions.target)
        values = values_of_slates(wanted, sessions.target_prices, rates.of_slates(sessions.target))
        fit.by_model[fold] = values[:, 0]
        fit.values[own, :-1] = values[own]
        fit.chances[own] = slate_chances(model, sessions.contexts[own], sessions.slates[own])
    return fit


def fitted(sessions: Sessions, prior: ClickModel) -> tuple[ClickModel, AnswerRates]:
    """Fit a click model, and the rates at which users go on."""
    rows, positions = np.nonzero(sessions.shown)
    arms, clicked = sessions.slates[rows, positions], sessions.clicks[rows, positions]
    data = Observations(
        contexts=sessions.contexts,
        sessions=rows,
        arms=arms,
        positions=positions,
        clicked=clicked.astype(np.float64),
    )
    answered = (positions < sessions.answered[rows]).astype(np.float64)
    counts = AnswerCounts.none(arms=prior.arms, horizon=sessions.horizon).plus(
        positions=positions[~clicked], arms=arms[~clicked], answered=answered[~clicked]
    )
    return prior.with_horizon(sessions.horizon).fold(data, estimator="laplace").model, counts.rates()


def unseen(sessions: Sessions, *, anywhere: bool) -> float:
    """Return the share of the target's displays with arms that no session has seen, at that position or `anywhere`."""

    def displays(slates: Ints) -> Ints:
        return slates if anywhere else slates * sessions.horizon + sessions.positions - 1

    known = np.isin(displays(sessions.target), displays(sessions.slates)[sessions.shown])
    return float((~known & (sessions.target != NO_ARM)).mean())
