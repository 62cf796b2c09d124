"""Simulated logs with a known truth: a few kinds of users, exact values, any number of sessions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
from hypothesis import strategies as st

from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import Planner
from worker.bandit.policies import EpsilonGreedy, greedy_arms, random_slates
from worker.evaluate.estimators import METHODS, Estimate
from worker.evaluate.model import CrossFit, FittedModel, cross_fit
from worker.evaluate.sessions import Bools, Rule, Sessions
from worker.evaluate.support import Support
from worker.simulation.environments import make_environment
from worker.simulation.world import Environment

KINDS = 12  # kinds of users, each with one context, so that means over users are sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A policy that served, and a target.

    A `share` of the sessions is drawn uniformly. The rest is served greedily by an estimate with errors of size `off`.
    The target is greedy by another such estimate, or draws a share `epsilon`. Log-odds fall by `fading` with each
    position. Users who do not click leave with probability `leaving`, or if they are `choosy` more at later positions,
    and at some arms twice as often as at others. The first kinds of users, `excluding` of them, exclude an arm each.
    """

    environment: str = "opposite"
    arms: int = 3
    horizon: int = 2
    share: float = 1.0
    epsilon: float = 0.0
    off: float = 0.4
    repeats: bool = True
    fading: float = 0.0
    leaving: float = 0.0
    choosy: bool = False
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
        belief = AdditiveModel.certain(
            truth.effects + self.off * noise.standard_normal(truth.dim),
            truth.biases + self.off * noise.standard_normal(truth.arms),
        )
        return Planner(belief, self.world().rewards, horizon=self.horizon, repeats=self.repeats)

    @cache  # noqa: B019 - scenes are few, and values
    def plans(self, purpose: int) -> Ints:
        """Greedy slates for each kind of user: those served (0), those of the target (1)."""
        planner = self.planner(purpose)
        return greedy_arms(planner, self.contexts(), planner.masked(self.excluded()))

    def chances(self, contexts: Floats, slates: Ints) -> Floats:
        """True click probabilities."""
        return sigmoid(self.world().truth.log_odds_of(contexts, slates) - self.fading * np.arange(slates.shape[1]))

    def stays(self, slates: Ints) -> Floats:
        """True probabilities that users who do not click go on."""
        if not self.choosy:
            return np.full(slates.shape, 1 - self.leaving)
        arms = 1 - self.leaving * (1 + np.arange(self.arms) / max(1, self.arms - 1))
        return arms[slates] * 0.9 ** np.arange(slates.shape[1])

    def rules(self, kinds: Ints) -> dict[str, Rule]:
        """The rule that served users of some kinds, and the rule of the target."""
        none = np.zeros(len(kinds))
        served, target = self.plans(0)[kinds], self.plans(1)[kinds]
        return {
            "served": Rule(best=served, epsilon=none, uniform=none + self.share, repeats=self.repeats),
            "target": Rule(best=target, epsilon=none + self.epsilon, uniform=none, repeats=self.repeats),
        }

    def sessions(
        self, kinds: Ints, slates: Ints, displayed: Ints, left: Bools, clicked: Bools, drawn: Bools, target_slates: Ints
    ) -> Sessions:
        """Sessions of some kinds of users."""
        rewards, count = self.world().rewards, len(kinds)
        last = slates[np.arange(count), np.maximum(displayed - 1, 0)]
        excluded = np.array([out or (NO_ARM,) for out in self.excluded()])[kinds]
        return Sessions(
            contexts=self.contexts()[kinds],
            slates=slates,
            displayed=displayed,
            answered=displayed - left,
            clicked=clicked,
            earned=np.where(clicked, rewards[last], 0.0),
            prices=rewards[None],
            active=np.ones((1, self.arms), dtype=bool),
            period=np.zeros(count, dtype=np.intp),
            excluded=excluded,
            **self.rules(kinds),
            target_slates=target_slates,
            drawn=drawn,
            imported=np.zeros(count, dtype=bool),
            recorded=np.full(slates.shape, np.nan),
            depth=self.horizon,
        )

    def log(self, count: int, generator: np.random.Generator) -> Sessions:
        """Serve some users and let them answer."""
        kinds = generator.integers(KINDS, size=count)
        contexts, excluded = self.contexts()[kinds], [self.excluded()[kind] for kind in kinds.tolist()]
        planner = self.planner(0)
        masked = planner.masked(excluded)
        drawn = generator.random(count) < self.share
        anything = random_slates(planner, count, generator.random((count, self.horizon)), masked).arms
        slates = np.where(drawn[:, None], anything, self.plans(0)[kinds])
        moods = generator.random((count, self.horizon, 2))
        clicks = moods[:, :, 1] < self.chances(contexts, slates)
        leaves = (moods[:, :, 0] >= self.stays(slates)) & (slates != NO_ARM) & ~clicks
        ends = leaves | clicks
        displayed = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, (slates != NO_ARM).sum(axis=1))
        last = (np.arange(count), np.maximum(displayed - 1, 0))
        draws = self.plans(1)[kinds][None]
        if self.epsilon:
            policy = EpsilonGreedy(epsilon=self.epsilon)
            coins = generator.random((4, count, self.horizon, 2))
            draws = np.stack([policy.slates(self.planner(1), contexts, masked, uniforms).arms for uniforms in coins])
        return self.sessions(kinds, slates, displayed, leaves[last], clicks[last], drawn, draws)

    def every_session(self) -> tuple[Sessions, Floats]:
        """Every possible session of every kind of user, and its probability; without exclusions."""
        contexts, served = self.contexts(), self.rules(np.arange(KINDS))["served"]
        rows: list[tuple[int, tuple[int, ...], int, bool, bool]] = []
        probabilities: list[float] = []
        for slates, _, eligible in self.every_slate():
            shown, f = served.chances(slates, eligible)[:, -1], self.chances(contexts, slates)
            s = self.stays(slates)
            for kind, end in product(range(KINDS), range(self.horizon)):
                arrive = shown[kind] * np.prod((1 - f[kind, :end]) * s[kind, :end]) / KINDS
                missed = arrive * (1 - f[kind, end])
                for left, clicked, probability in (
                    (False, True, arrive - missed),
                    (True, False, missed * (1 - s[kind, end])),
                    (False, False, missed * s[kind, end] if end == self.horizon - 1 else 0.0),
                ):
                    rows.append((kind, tuple(slates[kind].tolist()), end + 1, left, clicked))
                    probabilities.append(probability)
        kinds, slates, displayed, left, clicked = map(np.array, zip(*rows, strict=True))
        drawn = np.zeros(len(rows), dtype=bool)
        sessions = self.sessions(kinds, slates, displayed, left, clicked, drawn, self.plans(1)[kinds][None])
        return sessions, np.array(probabilities)

    def truth(self) -> float:
        """The exact revenue of the target per session: the sum over users, slates and answers."""
        contexts, rewards = self.contexts(), self.world().rewards
        rule = self.rules(np.arange(KINDS))["target"]
        total = 0.0
        for slates, possible, eligible in self.every_slate():
            chance = np.where(possible, rule.chances(slates, eligible)[:, -1], 0.0)
            f, s, value = self.chances(contexts, slates), self.stays(slates), np.zeros(KINDS)
            for h in range(self.horizon - 1, -1, -1):
                value = f[:, h] * rewards[slates[:, h]] + (1 - f[:, h]) * s[:, h] * value
            total += float((chance * value).mean())
        return total

    def every_slate(self) -> list[tuple[Ints, Floats, Ints]]:
        """Every slate, whether each kind of user may see it, and the number of eligible arms."""
        found = []
        gone = np.zeros(self.horizon) if self.repeats else np.arange(self.horizon)
        eligible = np.array([self.arms - len(out) for out in self.excluded()])[:, None] - gone[None, :]
        for arms in product(range(self.arms), repeat=self.horizon):
            if not self.repeats and len(set(arms)) < self.horizon:
                continue
            possible = np.array([not set(arms) & set(out) for out in self.excluded()])
            found.append((np.tile(np.array(arms, dtype=np.intp), (KINDS, 1)), possible, eligible.astype(np.intp)))
        return found


seeds = st.integers(0, 2**32 - 1)
scenes = st.builds(
    Scene,
    arms=st.integers(2, 3),
    horizon=st.integers(1, 2),
    share=st.floats(0.05, 1),
    epsilon=st.sampled_from([0.0, 0.3, 1.0]),
    repeats=st.booleans(),
    fading=st.sampled_from([0.0, 0.7]),
    leaving=st.sampled_from([0.0, 0.2]),
    choosy=st.booleans(),
    seed=st.integers(0, 1000),
)


def weighted(sessions: Sessions) -> Support:
    """All sessions with their weights, supported or not."""
    chances = (rule.chances(sessions.slates, sessions.eligible) for rule in (sessions.target, sessions.served))
    return Support(sessions=sessions, weights=np.divide(*chances), counts=np.ones(len(sessions)))


def fitted(
    sessions: Sessions, seed: int | np.random.Generator = 0, *, personal: bool = False, features: Floats | None = None
) -> CrossFit:
    """Fit additive click models, or personal ones."""
    dim, arms = sessions.contexts.shape[1], sessions.prices.shape[1]
    prior: ClickModel = AdditiveModel.prior(dim=dim, arms=arms, ridge=1.0, intercept=True)
    if personal:
        prior = PersonalModel.prior(dim=dim, arms=arms, ridge=1.0, features=features)
    return cross_fit(sessions, prior=prior, generator=np.random.default_rng(seed))


def any_model(scene: Scene, seed: int) -> FittedModel:
    """A click model that has nothing to do with the truth."""
    generator = np.random.default_rng(seed)
    displayed = generator.integers(1, 200, (scene.horizon, scene.arms)).astype(float)
    counts = AnswerCounts(displayed=displayed, answered=generator.uniform(0.3, 1, displayed.shape) * displayed)
    if seed % 2:
        certain = PersonalModel.certain(generator.standard_normal((scene.arms, 4))).with_horizon(scene.horizon)
        clicks: ClickModel = replace(certain, positions=generator.standard_normal(scene.horizon - 1))
    else:
        clicks = AdditiveModel.certain(generator.standard_normal(3), generator.standard_normal(scene.arms))
    return FittedModel(clicks=clicks, counts=counts, rates=counts.rates())


def answer(scene: Scene, count: int, method: str) -> Estimate:
    sessions = scene.log(count, np.random.default_rng(0))
    return METHODS[method].estimate(sessions, None, confidence=0.95)
