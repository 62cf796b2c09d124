"""The decision core against a plain dense implementation, growth with the number of arms, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats
from worker.bandit.click_model import Observations
from worker.bandit.dense import DensePlanner, around, dense_laplace, dense_matrix, dense_theta
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import Planner
from worker.bandit.policies import Ucbbp, exploration_scores
from worker.bench.figures import Figure, fastest, in_process, medians, one_blas_thread, peak_memory
from worker.errors import FailedError
from worker.simulation.environments import Environment, make_environment
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.version_records import encode_parameters

BATCH = 256
BETA = 1.5
SEED = 7
FIGURES = 14  # number of figures that `measure` yields


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a problem."""

    dim: int
    arms: int
    horizon: int

    def __str__(self) -> str:
        return f"d={self.dim} K={self.arms:,} H={self.horizon}"


SMALL = Size(dim=16, arms=50, horizon=5)
MEDIUM = Size(dim=32, arms=1_000, horizon=10)
LARGE = Size(dim=32, arms=100_000, horizon=10)
FEW_TASTES = Size(dim=8, arms=1_000, horizon=10)
MANY_TASTES = Size(dim=8, arms=100_000, horizon=10)
FEW = 8  # sessions of a small batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """An environment, a posterior with the true parameters and little certainty, and a source of users."""

    size: Size
    world: Environment
    belief: AdditiveModel
    generator: np.random.Generator

    @classmethod
    def of(cls, size: Size, *, sessions: int = 2_000) -> Scene:
        """Set up the opposite environment, with the information of one episode of round-robin."""
        generator = np.random.default_rng(SEED)
        world = make_environment("opposite", dim=size.dim, arms=size.arms, generator=generator)
        prior = AdditiveModel.prior(dim=size.dim, arms=size.arms, ridge=1.0)
        scene = cls(size=size, world=world, belief=prior, generator=generator)
        learned = prior.fold(scene.episode(sessions), estimator="laplace").model
        # The true biases all differ, as in a late estimate; after one episode most are still tied.
        return replace(scene, belief=around(learned, world.truth))

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
            clicked=(positions == clicked[rows]).astype(np.float64),
        )

    def planner(self) -> Planner:
        """Return the fast planner of the posterior."""
        return Planner(self.belief, self.world.rewards, horizon=self.size.horizon)

    def tastes(self, *, sessions: int = 2_000) -> PersonalModel:
        """Return the belief of the personal model after one episode of round-robin."""
        prior = PersonalModel.prior(dim=self.size.dim, arms=self.size.arms, ridge=1.0)
        return prior.fold(self.episode(sessions), estimator="laplace").model

    def contexts(self) -> Floats:
        """Draw a batch of contexts."""
        return self.world.contexts(self.generator, BATCH)


def measure(*, quick: bool = False) -> Iterator[Figure]:
    """Yield every figure as it is measured; `quick` measures everything once and small, for tests."""
    small, medium, large = (SMALL, MEDIUM, LARGE) if not quick else (SMALL, _shrunk(MEDIUM), _shrunk(LARGE))
    with one_blas_thread():
        yield from _planning(small, least=100, sessions=8, rounds=3 if quick else 15)
        yield from _planning(medium, least=1000, sessions=1, rounds=1 if quick else 3)
        yield from _growth(medium, large, rounds=1 if quick else 7)
        yield from _closing(small, sessions=1_000, rounds=1 if quick else 5)
        yield from _closing(medium, sessions=200 if quick else 1_000, rounds=1 if quick else 3)
        yield from _personal_planning(small, rounds=3 if quick else 40)
        yield from _personal_planning(medium, rounds=1 if quick else 12)
        yield from _personal_closing(small, most=40, sessions=1_000, rounds=1 if quick else 7)
        yield from _personal_closing(medium, most=400, sessions=200 if quick else 1_000, rounds=1 if quick else 5)
        yield from _versions(medium, large)
    few, many = (FEW_TASTES, MANY_TASTES) if not quick else (_shrunk(FEW_TASTES), _shrunk(MANY_TASTES))
    yield from _personal_growth(few, many, rounds=1 if quick else 5)
    yield from _closing_alone(large, sessions=500 if quick else 10_000)


def _shrunk(size: Size) -> Size:
    return replace(size, arms=size.arms // 20)


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _planning(size: Size, *, least: float, sessions: int, rounds: int) -> Iterator[Figure]:
    """Compare the time per session of the kernel, in batches, with that of the dense loop, on `sessions` of a batch."""
    scene = Scene.of(size)
    contexts, policy = scene.contexts(), Ucbbp(beta=BETA)
    planner = scene.planner()
    dense = DensePlanner(scene.belief, scene.world.rewards, horizon=size.horizon, beta=BETA)
    fast = policy.slates(planner, contexts[:sessions]).arms
    slow = np.array([dense.slate(context) for context in contexts[:sessions]])
    if (fast != slow).mean() > 0.02:  # float32 may decide a near tie the other way
        raise FailedError(f"at {size} the kernel and the dense loop choose different slates")
    seconds = medians(
        {
            "kernel": lambda: policy.slates(planner, contexts),
            "dense": lambda: [dense.slate(context) for context in contexts[:sessions]],
        },
        rounds=rounds,
    )
    kernel, loop = seconds["kernel"] / BATCH, seconds["dense"] / sessions
    yield Figure(
        f"planning, {size}",
        loop / kernel,
        "× the dense loop",
        least=least,
        detail=f"{kernel * 1e6:.3g} µs per session against {loop * 1e6:,.0f} µs",
    )


def _growth(medium: Size, large: Size, *, rounds: int) -> Iterator[Figure]:
    policy = Ucbbp(beta=BETA)
    few, many = Scene.of(medium), Scene.of(large)
    planners, contexts = (few.planner(), many.planner()), (few.contexts(), many.contexts())
    more = large.arms // medium.arms  # repetitions, to measure both over about the same time
    seconds = medians(
        {
            "few": lambda: [policy.slates(planners[0], contexts[0]) for _ in range(more)],
            "many": lambda: policy.slates(planners[1], contexts[1]),
        },
        rounds=rounds,
    )
    yield Figure(
        f"planning, K={large.arms:,}, d={large.dim}",
        seconds["many"] / (seconds["few"] / more),
        f"× the time of K={medium.arms:,}",
        most=1.2 * more,
        detail=f"{seconds['many'] / BATCH * 1e6:,.0f} µs per session",
    )


# ── closing an episode ───────────────────────────────────────────────────────────────────────────────────────────────


def _closing(size: Size, *, sessions: int, rounds: int) -> Iterator[Figure]:
    scene = Scene.of(size)
    data = scene.episode(sessions)
    theta = dense_theta(scene.belief)
    matrix = dense_matrix(scene.belief.precision)
    off = dense_laplace(theta, matrix, data)[0] - dense_theta(_folded(scene, data))
    if np.abs(off).max() > 1e-8:
        raise FailedError(f"at {size} the structured and the dense fold differ by {np.abs(off).max():.2g}")
    seconds = medians(
        {"blocks": lambda: _folded(scene, data), "dense": lambda: dense_laplace(theta, matrix, data)},
        rounds=rounds,
    )
    yield Figure(
        f"closing an episode, {size}",
        seconds["dense"] / seconds["blocks"],
        "× dense",
        detail=f"{sessions:,} sessions, {len(data):,} displays in {seconds['blocks'] * 1e3:.3g} ms",
    )


def _folded(scene: Scene, data: Observations) -> AdditiveModel:
    return scene.belief.fold(data, estimator="laplace").model


def _closing_alone(size: Size, *, sessions: int) -> Iterator[Figure]:
    """Close a large episode in a process of its own, to measure its peak memory."""
    fold, thresholds, peak = in_process(close_large, size, sessions)
    yield Figure(
        f"closing an episode of {sessions:,} sessions, {size}",
        peak / 1e6,
        "MB at its peak",
        most=1_000,
        detail=f"fold {fold:.3g} s, exploration thresholds {thresholds:.3g} s; the process and its users included",
    )


def close_large(size: Size, sessions: int) -> tuple[float, float, int]:
    """Fold an episode and rank its sessions for AUCBBP; return the seconds of both and the peak memory in bytes."""
    with one_blas_thread():
        scene = Scene.of(size)
        data = scene.episode(sessions)
        done: list[AdditiveModel] = []
        fold = medians({"fold": lambda: done.append(_folded(scene, data))}, rounds=1)["fold"]
        planner = replace(scene, belief=done[-1]).planner()
        began = time.process_time()
        arms = Ucbbp(beta=BETA).slates(planner, data.contexts).arms
        np.partition(exploration_scores(planner, data.contexts, arms), -10, axis=0)
        return fold, time.process_time() - began, peak_memory()


# ── the personal model ───────────────────────────────────────────────────────────────────────────────────────────────


def _personal_planning(size: Size, *, rounds: int) -> Iterator[Figure]:
    """Compare the time per session of the personal model with that of the additive one, in large and small batches."""
    scene, policy = Scene.of(size), Ucbbp(beta=BETA)
    contexts, additive = scene.contexts(), scene.planner()
    personal = Planner(scene.tastes(), scene.world.rewards, horizon=size.horizon)
    seconds = fastest(
        {
            "additive": lambda: policy.slates(additive, contexts),
            "personal": lambda: policy.slates(personal, contexts),
            "few, additive": lambda: policy.slates(additive, contexts[:FEW]),
            "few, personal": lambda: policy.slates(personal, contexts[:FEW]),
        },
        rounds=rounds,
    )
    each = {name: time / (FEW if name.startswith("few") else BATCH) * 1e6 for name, time in seconds.items()}
    yield Figure(
        f"planning, personal, {size}",
        each["personal"] / each["additive"],
        "× additive",
        most=3,
        detail=f"{each['personal']:.3g} µs per session against {each['additive']:.3g} µs; in batches of {FEW} "
        f"{each['few, personal']:.3g} against {each['few, additive']:.3g} µs",
    )


def _personal_closing(size: Size, *, most: float, sessions: int, rounds: int) -> Iterator[Figure]:
    scene = Scene.of(size)
    belief, data = scene.tastes(), scene.episode(sessions)
    seconds = fastest({"fold": lambda: belief.fold(data, estimator="laplace")}, rounds=rounds)["fold"]
    yield Figure(
        f"closing an episode, personal, {size}",
        seconds * 1e3,
        "ms",
        most=most,
        detail=f"{sessions:,} sessions, {len(data):,} displays; the strength of tastes included",
    )


def _personal_growth(few: Size, many: Size, *, rounds: int) -> Iterator[Figure]:
    """Plan and fold with many arms in a process of its own, to measure its peak memory."""
    ratio, plan, fold, peak = in_process(use_many, few, many, rounds)
    yield Figure(
        f"planning, personal, K={many.arms:,}, d={many.dim}",
        ratio,
        f"× the time per ad of K={few.arms:,}",
        most=1.2,
        detail=f"{plan / BATCH * 1e6:,.0f} µs per session",
    )
    yield Figure(
        f"planning and closing an episode, personal, {many}",
        peak / 1e6,
        "MB at its peak",
        most=2_000,
        detail=f"fold {fold:.3g} s; the process and its users included",
    )


def use_many(few: Size, many: Size, rounds: int) -> tuple[float, float, float, int]:
    """Plan a batch and fold an episode by the personal model.

    Return the time per arm to plan many against few, the seconds to plan and to fold with many, and the peak memory.
    """
    policy, fold, more = Ucbbp(beta=BETA), 0.0, many.arms // few.arms
    with one_blas_thread():
        planners, contexts = [], []
        for size in (few, many):
            scene = Scene.of(size)
            began = time.process_time()
            belief = scene.tastes(sessions=10 * size.arms // size.horizon)
            fold = time.process_time() - began
            planners.append(Planner(belief, scene.world.rewards, horizon=size.horizon))
            contexts.append(scene.contexts())
        seconds = medians(
            {
                "few": lambda: [policy.slates(planners[0], contexts[0]) for _ in range(more)],
                "many": lambda: policy.slates(planners[1], contexts[1]),
            },
            rounds=rounds,
        )
        return seconds["many"] / seconds["few"], seconds["many"], fold, peak_memory()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _versions(*sizes: Size) -> Iterator[Figure]:
    for size in sizes:
        scene = Scene.of(size)
        arms = tuple(scene.world.catalogue())
        settings = LearningSettings(dim=size.dim, horizon=size.horizon, model=scene.belief.name)
        version = Parameters(version=1, settings=settings, arms=arms, model=scene.belief)
        held = sum(array.nbytes for array in scene.belief.pack().values())
        dense = 8 * (size.dim + size.arms) ** 2
        yield Figure(
            f"a version of the parameters, {size}",
            held / 1e6,
            "MB in memory",
            detail=f"{len(encode_parameters(version)) / 1e6:.3g} MB as a record; dense: {dense / 1e6:,.0f} MB",
        )
