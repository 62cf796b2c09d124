"""Simulated logs with a known truth: a few kinds of users, exact values, any number of sessions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from hypothesis import strategies as st

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import Planner
from worker.bandit.policies import greedy_arms, random_slates
from worker.evaluate.model import CrossFit, cross_fit
from worker.evaluate.sessions import Bools, Sessions
from worker.simulation.environments import make_environment
from worker.simulation.world import Environment

KINDS = 12  # kinds of users, each with one context, so that means over users are sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A policy that served, and a target.

    A `share` of the sessions is drawn uniformly. The rest is served greedily by an estimate with errors of size `off`.
    The target is greedy by another such estimate. Log-odds fall by `fading` with each position. Users who do not click
    leave with probability `leaving`, or if they are `choosy` more at later positions, and at some arms twice as often
    as at others. The first kinds of users, `excluding` of them, exclude an arm each.
    """

    environment: str = "opposite"
    arms: int = 3
    horizon: int = 2
    share: float = 1.0
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

    def served(self, kinds: Ints, slates: Ints) -> Floats:
        """The probability of the first h arms of slates for some kinds of users: (n, H)."""
        eligible = np.array([self.arms - len(out) for out in self.excluded()])[kinds, None]
        left = eligible - (0 if self.repeats else np.arange(self.horizon))
        planned = np.cumprod(slates == self.plans(0)[kinds], axis=1)
        return self.share * np.cumprod(np.broadcast_to(1 / left, slates.shape), axis=1) + (1 - self.share) * planned

    def chances(self, contexts: Floats, slates: Ints) -> Floats:
        """True click probabilities."""
        return sigmoid(self.world().truth.log_odds_of(contexts, slates) - self.fading * np.arange(slates.shape[1]))

    def stays(self, slates: Ints) -> Floats:
        """True probabilities that users who do not click go on."""
        if not self.choosy:
            return np.full(slates.shape, 1 - self.leaving)
        arms = 1 - self.leaving * (1 + np.arange(self.arms) / max(1, self.arms - 1))
        return arms[slates] * 0.9 ** np.arange(slates.shape[1])

    def sessions(
        self, kinds: Ints, slates: Ints, displayed: Ints, left: Bools, clicked: Bools, drawn: Bools
    ) -> Sessions:
        """Sessions of some kinds of users."""
        rewards, target = self.world().rewards, self.plans(1)[kinds]
        return Sessions(
            contexts=self.contexts()[kinds],
            slates=slates,
            target=target,
            prices=rewards[slates],
            target_prices=rewards[target],
            chances=self.served(kinds, slates),
            target_chances=self.served(kinds, target),
            displayed=displayed,
            answered=displayed - left,
            clicked=clicked,
            drawn=drawn,
            warmup=np.zeros(len(kinds), dtype=bool),
        )

    def log(self, count: int, generator: np.random.Generator) -> Sessions:
        """Serve some users and let them answer."""
        kinds = generator.integers(KINDS, size=count)
        contexts, excluded = self.contexts()[kinds], [self.excluded()[kind] for kind in kinds.tolist()]
        planner = self.planner(0)
        drawn = generator.random(count) < self.share
        uniforms = generator.random((count, self.horizon))
        anything = random_slates(planner, count, uniforms, planner.masked(excluded)).arms
        slates = np.where(drawn[:, None], anything, self.plans(0)[kinds])
        moods = generator.random((count, self.horizon, 2))
        clicks = moods[:, :, 1] < self.chances(contexts, slates)
        leaves = (moods[:, :, 0] >= self.stays(slates)) & (slates != NO_ARM) & ~clicks
        ends = leaves | clicks
        displayed = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, (slates != NO_ARM).sum(axis=1))
        last = (np.arange(count), np.maximum(displayed - 1, 0))
        return self.sessions(kinds, slates, displayed, leaves[last], clicks[last], drawn)

    def every_session(self) -> tuple[Sessions, Floats]:
        """Every possible session of every kind of user, and its probability; without exclusions."""
        contexts, everybody = self.contexts(), np.arange(KINDS)
        rows: list[tuple[int, tuple[int, ...], int, bool, bool]] = []
        probabilities: list[float] = []
        for arms in product(range(self.arms), repeat=self.horizon):
            if not self.repeats and len(set(arms)) < self.horizon:
                continue
            slates = np.tile(np.array(arms, dtype=np.intp), (KINDS, 1))
            shown, f, s = self.served(everybody, slates)[:, -1], self.chances(contexts, slates), self.stays(slates)
            for kind, end in product(range(KINDS), range(self.horizon)):
                arrive = shown[kind] * np.prod((1 - f[kind, :end]) * s[kind, :end]) / KINDS
                missed = arrive * (1 - f[kind, end])
                for left, clicked, probability in (
                    (False, True, arrive - missed),
                    (True, False, missed * (1 - s[kind, end])),
                    (False, False, missed * s[kind, end] if end == self.horizon - 1 else 0.0),
                ):
                    rows.append((kind, arms, end + 1, left, clicked))
                    probabilities.append(probability)
        kinds, slates, displayed, left, clicked = map(np.array, zip(*rows, strict=True))
        return self.sessions(kinds, slates, displayed, left, clicked, np.zeros(len(rows), dtype=bool)), np.array(
            probabilities
        )

    def truth(self) -> float:
        """The exact revenue of the target per session."""
        slates, rewards = self.plans(1), self.world().rewards
        f, s, value = self.chances(self.contexts(), slates), self.stays(slates), np.zeros(KINDS)
        for h in range(self.horizon - 1, -1, -1):
            value = f[:, h] * rewards[slates[:, h]] + (1 - f[:, h]) * s[:, h] * value
        return float(value.mean())


seeds = st.integers(0, 2**32 - 1)
scenes = st.builds(
    Scene,
    arms=st.integers(2, 3),
    horizon=st.integers(1, 2),
    share=st.floats(0.05, 1),
    repeats=st.booleans(),
    fading=st.sampled_from([0.0, 0.7]),
    leaving=st.sampled_from([0.0, 0.2]),
    choosy=st.booleans(),
    seed=st.integers(0, 1000),
)


def fitted(sessions: Sessions, *, personal: bool = False) -> CrossFit:
    """Fit additive click models, or personal ones."""
    dim, arms = sessions.contexts.shape[1], int(sessions.slates.max()) + 1
    prior: ClickModel = AdditiveModel.prior(dim=dim, arms=arms, ridge=1.0, intercept=True)
    if personal:
        prior = PersonalModel.prior(dim=dim, arms=arms, ridge=1.0)
    return cross_fit(sessions, prior)
