"""Random beliefs, contexts and episodes, drawn by hypothesis: shapes and kinds by strategy, numbers by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import sigmoid
from worker.bandit.click_model import ClickModel, Fit, Observations
from worker.bandit.estimators import ByArm
from worker.bandit.planning import Planner
from worker.bandit.policies import POLICIES, Policy
from worker.bandit.precision import Precision
from worker.bandit.regret import best_revenue

Floats = NDArray[np.float64]

#: Enough examples to find errors, few enough to run all the time. Machines differ, so there are no deadlines.
lawful = settings(max_examples=60, deadline=None)
briefly = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)
dims = st.integers(1, 6)
counts = st.integers(1, 7)
ridges = st.sampled_from([1e-4, 0.1, 1.0, 30.0, 1e4])
#: Kinds of contexts: around the origin, far from it, wide, on one line, all equal, tiny.
kinds = st.sampled_from(["normal", "far", "wide", "collinear", "constant", "tiny"])


def contexts_of(kind: str, count: int, dim: int, generator: np.random.Generator) -> Floats:
    normal = generator.normal(size=(count, dim))
    match kind:
        case "far":
            return normal + 1e3 * generator.choice([-1.0, 1.0], dim)
        case "wide":
            return 1e3 * normal
        case "collinear":
            return np.outer(normal[:, 0], generator.normal(size=dim))
        case "constant":
            return np.broadcast_to(normal[:1], (count, dim)).copy()
        case "tiny":
            return 1e-8 * normal
    return normal


def displays(
    contexts: Floats, arms: int, count: int, generator: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the sessions and arms of `count` displays."""
    return generator.integers(0, len(contexts), count), generator.integers(0, arms, count)


@dataclass(frozen=True)
class Scene:
    """A precision after some episodes, and contexts of the kind that it was learned from."""

    precision: Precision
    contexts: Floats
    ridge: float
    generator: np.random.Generator


@st.composite
def scenes(draw: st.DrawFn, kind: st.SearchStrategy[str] = kinds) -> Scene:
    generator = np.random.default_rng(draw(seeds))
    dim, arms, ridge, drawn = draw(dims), draw(counts), draw(ridges), draw(kind)
    precision = Precision.diagonal(np.full(dim, ridge), np.full(arms, ridge))
    for _ in range(draw(st.integers(0, 12))):
        contexts = contexts_of(drawn, 10, dim, generator)
        sessions, shown = displays(contexts, arms, 25, generator)
        precision = precision.plus(ByArm(contexts, sessions=sessions, arms=shown), generator.uniform(0, 0.25, 25))
    return Scene(precision, contexts_of(drawn, 4, dim, generator), ridge, generator)


def belief(
    dim: int, arms: int, generator: np.random.Generator, *, displayed: int = 200, ridge: float = 1.0
) -> AdditiveModel:
    """Return a belief after `displayed` displays around the origin."""
    contexts = generator.normal(size=(max(1, displayed), dim))
    sessions, shown = displays(contexts, arms, displayed, generator)
    return AdditiveModel(
        theta_context=generator.normal(size=dim) / np.sqrt(dim),
        theta_arms=generator.normal(size=arms) * 1.5 - 1,
        precision=Precision.diagonal(np.full(dim, ridge), np.full(arms, ridge)).plus(
            ByArm(contexts, sessions=sessions, arms=shown), generator.uniform(0.02, 0.25, displayed)
        ),
        prior_precision=np.full(dim, ridge),
    )


def planner_of(
    seed: int,
    arms: int,
    horizon: int,
    *,
    dim: int = 2,
    active: Sequence[bool] | None = None,
    repeats: bool = True,
    equal_rewards: bool = False,
) -> tuple[Planner, np.random.Generator]:
    """Return a planner in double precision, with some equal rewards if asked for, and the generator that made it."""
    generator = np.random.default_rng(seed)
    known = belief(dim, arms, generator)
    marks = None if active is None else np.array(active, dtype=bool)
    if equal_rewards:
        rewards = generator.choice([0.2, 0.5, 1.0, *generator.uniform(0.05, 1, 3)], arms)
    else:
        rewards = generator.uniform(0.05, 1, arms)
    return Planner(known, rewards, horizon=horizon, active=marks, repeats=repeats, dtype=np.float64), generator


def excluded_arms(generator: np.random.Generator, arms: int, *shares: float) -> list[list[int]]:
    """Return, per share, that part of the arms, drawn at random."""
    return [np.flatnonzero(generator.random(arms) < share).tolist() for share in shares]


def episode(truth: AdditiveModel, contexts: Floats, count: int, generator: np.random.Generator) -> Observations:
    """Return `count` displays answered by users who behave as `truth` says."""
    sessions, arms = displays(contexts, truth.arms, count, generator)
    chances = sigmoid((contexts @ truth.theta_context)[sessions] + truth.theta_arms[arms])
    clicked = (generator.random(count) < chances).astype(float)
    return seen(contexts, sessions, arms, clicked)


def seen(contexts: Floats, sessions: object, arms: object, clicked: object, positions: object = None) -> Observations:
    """Return displays, at the first position unless others are given."""
    shown = np.asarray(arms, dtype=np.intp)
    return Observations(
        contexts=contexts,
        sessions=np.asarray(sessions, dtype=np.intp),
        arms=shown,
        positions=np.zeros(len(shown), dtype=np.intp) if positions is None else np.asarray(positions, dtype=np.intp),
        clicked=np.asarray(clicked, dtype=np.float64),
    )


# ── short forms ──────────────────────────────────────────────────────────────────────────────────────────────────────


def update(model: AdditiveModel, data: Observations, *, estimator: str = "laplace") -> Fit[AdditiveModel]:
    return model.fold(data, estimator=estimator)


def probabilities(model: ClickModel, contexts: Any) -> Any:
    return sigmoid(model.log_odds(contexts))


def make_policy(name: str, *, beta: float = 1.5, **numbers: Any) -> Policy:
    return POLICIES[name].under(beta=beta, **numbers)


def pseudo_regret(planner: Planner, truth: ClickModel, contexts: Floats, arms: NDArray[np.intp]) -> Floats:
    """Return V^{π*} − V^{π} of slates under the true model: (n, H) → (n,)."""
    shown = planner.shown
    judge = Planner(
        truth,
        planner.rewards,
        horizon=planner.horizon,
        active=np.isin(np.arange(truth.arms), shown),
        repeats=planner.repeats,
        answers=planner.answers,
    )
    best = best_revenue(judge, sigmoid(truth.log_odds(contexts)[:, shown]))
    return best - judge.slate_values(contexts, arms)[:, 0]
