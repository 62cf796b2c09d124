"""One run: a policy learns from simulated users, who arrive in episodes.

In every episode, contexts arrive, the policy plans their slates under the estimate of the episodes before, users click,
pass or leave, and the estimator folds the answers. The result is the pseudo-regret Σ_n V^{π*}(x_n) − V^{π}(x_n) of
every episode under the true model, including the warm-up, and the oracle's revenue Σ_n V^{π*}(x_n).
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from worker.bandit import MODELS
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.bonuses import bonus_named, explore_budget, theory_radius
from worker.bandit.click_model import Observations, Truth
from worker.bandit.planning import Planner
from worker.bandit.policies import Exploration, Policy, Random, RoundRobin, Slates, policy_named
from worker.errors import EstimationError
from worker.simulation.digits import DigitsTruth
from worker.simulation.environments import Chance, make_environment
from worker.simulation.experiment.results import Run
from worker.simulation.experiment.settings import ExperimentSettings, ExperimentTask
from worker.simulation.worth import Valuer
from worker.stream.budget import ALL, Shares


def run_task(settings: ExperimentSettings, task: ExperimentTask) -> Run:
    """Make one run; settings and task decide every number but the seconds."""
    # Several BLAS threads may sum in another order, and give other bits.
    with threadpool_limits(limits=1, user_api="blas"):
        return _Experiment(settings, task).run()


class _Experiment:
    """The state of one run."""

    def __init__(self, settings: ExperimentSettings, task: ExperimentTask) -> None:
        self.settings, self.task, self.chance = settings, task, Chance.of(task.seed)
        self.whole = make_environment(
            settings.environment,
            dim=settings.dim,
            arms=settings.all_arms,
            generator=self.chance.environment,
            features=settings.features,
            stay=settings.stay,
        )
        self.world = self.whole.first_arms(settings.arms)
        self._known = self.whole.known_of_arms(settings.arms)
        self.belief = MODELS[settings.model].prior(
            dim=settings.dim,
            arms=settings.arms,
            ridge=settings.ridge,
            features=None if self._known is None else self._known[: settings.arms],
            intercept=bool(settings.intercept),
        )
        self.answers = AnswerCounts.none(arms=settings.arms, horizon=settings.horizon)
        self.displays = self.clicks = self.learned = self.rejected = self._turns = 0
        self._observed = 0  # displays that were learned from
        self._shares = ALL
        self._largest_norm = 1.0

    def run(self) -> Run:
        began = time.perf_counter()
        episodes = zip(*map(self._episode, range(1, self.settings.episodes + 1)), strict=True)
        regret, oracle, reward, explored = episodes
        error, projection = self._coefficient_error()
        return Run(
            **asdict(self.task),
            regret=regret,
            oracle=oracle,
            reward=reward,
            explored=explored,
            displays=self.displays,
            clicks=self.clicks,
            learned=self.learned,
            theta_error=error,
            log_odds_error=self._log_odds_error(),
            projection=projection,
            rejected=self.rejected,
            seconds=time.perf_counter() - began,
        )

    def _episode(self, t: int) -> tuple[float, float, float, float]:
        """Make episode t = 1 … T; return its regret, the oracle's revenue, its reward and the share explored."""
        users, horizon, repeats = self.task.users, self.settings.horizon, self.settings.repeats
        if t == self.settings.new_at:
            self._add_arms()
        self._contexts = contexts = self.world.contexts(self.chance.contexts, users)
        # Both are always drawn, so that the streams are the same for every policy.
        moods, coins = self.chance.clicks.random((users, horizon)), self.chance.policy.random((users, horizon, 2))
        self._largest_norm = max(self._largest_norm, math.sqrt(1 + float((contexts**2).sum(axis=1).max())))
        rates = self.answers.rates() if self.settings.answers == "learned" else None
        planner = Planner(self.belief, self.world.rewards, horizon=horizon, repeats=repeats, answers=rates)
        slates = self._policy(t, contexts, moods).slates(planner, contexts, uniforms=coins)
        self._slates = slates
        clicked, answered = self.world.answers(contexts, slates.arms, moods)
        displayed = np.arange(horizon) < answered[:, None]
        self._count(slates.arms, clicked, displayed)
        kept = self._journaled(slates)
        self._learn(contexts[kept], slates.arms[kept], clicked[kept], displayed[kept])
        valuer = Valuer(self.world, horizon=horizon, repeats=repeats)
        best = valuer.best(contexts)
        regret = best - valuer.served(contexts, slates.arms)
        buyers = np.flatnonzero(clicked >= 0)
        reward = self.world.rewards[slates.arms[buyers, clicked[buyers]]]
        explored = slates.explored[displayed].mean() if displayed.any() else 0.0
        return float(regret.sum()), float(best.sum()), float(reward.sum()), float(explored)

    def _add_arms(self) -> None:
        known, self.world = len(self.world.rewards), self.whole
        count = len(self.world.rewards) - known
        features = None if self._known is None else self._known[known:]
        self.belief = self.belief.with_arms(count, ridge=self.settings.ridge, features=features)
        self.answers = self.answers.with_arms(count)

    def _policy(self, t: int, contexts: Floats, moods: Floats) -> Policy:
        settings = self.settings
        if t <= settings.warmup:
            # The first episode of digits is random by its definition. Its users see few ads, and with turns always the
            # same one: fifty users take turns at ten.
            return Random() if settings.environment == "digits" else self._round_robin(contexts, moods)
        return policy_named(self.task.policy).under(
            Exploration(
                beta=self._beta(),
                bonus=bonus_named(settings.bonus),
                epsilon=settings.epsilon,
                budget=explore_budget(self.task.users, t, settings.episodes),
            )
        )

    def _round_robin(self, contexts: Floats, moods: Floats) -> RoundRobin:
        """Return the policy of a warm-up episode, which asks after each position who is still there."""

        def stays(slates: Ints) -> NDArray[np.bool_]:
            shown = slates.shape[1]
            clicked, answered = self.world.answers(contexts, slates, moods[:, :shown])
            return np.asarray((clicked < 0) & (answered == shown))

        return RoundRobin(start=self._turns, stays=stays)

    def _beta(self) -> float:
        if not isinstance(self.settings.beta, str):
            return self.settings.beta
        # Gaussian contexts have no largest norm c_z; the largest so far stands for it.
        return theory_radius(
            dim=self.settings.dim,
            arms=len(self.world.rewards),
            largest_reward=float(self.world.rewards.max()),
            largest_norm=self._largest_norm,
            ridge=self.settings.ridge,
            displays=self._observed,
        )

    def _journaled(self, slates: Slates) -> NDArray[np.bool_]:
        """Return whether each session is learned from, by the shares of the episode before, as on the stream."""
        users, at_most = self.task.users, self.settings.learn_at_most
        exploring = np.asarray(slates.explored.any(axis=1))
        numbers = self.chance.journal.random(users) if at_most else np.zeros(users)
        kept = np.asarray(numbers < np.where(exploring, *self._shares))
        self._shares = Shares.of(sessions=users, exploring=float(exploring.sum()), at_most=at_most)
        self.learned += int(kept.sum())
        return kept

    def _learn(self, contexts: Floats, slates: Ints, clicked: Ints, answered: NDArray[np.bool_]) -> None:
        """Fold the answers; `answered` (n, H) marks the positions that have one."""
        self._count_answers(slates, clicked, answered)
        sessions, positions = np.nonzero(answered)
        seen = Observations(
            contexts=contexts,
            sessions=sessions,
            arms=slates[sessions, positions],
            clicked=(positions == clicked[sessions]).astype(np.float64),
        )
        self._observed += len(seen)
        try:
            self.belief = self.belief.fold(seen, estimator=self.settings.estimator).model
        except EstimationError:  # as on the stream, the old estimate stays
            self.rejected += 1

    def _count(self, slates: Ints, clicked: Ints, answered: NDArray[np.bool_]) -> None:
        """Count the displays and clicks of all sessions."""
        self.displays += int(answered.sum())
        self.clicks += int((clicked >= 0).sum())
        self._turns += len(_displayed(slates, clicked, answered)[0])

    def _count_answers(self, slates: Ints, clicked: Ints, answered: NDArray[np.bool_]) -> None:
        sessions, positions = _displayed(slates, clicked, answered)
        self.answers = self.answers.plus(
            positions=positions,
            arms=slates[sessions, positions],
            answered=answered[sessions, positions].astype(np.float64),
        )

    def _log_odds_error(self) -> float:
        sessions, positions = np.nonzero(self._slates.arms != NO_ARM)
        off = self.belief.log_odds(self._contexts) - self.world.truth.log_odds(self._contexts)
        return float(np.sqrt((off[sessions, self._slates.arms[sessions, positions]] ** 2).mean()))

    def _coefficient_error(self) -> tuple[float | None, float | None]:
        if isinstance(self.world.truth, DigitsTruth):
            return None, None
        estimates, truth = _coefficients(self.belief), _coefficients(self.world.truth)
        error = float(np.sqrt(((estimates - truth) ** 2).sum(axis=0).mean()))
        return error, float((estimates * truth).sum() / (truth**2).sum())


def _displayed(slates: Ints, clicked: Ints, answered: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return sessions and positions of what was displayed: the answered positions, and after a pass the next one."""
    position = np.arange(slates.shape[1])
    left = (position == answered.sum(axis=1)[:, None]) & (clicked < 0)[:, None]
    sessions, positions = np.nonzero((answered | left) & (slates != NO_ARM))
    return sessions, positions


def _coefficients(model: Truth) -> Floats:
    """Return the coefficients of [1; x] in the log-odds of each arm, which are linear in x: (d+1, K)."""
    odds = model.log_odds(np.concatenate([np.zeros((1, model.dim)), np.eye(model.dim)]))
    odds[1:] -= odds[:1]
    return odds
