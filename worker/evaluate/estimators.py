"""The off-policy estimators of the target's revenue per session.

Notation, for n sessions:

- r_h is the revenue of display h, zero except at the click.
- W_h is the importance weight of the first h displays (`worker.evaluate.support`).
- W̃_h is the same, held constant after the end of the session.
- V̂_h is the value of the target's slate from position h on, under a click model fitted on other sessions
  (`worker.evaluate.model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.evaluate.intervals import ConfidenceInterval, interval, jackknife
from worker.evaluate.model import CrossFit
from worker.evaluate.sessions import Sessions
from worker.evaluate.support import LEAST_SESSIONS, Unsupported, Weighted

#: Largest revenue at positions without support, as a share of the estimate.
MOST_BEYOND: Final = 0.1

#: The estimators, in the order of reports.
METHODS: Final = ("snips", "direct", "dr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The answer of one estimator, or the reason why it has none.

    sessions : number of sessions averaged
    difference : difference to the revenue of the same sessions as they were served
    matching : number of sessions that showed the slate of the target; None without weights
    clicks : number of clicks, or with weights of clicks of equal weight with the same information
    positions, of_positions : number of positions weighted or, without weights, valued by the model; of how many
    refused : reason for no answer
    """

    method: str
    sessions: int
    revenue: ConfidenceInterval | None = None
    difference: ConfidenceInterval | None = None
    matching: int | None = None
    clicks: float | None = None
    positions: int = 0
    of_positions: int = 0
    refused: str | None = None


def snips(weighted: Weighted, *, confidence: float) -> Estimate:
    """Estimate by inverse propensity scoring per decision, self-normalised at each position.

        V̂ = Σ_h (Σ_i W_h r_h) / (Σ_i W̃_h)

    W̃_h is a martingale of mean 1 (optional stopping), so this is consistent, with a bias of order 1/n. The revenue at
    positions without support is between 0 and the probability that they are reached, times the highest price: that
    bound must be small, and raises the upper end.

    References
    ----------
    Precup, Sutton and Singh (2000). Eligibility traces for off-policy policy evaluation. ICML.
    Swaminathan and Joachims (2015). The self-normalized estimator for counterfactual learning. NeurIPS.
    """
    sessions, depth = weighted.sessions, weighted.depth
    earned, stopped = weighted.weights * sessions.rewards, weighted.stopped
    size = stopped.mean(axis=0)
    ratios = earned.mean(axis=0) / size
    value = float(ratios[:depth].sum())
    passing = float((weighted.weights * sessions.passed)[:, depth - 1].mean())  # the last supported position
    beyond = passing * float(sessions.target_prices[:, depth:].max(initial=0.0))
    if beyond > MOST_BEYOND * value:
        raise Unsupported(
            f"position {depth + 1} has too few sessions, and the revenue from there on may be up to {beyond:.3g} per "
            "session"
        )
    influence = ((earned - ratios * stopped) / size)[:, :depth].sum(axis=1)
    return _weighted("snips", weighted, value, influence, confidence=confidence, beyond=beyond)


def doubly_robust(weighted: Weighted, fit: CrossFit, *, confidence: float) -> Estimate:
    """Estimate by the direct method, corrected by weighted residuals.

        V̂ = (1/n) Σ_i { V̂_1 + Σ_h W_h [ r_h + 1{goes on} V̂_{h+1} − V̂_h ] }

    *Unbiased for any model:* E[W_h V̂_h] is E[W_{h−1} V̂_h], and the bracket of h−1 added that. All model terms cancel,
    and Σ_h E[W_h r_h] is left. A better model has smaller brackets. The sum ends before positions without support. The
    model alone counts there, and the whole error of the direct method widens the interval.

    References
    ----------
    Jiang and Li (2016). Doubly robust off-policy value evaluation for reinforcement learning. ICML.
    Kiyohara et al. (2022). Doubly robust off-policy evaluation for ranking policies under the cascade behavior model.
    WSDM.
    """
    sessions, depth = weighted.sessions, weighted.depth
    residuals = sessions.rewards + sessions.passed * fit.values[:, 1:] - fit.values[:, :-1]
    corrections = np.where(sessions.reached, weighted.weights, 0.0) * residuals
    values = fit.values[:, 0] + corrections[:, :depth].sum(axis=1)
    value, extra = float(values.mean()), 0.0
    if depth < sessions.horizon:
        by_model, _ = _without_a_fold(fit, sessions.earned)
        extra = jackknife(value, by_model, confidence=confidence).error ** 2
    return _weighted("dr", weighted, value, values - value, confidence=confidence, extra=extra)


def _weighted(
    method: str,
    weighted: Weighted,
    value: float,
    influence: Floats,
    *,
    confidence: float,
    extra: float = 0.0,
    beyond: float = 0.0,
) -> Estimate:
    """Return an answer with its difference to the same sessions; pairing cancels their common variance."""
    earned = weighted.sessions.earned
    around = partial(interval, confidence=confidence, extra=extra, beyond=beyond)
    gained, mean = influence - (earned - earned.mean()), float(earned.mean())
    return Estimate(
        method=method,
        sessions=len(earned),
        revenue=around(value, influence),
        difference=around(value - mean, gained),
        matching=weighted.matching,
        clicks=weighted.clicks,
        positions=weighted.depth,
        of_positions=weighted.sessions.horizon,
    )


def direct(sessions: Sessions, fit: CrossFit, *, confidence: float) -> Estimate:
    """Estimate by the direct method: the mean value of the target's slates under click models.

        V̂ = (1/n) Σ_i V̂_1(x_i)

    The interval is narrow, and the log needs no chance. It covers the error of estimation by a jackknife over the
    folds: each leaves its sessions out of the model and of the mean. It does not cover a wrong form of the model.

    References
    ----------
    Beygelzimer and Langford (2009). The offset tree for learning with partial labels. KDD.
    """
    if len(sessions) < LEAST_SESSIONS:
        raise Unsupported(f"there are {len(sessions)} sessions, {LEAST_SESSIONS} are needed")
    value, earned = float(fit.values[:, 0].mean()), sessions.earned
    values, served = _without_a_fold(fit, earned)
    return Estimate(
        method="direct",
        sessions=len(sessions),
        revenue=jackknife(value, values, confidence=confidence),
        difference=jackknife(value - float(earned.mean()), values - served, confidence=confidence),
        clicks=float(fit.clicks),
        positions=sessions.horizon,
        of_positions=sessions.horizon,
    )


def _without_a_fold(fit: CrossFit, earned: Floats) -> tuple[Floats, Floats]:
    """Return the mean value of the target, and the mean revenue as served, without each of the folds."""
    others = [fit.folds != fold for fold in range(len(fit.by_model))]
    values = [values[rows].mean() for values, rows in zip(fit.by_model, others, strict=True)]
    return np.array(values), np.array([earned[rows].mean() for rows in others])
