"""What sessions were worth under the true model: the part of the accounts that only a simulation can keep.

Expected, not earned: the value of a slate is the mean over all that its user might do, so a score says how good the
slates were, without the luck of the clicks. What was really earned is told beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from worker.bandit.planning import Planner
from worker.bandit.regret import best_revenue, slate_revenue
from worker.simulation.users import Users


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of one period.

    `oracle` is the expected revenue of the best slates, `served` that of the slates they got; the difference is the
    pseudo-regret. `earned` is what their clicks brought. `answered` and `clicked` count displays, by position.
    """

    sessions: int
    oracle: float
    served: float
    earned: float
    answered: tuple[int, ...]
    clicked: tuple[int, ...]

    @property
    def regret(self) -> float:
        """The pseudo-regret V^{π*} − V^{π} of all the sessions."""
        return self.oracle - self.served


class Judge:
    """Scores what a crowd was served.

    Parameters
    ----------
    users : the crowd, whose truth is known
    repeats : whether a slate may show an arm twice, for the oracle as for everyone
    """

    def __init__(self, users: Users, *, repeats: bool = True) -> None:
        self._users = users
        world = users.world
        self._planner = Planner(world.truth, world.rewards, horizon=users.horizon, repeats=repeats, dtype=np.float64)

    def score(self, period: int, served: Mapping[str, tuple[str, ...]]) -> Score:
        """Score the users of a period by the slates they were served, by session id."""
        users, world = self._users, self._users.world
        horizon = users.horizon
        places, slates = users.slates(period, served)
        contexts = users.cohort(period).contexts[places]
        best = best_revenue(self._planner, world.truth.probabilities(contexts))
        worth = slate_revenue(world.truth.theta_context, users.biases, users.rewards, contexts, slates)
        clicked, answered = users.outcomes(period, places, slates)
        buyers = np.flatnonzero(clicked >= 0)
        return Score(
            sessions=len(places),
            oracle=float(best.sum()),
            served=float(worth.sum()),
            earned=float(users.rewards[slates[buyers, clicked[buyers]]].sum()),
            answered=tuple(int((answered > h).sum()) for h in range(horizon)),
            clicked=tuple(np.bincount(clicked[buyers], minlength=horizon).tolist()),
        )
