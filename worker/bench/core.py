"""The decision core: planning slates and closing an episode, at three sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import Observations
from worker.bandit.learning import AUTO
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import Planner
from worker.bandit.policies import Ucbbp
from worker.bench.figures import Figure, fastest
from worker.simulation.environments import make_environment
from worker.simulation.world import Environment

BATCH: Final = 256
FEW: Final = 8  # sessions of a small batch
SESSIONS: Final = 1_000  # of an episode
LEARNED_FROM: Final = 2_000  # sessions before the first measurement
BETA: Final = 1.5
SEED: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a problem."""

    dim: int
    arms: int
    horizon: int

    def __str__(self) -> str:
        return f"d={self.dim} K={self.arms:,} H={self.horizon}"


SMALL: Final = Size(dim=16, arms=50, horizon=5)
MEDIUM: Final = Size(dim=32, arms=1_000, horizon=10)
LARGE: Final = Size(dim=8, arms=100_000, horizon=10)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """An environment, a posterior with the true parameters and little certainty, and a source of users."""

    size: Size
    world: Environment
    belief: AdditiveModel
    generator: np.random.Generator

    @classmethod
    def of(cls, size: Size) -> Scene:
        """Set up the opposite environment, with the information of one episode of round-robin."""
        generator = np.random.default_rng(SEED)
        world = make_environment("opposite", dim=size.dim, arms=size.arms, generator=generator)
        prior = AdditiveModel.prior(dim=size.dim, arms=size.arms, ridge=1.0)
        scene = cls(size=size, world=world, belief=prior, generator=generator)
        learned = prior.fold(scene.episode(LEARNED_FROM), estimator="laplace").model
        # The true biases all differ, as in a late estimate; after one episode most are still tied.
        late = learned.updated((world.truth.effects, world.truth.biases), learned.precision)
        return replace(scene, belief=late)

    def episode(self, sessions: int) -> Observations:
        """Show all arms in turn to new users, and return their answers."""
        contexts = self.world.contexts(self.generator, sessions)
        turns = np.arange(sessions * self.size.horizon) % self.size.arms
        slates = turns.reshape(sessions, self.size.horizon)
        clicked, seen = self.world.answers(contexts, slates, self.generator.random(slates.shape))
        rows, positions = np.nonzero(np.arange(self.size.horizon) < seen[:, None])
        return Observations(
            contexts=contexts,
            sessions=rows,
            arms=slates[rows, positions],
            positions=positions,
            clicked=(positions == clicked[rows]).astype(np.float64),
        )

    def tastes(self, *, sessions: int = LEARNED_FROM) -> PersonalModel:
        """Return the belief of the personal model after one episode of round-robin."""
        size = self.size
        prior = PersonalModel.prior(dim=size.dim, arms=size.arms, ridge=1.0, horizon=size.horizon)
        return prior.fold(self.episode(sessions), estimator="laplace").model


def measure(*, quick: bool = False) -> Iterator[Figure]:
    """Yield every figure as it is measured; `quick` measures everything once and with few ads, for tests."""
    medium, large = (MEDIUM, LARGE) if not quick else (replace(MEDIUM, arms=50), replace(LARGE, arms=500))
    rounds = (40, 12, 5) if not quick else (1, 1, 1)
    for size, most, count in zip((SMALL, medium, large), (5, 80, None), rounds, strict=True):
        yield _planning(size, most, count)
    for size, most, count in zip((SMALL, medium, large), (80, 1_200, None), (7, 5, 1), strict=True):
        yield _closing(size, most, 1 if quick else count)


def _planning(size: Size, most: float | None, rounds: int) -> Figure:
    """Measure the time per session of the personal model, and of the additive one, in large and small batches."""
    scene, policy = Scene.of(size), Ucbbp(beta=BETA, spread=1.0)
    contexts = scene.world.contexts(scene.generator, BATCH)
    additive, personal = (
        Planner(belief, scene.world.rewards, horizon=size.horizon) for belief in (scene.belief, scene.tastes())
    )
    keys = np.arange(BATCH, dtype=np.uint32)
    seconds = fastest(
        {
            "personal": lambda: policy.slates(personal, contexts, keys=keys),
            "additive": lambda: policy.slates(additive, contexts, keys=keys),
            "few": lambda: policy.slates(personal, contexts[:FEW], keys=keys[:FEW]),
        },
        rounds=rounds,
    )
    each = {name: time / (FEW if name == "few" else BATCH) * 1e6 for name, time in seconds.items()}
    detail = f"additive {each['additive']:.3g} µs; personal in batches of {FEW} {each['few']:.3g} µs"
    return Figure(f"planning, personal, {size}", each["personal"], "µs per session", most=most, detail=detail)


def _closing(size: Size, most: float | None, rounds: int) -> Figure:
    scene = Scene.of(size)
    belief, data = scene.tastes(), scene.episode(SESSIONS)
    seconds = fastest({"fold": lambda: belief.fold(data, estimator="laplace", forgetting=AUTO)}, rounds=rounds)["fold"]
    detail = f"{SESSIONS:,} sessions, {len(data):,} displays; strengths, positions and what to forget included"
    return Figure(f"closing an episode, personal, {size}", seconds * 1e3, "ms", most=most, detail=detail)
