"""The check of the click model: expected against observed revenue, on the sessions that were drawn uniformly.

`direct` rests on the model alone, and its interval assumes that the form of the model is right. On sessions drawn
uniformly every arm is shown to every kind of user, so errors of the form become visible. The displays of these sessions
are compared with the models fitted on other sessions, in groups:

- all displays;
- displays of an arm that the target would show to the same user, at any position: there `direct` uses the model;
- the displays at each position.

A display without an answer was not clicked.

With y the click, f its probability by the model and e the price, a group has

    z = Σ e (y − f) / √(Σ e² f (1 − f))

A model can be right on average and wrong for each kind of user. So the residuals y − f of each arm k are also compared
with the features x, by a score test: with g_k = Σ (y − f) [1; x] and M_k = Σ f (1 − f) [1; x][1; x]ᵀ, the sum over arms
of g_kᵀ M_k⁻¹ g_k is χ² if the model is right. `form_z` is its normal deviate (Wilson and Hilferty).

The check fails if `form_z`, or |z| of any group, exceeds its quantile. All of them together have a probability of
`ALARM` for a false alarm (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats
from worker.bandit.misfit import chi_square_deviations
from worker.evaluate.model import CrossFit
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS

#: Probability that the check fails although the model is right.
ALARM: Final = 0.02
TARGET: Final = "arms of the target"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCheck:
    """A group of displays: clicks and revenue, observed and expected by the model.

    low, high : interval of observed / expected revenue, at the confidence of the evaluation
    """

    group: str
    displays: int
    clicks: int
    expected_clicks: float
    revenue: float
    expected_revenue: float
    low: float
    high: float
    z: float

    @property
    def ratio(self) -> float:
        """Observed / expected revenue."""
        return self.revenue / self.expected_revenue


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The check of all groups with enough expected clicks; `sessions` is the number of sessions drawn uniformly.

    form_z : deviate of the score test of arms and features; None if no arm has enough clicks
    """

    sessions: int
    groups: Sequence[GroupCheck]
    form_z: float | None

    @property
    def suffices(self) -> bool:
        """Whether there are enough clicks on arms of the target, which matter most."""
        return any(group.group == TARGET for group in self.groups)

    @property
    def failed(self) -> tuple[GroupCheck, ...]:
        """The groups in which the model is wrong."""
        most = NormalDist().inv_cdf(1 - ALARM / (4 * max(1, len(self.groups))))
        return tuple(group for group in self.groups if abs(group.z) > most)

    @property
    def form_failed(self) -> bool:
        """Whether the errors of the model depend on arm and features."""
        return self.form_z is not None and self.form_z > NormalDist().inv_cdf(1 - ALARM / 2)

    @property
    def passed(self) -> bool | None:
        """Whether the model passed the check; None if there is too little to check it with."""
        if self.failed or self.form_failed:
            return False
        return True if self.suffices else None


def check_model(sessions: Sessions, fit: CrossFit, *, confidence: float) -> ModelCheck:
    """Compare the displays of sessions drawn uniformly with the models of their folds."""
    chances, shown = fit.chances, sessions.shown & sessions.drawn[:, None]
    groups = {"all displays": shown, TARGET: shown & _wanted(sessions)}
    groups |= {f"position {h}": shown & (sessions.positions == h) for h in range(1, sessions.depth + 1)}
    width = NormalDist().inv_cdf((1 + confidence) / 2)
    checks = [
        _check(name, members, sessions, chances, width)
        for name, members in groups.items()
        if chances[members].sum() >= LEAST_CLICKS
    ]
    return ModelCheck(sessions=int(sessions.drawn.sum()), groups=checks, form_z=_form(sessions, shown, chances))


def _form(sessions: Sessions, shown: Bools, chances: Floats) -> float | None:
    """Return the deviate of the score test over the arms with enough expected clicks."""
    rows, columns = np.nonzero(shown)
    arms, expected = sessions.slates[rows, columns], chances[rows, columns]
    residuals = sessions.clicks[rows, columns] - expected
    known = np.bincount(arms, expected, sessions.prices.shape[1])
    total, freedom = 0.0, 0
    for arm in np.flatnonzero(known >= LEAST_CLICKS).tolist():
        of_arm = arms == arm
        features = np.column_stack([np.ones(of_arm.sum()), sessions.contexts[rows[of_arm]]])
        score = features.T @ residuals[of_arm]
        spread = (features * (expected * (1 - expected))[of_arm, None]).T @ features
        total += float(score @ np.linalg.pinv(spread, hermitian=True) @ score)
        freedom += int(np.linalg.matrix_rank(spread, hermitian=True))
    return float(chi_square_deviations(np.array(total), np.array(freedom))) if freedom else None


def _wanted(sessions: Sessions) -> Bools:
    """Return whether the target would show the arm of each display to the same user: (n, H)."""
    found = np.zeros(sessions.slates.shape, dtype=bool)
    for slates in sessions.target_slates[:, :, : sessions.depth]:
        found |= (sessions.slates[:, :, None] == slates[:, None, :]).any(axis=2)
    return np.asarray(found & (sessions.slates != NO_ARM))


def _check(name: str, members: Bools, sessions: Sessions, chances: Floats, width: float) -> GroupCheck:
    expected, price = chances[members], sessions.price(sessions.slates)[members]
    clicked = sessions.clicks[members]
    revenue, wanted = float((price * clicked).sum()), float((price * expected).sum())
    deviation = float(np.sqrt((price**2 * expected * (1 - expected)).sum()))
    return GroupCheck(
        group=name,
        displays=int(members.sum()),
        clicks=int(clicked.sum()),
        expected_clicks=float(expected.sum()),
        revenue=revenue,
        expected_revenue=wanted,
        low=max(0.0, (revenue - width * deviation) / wanted),
        high=(revenue + width * deviation) / wanted,
        z=(revenue - wanted) / deviation,
    )
