"""One run of an experiment, and many in several processes.

In every episode, contexts arrive, the policy plans their slates under the estimate of the episodes before, users click,
pass or leave, and the estimator folds every display: one without an answer was not clicked. The result is the
pseudo-regret Σ_n V^{π*}(x_n) − V^{π}(x_n) of every episode under the true model, including the warm-up, and the
oracle's revenue Σ_n V^{π*}(x_n).
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
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from worker.bandit import MODELS
from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.bonuses import BONUSES, explore_budget, joined, restarted, theory_radius
from worker.bandit.click_model import ClickModel, Observations
from worker.bandit.groups import Groups
from worker.bandit.learning import AT_FIRST, changes_after
from worker.bandit.planning import Planner
from worker.bandit.policies import (
    POLICIES,
    Policy,
    Random,
    RoundRobin,
)
from worker.errors import EstimationError, FailedError
from worker.simulation.experiment.settings import ExperimentSettings, ExperimentTask, FoundPair, Run
from worker.simulation.world import Chance, Environment, true_heads
from worker.simulation.worth import Valuer
from worker.stream.calibration import predict
from worker.stream.contexts import LEAST_SESSIONS, Standardisation
from worker.stream.misfit import Misfit, evidence, misfit_after, missed
from worker.stream.settings import LearningSettings

# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_task(settings: ExperimentSettings, task: ExperimentTask) -> Run:
    """Make one run; settings and task decide every number but the seconds."""
    # Several BLAS threads may sum in another order, and give other bits.
    with threadpool_limits(limits=1, user_api="blas"):
        return _Experiment(settings, task).run()


class Answered(NamedTuple):
    """Sessions: contexts (n, d), slates (n, H), the position clicked or −1, (n,), and how many were answered, (n,)."""

    contexts: Floats
    slates: Ints
    clicked: Ints
    answered: Ints


class _Experiment:
    """The state of one run."""

    def __init__(self, settings: ExperimentSettings, task: ExperimentTask) -> None:
        self.settings, self.task, self.chance = settings, task, Chance.of(task.seed)
        self.whole = settings.world(self.chance.environment)
        self.world = self.whole.first_arms(settings.arms)
        self._known = self.whole.known_of_arms(settings.arms)
        self._standardisation: Standardisation | None = None
        self._waiting: list[Answered] = []  # sessions before the first fold, if it has to standardise
        self.belief = self._prior(None)
        self.answers = AnswerCounts.none(arms=settings.arms, horizon=settings.horizon)
        self.displays = self.rejected = 0
        self.new_displays: tuple[int, ...] = ()
        self.forgotten: list[tuple[int, float]] = []
        self._clock = 0.0  # t of M_t
        self._changes = AT_FIRST  # noticed lately
        self._largest_norm = 1.0
        self._misfits = Misfits(self.world, settings.model) if settings.crosses == "none" else None

    def _prior(self, contexts: Floats | None) -> ClickModel:
        """Return the belief before any data; with contexts (n, columns), priors of features follow their size there."""
        settings, declared = self.settings, self.world.declared
        # The paper's model for the paper's users has no effects of positions.
        plain = settings.model == AdditiveModel.name and settings.answers == "all"
        groups = None
        if declared is not None:
            groups = Groups.alike(declared.widths) if contexts is None else Groups.measured(declared.widths, contexts)
        return MODELS[settings.model].prior(
            dim=self.world.dim if declared is None else declared.model_dim,
            arms=len(self.world.rewards),
            ridge=settings.ridge,
            features=None if self._known is None else self._known[: len(self.world.rewards)],
            intercept=bool(settings.intercept),
            horizon=1 if plain else settings.horizon,
            groups=groups,
        )

    def _prepared(self, contexts: Floats) -> Floats:
        """Return contexts as the model takes them: as they are, or with declared features standardised and crossed."""
        standardised = contexts if self._standardisation is None else self._standardisation.apply(contexts)
        return standardised if self.world.declared is None else self.world.declared.crossing.apply(standardised)

    def run(self) -> Run:
        began = time.perf_counter()
        episodes = zip(*map(self._episode, range(1, self.settings.episodes + 1)), strict=True)
        regret, oracle, reward, explored = episodes
        return Run(
            **asdict(self.task),
            regret=regret,
            oracle=oracle,
            reward=reward,
            explored=explored,
            new_displays=self.new_displays,
            forgotten=tuple(self.forgotten),
            log_odds_error=self._log_odds_error(),
            projection=self._projection(),
            missed=None if self._misfits is None else self._misfits.found(),
            rejected=self.rejected,
            seconds=time.perf_counter() - began,
        )

    def _episode(self, t: int) -> tuple[float, float, float, float]:
        """Make episode t = 1 … T; return its regret, the oracle's revenue, its reward and the share explored."""
        users, horizon, repeats = self.task.users, self.settings.horizon, self.settings.repeats
        if t == self.settings.join:
            self._add_arms()
        if self.world.later is not None and t == self.settings.episodes // 2 + 1:
            self.world = self.world.later
        self._clock += 1
        self._contexts = contexts = self.world.contexts(self.chance.contexts, users)
        # Both are always drawn, so that the streams are the same for every policy.
        moods, coins = self.chance.clicks.random((users, horizon)), self.chance.policy.random((users, horizon, 2))
        spread = self.settings.spread > 0
        keys = self.chance.policy.integers(2**32, size=users, dtype=np.uint32) if spread else None
        inputs = self._prepared(contexts)
        self._largest_norm = max(self._largest_norm, math.sqrt(1 + float((inputs**2).sum(axis=1).max())))
        rates = self.answers.rates() if self.settings.answers == "learned" else None
        planner = Planner(self.belief, self.world.rewards, horizon=horizon, repeats=repeats, answers=rates)
        slates = self._policy(t, contexts, moods).slates(planner, inputs, uniforms=coins, keys=keys)
        self._slates = slates
        clicked, answered = self.world.answers(contexts, slates.arms, moods)
        sessions, positions = _displayed(slates.arms, clicked, answered)
        self.displays += len(sessions)
        if t == self.settings.join:
            shown = np.bincount(slates.arms[sessions, positions], minlength=self.settings.all_arms)
            self.new_displays = tuple(shown[self.settings.arms :].tolist())
        self._learn(t, Answered(contexts, slates.arms, clicked, answered))
        valuer = Valuer(self.world, horizon=horizon, repeats=repeats)
        best = valuer.values(contexts, valuer.best_slates(contexts))
        regret = best - valuer.values(contexts, slates.arms)
        buyers = np.flatnonzero(clicked >= 0)
        reward = self.world.rewards[slates.arms[buyers, clicked[buyers]]]
        explored = slates.explored[np.arange(horizon) < answered[:, None]]
        share = explored.mean() if len(explored) else 0.0
        return float(regret.sum()), float(best.sum()), float(reward.sum()), float(share)

    def _add_arms(self) -> None:
        known, self.world = len(self.world.rewards), self.whole
        count = len(self.world.rewards) - known
        features = None if self._known is None else self._known[known:]
        self.belief = self.belief.with_arms(count, features=features)
        self.answers = self.answers.choose_arms([*range(known), *[-1] * count])
        self._clock = joined(self._clock, count / len(self.world.rewards), self.settings.episodes)

    def _policy(self, t: int, contexts: Floats, moods: Floats) -> Policy:
        settings = self.settings
        if t <= settings.warmup or self._waiting:
            # The first episode of digits is random by its definition. Its users see few ads, and with turns always the
            # same one: fifty users take turns at ten.
            return Random() if settings.environment == "digits" else self._round_robin(contexts, moods)
        names = [arm.arm for arm in self.whole.catalogue()]
        return POLICIES[self.task.policy].under(
            beta=self._beta(),
            bonus=BONUSES[settings.bonus],
            spread=settings.spread,
            budget=explore_budget(self.task.users, self._clock, settings.episodes),
            order=tuple(map(names.index, settings.order)),
        )

    def _round_robin(self, contexts: Floats, moods: Floats) -> RoundRobin:
        """Return the policy of a warm-up episode, which asks after each position who is still there."""

        def stays(slates: Ints) -> NDArray[np.bool_]:
            shown = slates.shape[1]
            clicked, answered = self.world.answers(contexts, slates, moods[:, :shown])
            return np.asarray((clicked < 0) & (answered == shown))

        return RoundRobin(start=self.displays, stays=stays)

    def _beta(self) -> float:
        if not isinstance(self.settings.beta, str):
            return self.settings.beta
        # Gaussian contexts have no largest norm c_z; the largest so far stands for it.
        return theory_radius(
            dim=self.belief.dim,
            arms=len(self.world.rewards),
            largest_reward=float(self.world.rewards.max()),
            largest_norm=self._largest_norm,
            ridge=self.settings.ridge,
            displays=self.displays,
        )

    def _learn(self, t: int, answers: Answered) -> None:
        """Fold the displays of some sessions; the first ones wait until there are enough to standardise numbers by."""
        declared, folded_before = self.world.declared, self._standardisation is not None
        if declared is not None and self._standardisation is None:
            self._waiting.append(answers)
            answers = Answered(*map(np.concatenate, zip(*self._waiting, strict=True)))
            if len(answers.contexts) < LEAST_SESSIONS:
                return
            self._waiting = []
            self._standardisation = Standardisation.estimate(answers.contexts, declared.number_columns)
            self.belief = self._prior(self._prepared(answers.contexts))
        contexts, slates, clicked, answered = answers
        sessions, positions = _displayed(slates, clicked, answered)
        arms, clicks = slates[sessions, positions], positions == clicked[sessions]
        seen = Observations(
            contexts=self._prepared(contexts),
            sessions=sessions,
            arms=arms,
            positions=positions,
            clicked=clicks.astype(np.float64),
        )
        settings, kept, forgotten, before = self.settings, 1.0, 0.0, self.belief
        try:
            fit = self.belief.fold(
                seen, estimator=settings.estimator, forgetting=settings.forgetting, changes=self._changes
            )
            self.belief, kept, forgotten = fit.model, fit.kept, fit.forgotten(len(self.world.rewards))
        except EstimationError:  # as on the stream, the old estimate stays
            self.rejected += 1
        if self._misfits is not None and folded_before and not forgotten:
            self._misfits.add(before, seen)
        self._changes = changes_after(self._changes, forgotten)
        if forgotten:
            self.forgotten.append((t, 1 - forgotten))
            self._clock = restarted(self._clock, forgotten, settings.episodes)
        self.answers = self.answers.faded(kept).plus(
            positions=positions[~clicks],
            arms=arms[~clicks],
            answered=(positions < answered[sessions])[~clicks].astype(np.float64),
        )

    def _log_odds_error(self) -> float:
        sessions, positions = np.nonzero(self._slates.arms != NO_ARM)
        off = self.belief.log_odds(self._prepared(self._contexts)) - self.world.log_odds(self._contexts)
        return float(np.sqrt((off[sessions, self._slates.arms[sessions, positions]] ** 2).mean()))

    def _projection(self) -> float | None:
        if self.world.columns is not None or self.world.declared is not None:
            return None
        estimates, truth = true_heads(self.belief), true_heads(self.world.truth)
        return float((estimates * truth).sum() / (truth**2).sum())


class Misfits:
    """The test for what the model misses, with the same sums as those of a version."""

    def __init__(self, world: Environment, model: str) -> None:
        assert world.declared is not None
        self._settings = LearningSettings(dim=world.declared.dim, features=world.declared, model=model)
        self._arms, self._interacting = len(world.rewards), world.interacting
        self._sums: Misfit | None = None
        self._alarms = 0

    def add(self, before: ClickModel, seen: Observations) -> None:
        """Add the displays of an episode, under the belief before it."""
        chances = predict(before, seen, np.zeros(len(seen), dtype=np.intp)).chances
        self._sums = misfit_after(self._sums, self._settings, seen, chances, arms=self._arms)
        self._alarms += bool(missed(evidence(self._sums, self._settings, self._arms)))

    def found(self) -> FoundPair | None:
        """Return the pair for which the evidence is strongest; None if nothing was tested."""
        tested = evidence(self._sums, self._settings, self._arms)
        if not tested:
            return None
        return FoundPair(is_true=tested[0].of in self._interacting, alarms=self._alarms)


def _displayed(slates: Ints, clicked: Ints, answered: Ints) -> tuple[Ints, Ints]:
    """Return sessions and positions of what was displayed: the answered positions, and after a pass the next one."""
    displayed = answered + (clicked < 0)
    sessions, positions = np.nonzero((np.arange(slates.shape[1]) < displayed[:, None]) & (slates != NO_ARM))
    return sessions, positions


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
    # Ctrl-C reaches the whole process group; the parent alone reports it and stops the pool.
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(jobs, context, initializer=signal.signal, initargs=ignored) as pool:
        try:
            for future in as_completed([pool.submit(run_task, settings, task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool:
            raise FailedError("a process of the experiment died, perhaps out of memory; try fewer --jobs") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
