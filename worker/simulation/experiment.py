"""The paper's experiment: policies learn from simulated users, who arrive in episodes.

A run is one policy, one number of users and one seed. In every episode, contexts arrive, the policy plans their slates
under the estimate of the episodes before, users click or pass, and the estimator folds the answers. The result is the
pseudo-regret Σ_n V^{π*}(x_n) − V^{π}(x_n) of every episode under the true model, including the warm-up.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.bonuses import bonus_named
from worker.bandit.click_model import ClickModel, Observations
from worker.bandit.models import MODELS
from worker.bandit.planning import Planner
from worker.bandit.policies import (
    EpsilonGreedy,
    Exploration,
    Policy,
    RoundRobin,
    Slates,
    check_combination,
    policy_named,
)
from worker.bandit.regret import pseudo_regret
from worker.bandit.schedule import explore_budget, theory_radius
from worker.errors import EstimationError, FailedError, InputError
from worker.simulation.environments import Chance, make_environment

LAST = 50  # the last episodes of a run, by which it counts as stuck
STUCK = 0.3 / 50  # least regret per user and episode of a stuck run: 0.3 per episode for the paper's fifty users
EPSILON = 0.1  # share of epsilon-greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSettings:
    """The settings of an experiment, with a run for each `policy`, number of `users` and of `seeds` from `seed`.

    `beta` is a number or "theory".
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
    bonus: str = "value"
    beta: float | str = 2.5
    ridge: float = 0.5
    epsilon: float = EPSILON
    repeats: bool = True
    model: str = "additive"

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(ExperimentTask):
    """The result of one run.

    regret, reward, explored : for each episode, pseudo-regret and revenue of all users, and the share of displays that
        served learning
    theta_error : distance of the final estimates from the truth; arms that no good policy shows keep a large error
    log_odds_error : root mean square error of the log-odds over the slates of the last episode
    projection : of the final estimates on the truth, 1 if they are not shrunk
    rejected : episodes whose fold gave no usable estimate, so that the old one was kept
    """

    regret: tuple[float, ...]
    reward: tuple[float, ...]
    explored: tuple[float, ...]
    displays: int
    clicks: int
    theta_error: float
    log_odds_error: float
    projection: float
    rejected: int
    seconds: float

    @property
    def cumulative(self) -> float:
        """The regret of the whole run."""
        return math.fsum(self.regret)

    @property
    def final(self) -> float:
        """The regret per episode over the last of them."""
        tail = self.regret[-LAST:]
        return math.fsum(tail) / len(tail)

    @property
    def stuck(self) -> bool:
        """Whether the run has regret at its end, as a run that never tries the better arm."""
        return self.final > STUCK * self.users


def run_task(settings: ExperimentSettings, task: ExperimentTask) -> Run:
    """Make one run; settings and task decide every number but the seconds."""
    # Several BLAS threads may sum in another order, and give other bits.
    with threadpool_limits(limits=1, user_api="blas"):
        return _Experiment(settings, task).run()


class _Experiment:
    """The state of one run."""

    def __init__(self, settings: ExperimentSettings, task: ExperimentTask) -> None:
        self.settings, self.task, self.chance = settings, task, Chance.of(task.seed)
        self.world = make_environment(
            settings.environment, dim=settings.dim, arms=settings.arms, generator=self.chance.environment
        )
        self.belief = MODELS[settings.model].prior(dim=settings.dim, arms=settings.arms, ridge=settings.ridge)
        self.displays = self.clicks = self.rejected = 0
        self._largest_norm = 1.0

    def run(self) -> Run:
        began = time.perf_counter()
        regret, reward, explored = zip(*map(self._episode, range(1, self.settings.episodes + 1)), strict=True)
        estimates, truth = _estimates(self.belief), _estimates(self.world.truth)
        return Run(
            **asdict(self.task),
            regret=regret,
            reward=reward,
            explored=explored,
            displays=self.displays,
            clicks=self.clicks,
            theta_error=float(np.linalg.norm(estimates - truth)),
            log_odds_error=self._log_odds_error(),
            projection=float(estimates @ truth / (truth @ truth)),
            rejected=self.rejected,
            seconds=time.perf_counter() - began,
        )

    def _episode(self, t: int) -> tuple[float, float, float]:
        """Make episode t = 1 … T; return its regret, its reward and the share explored."""
        users, horizon = self.task.users, self.settings.horizon
        self._contexts = contexts = self.world.contexts(self.chance.contexts, users)
        # Both are always drawn, so that the streams are the same for every policy.
        moods, coins = self.chance.clicks.random((users, horizon)), self.chance.policy.random((users, horizon, 2))
        self._largest_norm = max(self._largest_norm, math.sqrt(1 + float((contexts**2).sum(axis=1).max())))
        planner = Planner(self.belief, self.world.rewards, horizon=horizon, repeats=self.settings.repeats)
        self._slates = slates = self._policy(t).slates(planner, contexts, uniforms=coins)
        clicked, seen = self.world.answers(contexts, slates.arms, moods)
        displayed = np.arange(horizon) < seen[:, None]
        self._learn(contexts, slates, clicked, displayed)
        regret = pseudo_regret(planner, self.world.truth, contexts, slates.arms)
        buyers = np.flatnonzero(clicked >= 0)
        reward = self.world.rewards[slates.arms[buyers, clicked[buyers]]]
        return float(regret.sum()), float(reward.sum()), float(slates.explored[displayed].mean())

    def _policy(self, t: int) -> Policy:
        settings = self.settings
        if t <= settings.warmup:
            return RoundRobin(start=(t - 1) * self.task.users * settings.horizon)
        return policy_named(self.task.policy).under(
            Exploration(
                beta=self._beta(),
                bonus=bonus_named(settings.bonus),
                epsilon=settings.epsilon,
                budget=explore_budget(self.task.users, t, settings.episodes),
            )
        )

    def _beta(self) -> float:
        if not isinstance(self.settings.beta, str):
            return self.settings.beta
        # Gaussian contexts have no largest norm c_z; the largest so far stands for it.
        return theory_radius(
            dim=self.settings.dim,
            arms=self.settings.arms,
            largest_reward=float(self.world.rewards.max()),
            largest_norm=self._largest_norm,
            ridge=self.settings.ridge,
            displays=self.displays,
        )

    def _learn(self, contexts: Floats, slates: Slates, clicked: Ints, displayed: NDArray[np.bool_]) -> None:
        sessions, positions = np.nonzero(displayed)
        seen = Observations(
            contexts=contexts,
            sessions=sessions,
            arms=slates.arms[sessions, positions],
            clicked=(positions == clicked[sessions]).astype(np.float64),
        )
        self.displays += len(seen)
        self.clicks += int(seen.clicked.sum())
        try:
            self.belief = self.belief.fold(seen, estimator=self.settings.estimator).model
        except EstimationError:  # as on the stream, the old estimate stays
            self.rejected += 1

    def _log_odds_error(self) -> float:
        sessions, positions = np.nonzero(self._slates.arms != NO_ARM)
        off = self.belief.log_odds(self._contexts) - self.world.truth.log_odds(self._contexts)
        return float(np.sqrt((off[sessions, self._slates.arms[sessions, positions]] ** 2).mean()))


def _estimates(model: ClickModel) -> Floats:
    return np.concatenate([model.effects, model.biases])


# ── many runs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(settings: ExperimentSettings, tasks: Sequence[ExperimentTask], *, jobs: int) -> Iterator[Run]:
    """Make all runs in up to `jobs` processes; yield them as they finish."""
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from (run_task(settings, task) for task in tasks)
        return
    # Spawned, not forked: a fork would copy locked locks of other threads. The children take the number of BLAS threads
    # from the environment when they import numpy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt) as pool:
        try:
            for future in as_completed([pool.submit(run_task, settings, task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool:
            raise FailedError("a process of the experiment died, perhaps out of memory; try fewer --jobs") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ignore_interrupt() -> None:
    # Ctrl-C reaches the whole process group; the parent alone reports it and stops the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
