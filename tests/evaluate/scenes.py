"""Logs of which everything is known: a few kinds of users, exact values, any number of sessions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.planning import Planner
from worker.bandit.policies import EpsilonGreedy, greedy_arms, random_slates
from worker.evaluate.sessions import Rule, Sessions
from worker.simulation.environments import Environment, make_environment

KINDS = 12  # of users; each has one context, so that means over users are sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """How the sessions were served, and what is to be evaluated.

    `share` of the sessions is drawn uniformly, the rest is served greedily by an estimate that is `off` the truth (0:
    the truth). The target is greedy by another one, or draws a share `epsilon`. Users leave with probability `leaving`
    at each display; the first kinds of users exclude an arm each.
    """

    environment: str = "opposite"
    arms: int = 3
    horizon: int = 2
    share: float = 1.0
    epsilon: float = 0.0
    off: float = 0.4
    repeats: bool = True
    leaving: float = 0.0
    excluding: int = 0
    seed: int = 3

    @cache  # noqa: B019 - scenes are few, and values
    def world(self) -> Environment:
        return make_environment(
            self.environment, dim=3, arms=self.arms, generator=np.random.default_rng([self.seed, 1])
        )

    def contexts(self) -> Floats:
        """One context for each kind of user."""
        return self.world().contexts(np.random.default_rng([self.seed, 2]), KINDS)

    def excluded(self) -> list[tuple[int, ...]]:
        return [(kind % self.arms,) if kind < self.excluding else () for kind in range(KINDS)]

    @cache  # noqa: B019 - scenes are few, and values
    def planner(self, purpose: int) -> Planner:
        truth = self.world().truth
        noise = np.random.default_rng([self.seed, 3, purpose])
        belief = AdditiveModel(
            theta_context=truth.effects + self.off * noise.standard_normal(truth.dim),
            theta_arms=truth.biases + self.off * noise.standard_normal(truth.arms),
            precision=truth.precision,
        )
        return Planner(belief, self.world().rewards, horizon=self.horizon, repeats=self.repeats)

    @cache  # noqa: B019 - scenes are few, and values
    def plans(self, purpose: int) -> Ints:
        """Greedy slates for each kind of user: those served (0), those of the target (1)."""
        planner = self.planner(purpose)
        return greedy_arms(planner, self.contexts(), planner.masked(self.excluded()))

    def chances(self, contexts: Floats, slates: Ints) -> Floats:
        """True click probabilities."""
        truth = self.world().truth
        found = sigmoid((contexts @ truth.effects)[:, None] + truth.biases[slates])
        return np.where(slates == NO_ARM, 0.0, found)

    def log(self, count: int, generator: np.random.Generator) -> Sessions:
        """Let some users come, be served, and answer."""
        world, kinds = self.world(), generator.integers(KINDS, size=count)
        contexts, excluded = self.contexts()[kinds], [self.excluded()[kind] for kind in kinds.tolist()]
        planner, target = self.planner(0), self.planner(1)
        masked = planner.masked(excluded)
        drawn = generator.random(count) < self.share
        anything = random_slates(planner, count, generator.random((count, self.horizon)), masked).arms
        plan, best = self.plans(0)[kinds], self.plans(1)[kinds]
        slates = np.where(drawn[:, None], anything, plan)
        moods = generator.random((count, self.horizon, 2))
        leaves = (moods[:, :, 0] < self.leaving) & (slates != NO_ARM)
        clicks = (moods[:, :, 1] < self.chances(contexts, slates)) & ~leaves
        ends = leaves | clicks
        length = (slates != NO_ARM).sum(axis=1)
        displayed = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, length)
        last = (np.arange(count), np.maximum(displayed - 1, 0))
        clicked = clicks[last]
        none = np.zeros(count)
        draws = best[None]
        if self.epsilon:
            policy = EpsilonGreedy(epsilon=self.epsilon)
            coins = generator.random((4, count, self.horizon, 2))
            draws = np.stack([policy.slates(target, contexts, masked, uniforms).arms for uniforms in coins])
        return Sessions(
            contexts=contexts,
            slates=slates,
            displayed=displayed,
            answered=displayed - leaves[last],
            clicked=clicked,
            earned=np.where(clicked, world.rewards[slates[last]], 0.0),
            prices=world.rewards[None],
            active=np.ones((1, self.arms), dtype=bool),
            period=np.zeros(count, dtype=np.intp),
            excluded=tuple(excluded) if self.excluding else (),
            served=Rule(best=plan, epsilon=none, uniform=none + self.share, repeats=self.repeats),
            target=Rule(best=best, epsilon=none + self.epsilon, uniform=none, repeats=self.repeats),
            target_slates=draws,
            drawn=drawn,
            depth=self.horizon,
        )

    def truth(self) -> float:
        """What the target earns per session, exactly: the sum over users, slates and answers."""
        contexts, rewards = self.contexts(), self.world().rewards
        none = np.zeros(KINDS)
        rule = Rule(best=self.plans(1), epsilon=none + self.epsilon, uniform=none, repeats=self.repeats)
        total = 0.0
        for slates, possible, eligible in self.every_slate():
            chance = np.where(possible, rule.chances(slates, eligible)[:, -1], 0.0)
            f, value = self.chances(contexts, slates), np.zeros(KINDS)
            for h in range(self.horizon - 1, -1, -1):
                value = (1 - self.leaving) * (f[:, h] * rewards[slates[:, h]] + (1 - f[:, h]) * value)
            total += float((chance * value).mean())
        return total

    def every_slate(self) -> list[tuple[Ints, Floats, Ints]]:
        """Every slate, for each kind of user whether it may be shown, and how many arms are eligible."""
        found = []
        gone = np.zeros(self.horizon) if self.repeats else np.arange(self.horizon)
        eligible = np.array([self.arms - len(out) for out in self.excluded()])[:, None] - gone[None, :]
        for arms in product(range(self.arms), repeat=self.horizon):
            if not self.repeats and len(set(arms)) < self.horizon:
                continue
            possible = np.array([not set(arms) & set(out) for out in self.excluded()])
            found.append((np.tile(np.array(arms, dtype=np.intp), (KINDS, 1)), possible, eligible.astype(np.intp)))
        return found
