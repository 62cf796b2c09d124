"""The check of the click model: expected against observed revenue, on the sessions that were drawn uniformly.

`direct` rests on the model alone, and its interval assumes that the form of the model is right. On sessions drawn
uniformly every arm is shown to every kind of user, so errors of the form become visible. Two groups of the displays of
these sessions are compared with the models fitted on other sessions: all, and those of arms that the target would show
to the same user, at any position, where `direct` uses the model. A display without an answer was not clicked.

With y the click, f its probability by the model and e the price, a group has

    z = Σ e (y − f) / √(Σ e² f (1 − f))

The check fails if |z| of either group exceeds its quantile; both together have a probability of `ALARM` for a false
alarm (Bonferroni).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from worker.bandit.arrays import NO_ARM
from worker.evaluate.model import CrossFit
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS

#: Probability that the check fails although the model is right.
ALARM: Final = 0.02
#: Largest |z| of a model that is right.
MOST: Final = NormalDist().inv_cdf(1 - ALARM / 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCheck:
    """A group of displays: clicks, those expected by the model, observed / expected revenue, and its deviation."""

    group: str
    displays: int
    clicks: int
    expected_clicks: float
    ratio: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The check of the groups with enough expected clicks; `sessions` is the number of sessions drawn uniformly."""

    sessions: int
    groups: tuple[GroupCheck, ...]

    @property
    def passed(self) -> bool | None:
        """Whether the model passed the check; None if there is too little on arms of the target to check it with."""
        if any(abs(group.z) > MOST for group in self.groups):
            return False
        return True if len(self.groups) == 2 else None


def check_model(sessions: Sessions, fit: CrossFit) -> ModelCheck:
    """Compare the displays of sessions drawn uniformly with the models of their folds."""
    shown = sessions.shown & sessions.drawn[:, None]
    wanted = (sessions.slates[:, :, None] == sessions.target[:, None, :]).any(axis=2) & (sessions.slates != NO_ARM)
    groups = {"all displays": shown, "arms of the target": shown & wanted}
    return ModelCheck(
        sessions=int(sessions.drawn.sum()),
        groups=tuple(
            _check(name, members, sessions, fit)
            for name, members in groups.items()
            if fit.chances[members].sum() >= LEAST_CLICKS
        ),
    )


def _check(name: str, members: Bools, sessions: Sessions, fit: CrossFit) -> GroupCheck:
    chances, prices, clicked = fit.chances[members], sessions.prices[members], sessions.clicks[members]
    revenue, expected = float((prices * clicked).sum()), float((prices * chances).sum())
    return GroupCheck(
        group=name,
        displays=int(members.sum()),
        clicks=int(clicked.sum()),
        expected_clicks=float(chances.sum()),
        ratio=revenue / expected,
        z=float((revenue - expected) / np.sqrt((prices**2 * chances * (1 - chances)).sum())),
    )
