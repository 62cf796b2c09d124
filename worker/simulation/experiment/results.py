"""The result of a run, and the numbers by which it is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.simulation.experiment.settings import ExperimentTask

STUCK = 0.3 / 50  # least regret per user and episode of a stuck run: 0.3 per episode for fifty users
AFTER_NEW = (5, 30)  # episodes after the arrival of new arms for which the loss is reported


def last_episodes(episodes: int) -> int:
    """Return how many episodes are the end of a run, by which it is judged: 50, of a short run 20.

    >>> last_episodes(300), last_episodes(100), last_episodes(8)
    (50, 20, 8)
    """
    return min(50 if episodes > 100 else 20, episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(ExperimentTask):
    """The result of one run.

    regret, oracle, reward, explored : for each episode, pseudo-regret of all users, expected revenue of their best
        slates, revenue, and the share of answered displays that served learning
    displays, clicks : answered displays and clicks of the run
    learned : sessions that were learned from
    theta_error : distance of the final coefficients of [1; x] from the true ones, root mean square over arms; None if
        the truth has none. Arms that no good policy shows keep a large error
    log_odds_error : root mean square error of the log-odds over the slates of the last episode
    projection : of the final coefficients on the true ones, 1 if they are not shrunk; None if the truth has none
    rejected : episodes whose fold gave no usable estimate, so that the old one was kept
    """

    regret: tuple[float, ...]
    oracle: tuple[float, ...]
    reward: tuple[float, ...]
    explored: tuple[float, ...]
    displays: int
    clicks: int
    learned: int
    theta_error: float | None
    log_odds_error: float
    projection: float | None
    rejected: int
    seconds: float

    @property
    def cumulative(self) -> float:
        """The regret of the whole run."""
        return math.fsum(self.regret)

    @property
    def final(self) -> float:
        """The regret per episode over the last of them."""
        tail = self.regret[-last_episodes(len(self.regret)) :]
        return math.fsum(tail) / len(tail)

    def lost(self, first: int = 1, last: int | None = None) -> float:
        """Return the share of the oracle's revenue that was lost in the episodes `first` to `last`."""
        return math.fsum(self.regret[first - 1 : last]) / math.fsum(self.oracle[first - 1 : last])

    @property
    def lost_at_end(self) -> float:
        """The share of the oracle's revenue that was lost in the last episodes."""
        return self.lost(len(self.regret) - last_episodes(len(self.regret)) + 1)

    @property
    def stuck(self) -> bool:
        """Whether the run has regret at its end, as a run that never tries the better arm."""
        return self.final > STUCK * self.users
