"""What an experiment runs, and which settings contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from worker.bandit.additive import AdditiveModel
from worker.bandit.policies import EpsilonGreedy, check_combination
from worker.errors import InputError
from worker.simulation.environments import check_world

EPSILON = 0.1  # share of epsilon-greedy
ANSWERS = ("learned", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSettings:
    """The settings of an experiment, with a run for each `policy`, number of `users` and of `seeds` from `seed`.

    beta : a number or "theory"
    intercept : None: but for the estimator paper, which is for the paper's model to the letter
    answers : whether answer rates are learned, or all displays counted as answered; None: learned where users leave
    features : number of features of each arm that explain its tastes; then the model has its revenue as one more
    stay : probability that a display is answered, besides the rate of its arm
    new_arms, new_at : number of arms that are not shown before episode `new_at`
    learn_at_most : sessions per episode that are learned from, about; 0: all
    """

    policy: tuple[str, ...] = ("ucbbp", "aucbbp", "epsilon-greedy")
    users: tuple[int, ...] = (50,)
    seed: int = 0
    seeds: int = 10
    environment: str = "opposite"
    dim: int = 5
    arms: int = 10
    horizon: int = 5
    episodes: int = 300
    warmup: int = 1
    estimator: str = "laplace"
    bonus: str = "curve"
    beta: float | str = 1.5
    ridge: float = 1.0
    epsilon: float = EPSILON
    repeats: bool = True
    model: str = AdditiveModel.name
    intercept: bool | None = None
    answers: str | None = None
    features: int = 0
    stay: float = 1.0
    new_arms: int = 0
    new_at: int | None = None
    learn_at_most: int = 0

    def __post_init__(self) -> None:
        additive = self.model == AdditiveModel.name
        if self.intercept is None:
            object.__setattr__(self, "intercept", not (additive and self.estimator == "paper"))
        if not (additive or self.intercept):
            raise InputError(f"the model {self.model} has an intercept; only {AdditiveModel.name} runs without")
        check_world(self.environment, dim=self.dim, arms=self.all_arms, features=self.features, stay=self.stay)
        if self.answers is None:
            leaving = self.environment == "leaving" or self.stay < 1
            object.__setattr__(self, "answers", "learned" if leaving else "all")
        self._check_new_arms()
        for name, values in (("policy", self.policy), ("users", self.users)):
            twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                raise InputError(f"{name} {twice} is given twice")
        if self.warmup >= self.episodes:
            raise InputError(f"a warmup of {self.warmup} episodes leaves none of {self.episodes} to the policies")
        if self.epsilon != EPSILON and EpsilonGreedy.name not in self.policy:
            raise InputError("epsilon applies to the policy epsilon-greedy only")
        for policy in self.policy:
            check_combination(policy=policy, bonus=self.bonus, repeats=self.repeats)

    def _check_new_arms(self) -> None:
        if bool(self.new_arms) != (self.new_at is not None):
            raise InputError("new-arms and new-at go together: how many arms are new, and from which episode on")
        if self.new_at is not None and not 1 < self.new_at <= self.episodes:
            raise InputError(f"new-at must be one of the episodes 2 to {self.episodes}, not {self.new_at}")

    @property
    def all_arms(self) -> int:
        """The number of arms at the end."""
        return self.arms + self.new_arms

    def arms_at(self, t: int) -> int:
        """Return the number of arms in episode t = 1 … T."""
        return self.arms if self.new_at is not None and t < self.new_at else self.all_arms

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
