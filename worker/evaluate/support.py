"""Support of a log for a target: importance weights along the cascade, and the information that they leave.

The weight of the first h displays of a session is the ratio of their probabilities under the target, which has one
slate t_1 … t_H for the session, and when they were served: W_h = 1{a_1 … a_h = t_1 … t_h} / P_served(a_1 … a_h | x). A
user who passes h displays has seen a_1 … a_h and no later part of the slate, so W_h turns averages over what was served
into averages under the target: E[W_h g(x, a_1 … a_h, outcome)] = E_target[g].

Two facts keep the weights small.

- *Lottery.* Sessions drawn uniformly (a share ρ, by lottery) could be evaluated alone. But every slate has a known
  probability under the mixture of lottery and plan. Its weight is the conditional expectation of the other weight given
  the slate. By Jensen its variance is never larger. It is far smaller if the target mostly agrees with the policy that
  served.
- *Stopping.* Displays after the end of a session do not matter and have no weight. W̃_h, held constant after the end of
  the session, is a martingale of mean 1.

Weights support a position if they are worth `LEAST_SESSIONS` sessions served by the target, (Σ W)² / Σ W² (Kish), and
the clicks up to there `LEAST_CLICKS`. Heavy weights that are absent by chance would make both numbers look better. So
Σ W² is taken as expected where the probability of the target's slates is known, E_served[W²] = E_target[W]. Where it is
not, the mean of W̃_h must be 1. `dr` has a model for the positions without support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.errors import FailedError
from worker.evaluate.sessions import Sessions

#: Least effective sessions at a position, and least effective clicks, for an answer.
LEAST_SESSIONS = 30
LEAST_CLICKS = 10
#: What gives weights an answer.
ADVICE: Final = "more sessions, and a random_share above 0, give an answer next time"
#: Largest deviation of mean weights from 1, in standard errors.
MOST_DEVIATION: Final = 3.0


class Unsupported(FailedError):  # noqa: N818 - a result, not a defect
    """The log does not support an answer; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighted:
    """Weighted sessions.

    weights : (n, H), W_h
    stopped : (n, H), W̃_h
    depth : number of supported positions
    clicks : number of clicks of equal weight with the same information as those of the supported positions
    """

    sessions: Sessions
    weights: Floats
    stopped: Floats
    depth: int
    clicks: float

    @property
    def matching(self) -> int:
        """Number of sessions that showed the slate of the target, as far as their users came."""
        return int((self.stopped[:, -1] > 0).sum())


def weigh(sessions: Sessions) -> Weighted:
    """Weight sessions; raise `Unsupported` if there is too little at the first position."""
    if not len(sessions):
        raise Unsupported(f"no slate was left to chance, and another policy served: {ADVICE}")
    weights = np.cumprod(sessions.target == sessions.slates, axis=1) / sessions.chances
    last = np.maximum(sessions.displayed, 1)[:, None]
    stopped = np.take_along_axis(weights, np.minimum(sessions.positions, last) - 1, axis=1)
    stopped[sessions.displayed == 0] = 1.0
    used, tiny = np.where(sessions.reached, weights, 0.0), np.finfo(np.float64).tiny
    observed = (used**2).sum(axis=0) / np.maximum(used.sum(axis=0), tiny)
    with np.errstate(divide="ignore"):
        expected = 1 / sessions.target_chances
    mean_weight = np.where(np.isnan(expected), observed, expected).mean(axis=0)  # E_target[W]
    effective = used.sum(axis=0) / np.maximum(mean_weight, tiny)
    earned, squares = ((weights * sessions.rewards**power).sum(axis=0) for power in (1, 2))
    # E[(W r)²] is taken as E_target[W] E_target[r²]: the absence of a heavy click must not increase the number.
    clicks = np.cumsum(earned) ** 2 / np.maximum(np.cumsum(mean_weight * squares), tiny)
    enough = int(np.cumprod(effective >= LEAST_SESSIONS).sum())
    depth = max((h for h in range(1, enough + 1) if clicks[h - 1] >= LEAST_CLICKS), default=0)
    if not enough:
        raise Unsupported(
            f"the first position has {effective[0]:.1f} effective sessions, {LEAST_SESSIONS} are needed: {ADVICE}"
        )
    if not depth:
        raise Unsupported(
            f"there are {clicks[:enough].max():.1f} effective clicks, {LEAST_CLICKS} are needed: {ADVICE}"
        )
    for h, column in enumerate(stopped.T[:depth] if np.isnan(expected).any() else (), start=1):
        if abs(column.mean() - 1) > MOST_DEVIATION * column.std() / np.sqrt(len(column)) + 1e-9:
            raise Unsupported(
                f"the weights of position {h} have the mean {column.mean():.2f} in place of 1: the log lacks "
                "sessions that show the ads of the target, or recorded propensities are wrong"
            )
    return Weighted(sessions=sessions, weights=weights, stopped=stopped, depth=depth, clicks=float(clicks[depth - 1]))
