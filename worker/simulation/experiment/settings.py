"""The settings of an experiment, its runs, and the result of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.policies import check_combination
from worker.errors import InputError
from worker.simulation.environments import LEAVING, check_world, make_environment
from worker.simulation.world import Environment
from worker.stream.settings import LearningSettings, check_order

STUCK = 0.3 / 50  # least regret per user and episode of a stuck run: 0.3 per episode for fifty users
AFTER_NEW = (5, 30)  # episodes after the arrival of new arms for which the loss is reported

#: The defaults that experiments share with the worker; the others are the paper's.
_LEARNING = LearningSettings(dim=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSettings:
    """The settings of an experiment, with a run for each `policy`, number of `users` and of `seeds` from `seed`.

    beta : a number or "theory"
    intercept : None: but for the estimator paper, which is for the paper's model to the letter
    answers : whether it is learned who goes on, or everybody counts as going on; None: learned where users leave
    forgetting : share of older displays that each fold keeps, or "auto"; spread : how far sessions differ in optimism
    features : number of features of each arm that explain its tastes; then the model has its revenue as one more
    order : names of arms, such as ad-03, that the policy fixed shows first
    stay : of the users who do not click, the share that goes on, besides the rate of the arm
    new_arms, join : number of arms that are not shown before episode `join`
    levels, noise, reported, prices, better, change, interaction, crosses, pairs : options of environments; None: the
        default
    """

    policy: tuple[str, ...] = ("ucbbp", "aucbbp", "epsilon-greedy")
    users: tuple[int, ...] = (50,)
    seed: int = 0
    seeds: int = 10
    environment: str = "opposite"
    dim: int = _LEARNING.dim
    arms: int = 10
    horizon: int = _LEARNING.horizon
    episodes: int = 300
    warmup: int = _LEARNING.warmup
    estimator: str = _LEARNING.estimator
    bonus: str = _LEARNING.bonus
    beta: float | str = _LEARNING.beta
    ridge: float = _LEARNING.ridge
    repeats: bool = True
    model: str = AdditiveModel.name
    intercept: bool | None = None
    answers: str | None = None
    forgetting: float | str = 1.0
    spread: float = 0.0
    features: int = 0
    stay: float = 1.0
    new_arms: int = 0
    join: int | None = None
    levels: int | None = None
    noise: bool | None = None
    reported: float | None = None
    prices: str | None = None
    better: float | None = None
    change: str | None = None
    interaction: float | None = None
    crosses: str | None = None
    pairs: int | None = None
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        additive = self.model == AdditiveModel.name
        if self.intercept is None:
            object.__setattr__(self, "intercept", not (additive and self.estimator == "paper"))
        if not (additive or self.intercept):
            raise InputError(f"the model {self.model} has an intercept; only {AdditiveModel.name} runs without")
        self._check_new_arms()
        check_world(self.environment, **self._world)
        if self.answers is None:
            leaving = self.environment in LEAVING or self.stay < 1
            object.__setattr__(self, "answers", "learned" if leaving else "all")
        for name, values in (("policy", self.policy), ("users", self.users)):
            twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                raise InputError(f"{name} {twice} is given twice")
        if self.warmup >= self.episodes:
            raise InputError(f"a warmup of {self.warmup} episodes leaves none of {self.episodes} to the policies")
        for policy in self.policy:
            check_combination(policy=policy, bonus=self.bonus, repeats=self.repeats)
        check_order(self.order, self.world(np.random.default_rng(0)).catalogue() if self.order else ())

    def _check_new_arms(self) -> None:
        if bool(self.new_arms) != (self.join is not None):
            raise InputError("new-arms and join go together: how many arms are new, and from which episode on")
        if self.environment == "newcomers" and not self.new_arms:
            raise InputError("the environment newcomers needs new arms: give --new-arms and --join")
        if self.join is not None and not 1 < self.join <= self.episodes:
            raise InputError(f"join must be one of the episodes 2 to {self.episodes}, not {self.join}")

    @property
    def all_arms(self) -> int:
        """The number of arms at the end."""
        return self.arms + self.new_arms

    @property
    def _world(self) -> dict[str, Any]:
        """The size of the world and its options."""
        names = ("levels", "noise", "reported", "prices", "better", "change", "interaction", "crosses", "pairs")
        return {
            "dim": self.dim,
            "arms": self.all_arms,
            "stay": self.stay,
            "features": self.features or None,
            "new_arms": self.new_arms if self.environment == "newcomers" else None,
            **{name: getattr(self, name) for name in names},
        }

    def world(self, generator: np.random.Generator) -> Environment:
        """Draw the world with all arms."""
        return make_environment(self.environment, generator=generator, **self._world)

    def tasks(self) -> list[ExperimentTask]:
        """Return all runs, seeds outermost: so the first results are of all policies."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [ExperimentTask(policy=p, users=n, seed=s) for s in seeds for n in self.users for p in self.policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTask:
    """One run."""

    policy: str
    users: int
    seed: int


def last_episodes(episodes: int) -> int:
    """Return how many episodes are the end of a run, by which it is judged: 50, of a short run 20.

    >>> last_episodes(300), last_episodes(100), last_episodes(8)
    (50, 20, 8)
    """
    return min(50 if episodes > 100 else 20, episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPair:
    """Whether the pair of features with the strongest evidence at the end matters, and episodes with any report."""

    is_true: bool
    alarms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(ExperimentTask):
    """The result of one run.

    regret, oracle, reward, explored : for each episode, pseudo-regret of all users, expected revenue of their best
        slates, revenue, and the share of answered displays that served learning
    new_displays : displays of each new arm in its first episode
    forgotten : for each episode in which something was, its number and the share of what was known that was kept
    log_odds_error : root mean square error of the log-odds over the slates of the last episode
    projection : of the final coefficients of [1; x] on the true ones, 1 if they are not shrunk; None if the truth has
        none, or of other columns
    missed : where crosses are missing, what was found by the test for what the model misses; else None
    rejected : episodes whose fold gave no usable estimate, so that the old one was kept
    """

    regret: tuple[float, ...]
    oracle: tuple[float, ...]
    reward: tuple[float, ...]
    explored: tuple[float, ...]
    new_displays: tuple[int, ...]
    forgotten: tuple[tuple[int, float], ...]
    log_odds_error: float
    projection: float | None
    missed: FoundPair | None
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
