"""A row's result depends on that row alone, to the bit: any split, order, repetition or padding gives the same.

BLAS sums in another order on another processor, so the law is also checked under each of its kernels that this machine
can run, each in a process of its own, because the kernel is chosen when BLAS is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.answers import AnswerRates
from worker.bandit.bonuses import BONUSES
from worker.bandit.click_model import BLOCK, ClickModel
from worker.bandit.ordering import greedy_slates, optimistic_slates
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies import POLICIES, exploration_scores

from .beliefs import belief, excluded_arms, make_policy, seeds
from .tastes import taste

Contexts = NDArray[np.float64]
Results = Mapping[str, NDArray[Any]]

arm_counts = st.one_of(st.integers(1, 70), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 1100]))


def with_repeats(planner: Planner, contexts: Contexts, masked: Masked | None) -> Results:
    plan = planner.greedy(contexts, masked)
    optimistic = {
        bonus: planner.optimistic(contexts, plan.continuations, beta=1.5, bonus=BONUSES[bonus], masked=masked)
        for bonus in BONUSES
    }
    batch, count, arms = planner.batch(contexts), len(contexts), len(planner.shown)
    blocks = [slice(first, min(first + BLOCK, arms)) for first in range(0, arms, BLOCK)]
    return {
        "log-odds": np.hstack([batch.log_odds(0, count, block) for block in blocks]),
        "probabilities": np.hstack([batch.probabilities(0, count, block) for block in blocks]),
        "widths": np.hstack([batch.widths(0, count, block) for block in blocks]),
        "greedy": plan.arms,
        "continuations": plan.continuations,
        "slate values": planner.slate_values(contexts, optimistic["value"]),
        "scores": exploration_scores(planner, contexts, optimistic["value"]),
        **optimistic,
    }


def without_repeats(planner: Planner, contexts: Contexts, masked: Masked | None) -> Results:
    optimistic = optimistic_slates(planner, contexts, beta=1.5, masked=masked)
    return {
        "greedy": greedy_slates(planner, contexts, masked),
        "optimistic": optimistic,
        "slate values": planner.slate_values(contexts, optimistic),
        "scores": exploration_scores(planner, contexts, optimistic),
    }


def known_clicks(kind: str, dim: int, arms: int, generator: np.random.Generator) -> ClickModel:
    if kind == "additive":
        return belief(dim, arms, generator)
    return taste(dim, arms, generator, features=int(generator.integers(0, 3)))


def some_rates(arms: int, horizon: int, generator: np.random.Generator) -> AnswerRates:
    return AnswerRates(arms=generator.uniform(0.2, 1, arms), positions=generator.uniform(0.5, 1.1, horizon))


def check(
    compute: Callable[[Planner, Contexts, Masked | None], Results],
    planner: Planner,
    contexts: Contexts,
    excluded: list[list[int]],
    rows: NDArray[np.intp],
) -> None:
    whole = compute(planner, contexts, planner.masked(excluded))
    part = compute(planner, contexts[rows], planner.masked([excluded[row] for row in rows]))
    for name, values in part.items():
        assert values.tobytes() == whole[name][rows].tobytes(), name


@pytest.mark.parametrize("compute", [with_repeats, without_repeats])
@pytest.mark.parametrize("kind", ["additive", "personal"])
@given(seeds, st.integers(1, 40), arm_counts, st.integers(1, 100), st.booleans(), st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_batch(kind, compute, seed, dim, arms, count, single, leaving, data) -> None:
    generator = np.random.default_rng(seed)
    planner = Planner(
        known_clicks(kind, min(dim, 40 if arms < 100 else 9), arms, generator),
        generator.uniform(0.1, 1, arms),
        horizon=3,
        repeats=compute is with_repeats,
        answers=some_rates(arms, 3, generator) if leaving else None,
        dtype=np.float32 if single else np.float64,
    )
    dim = planner.model.dim
    contexts = generator.normal(size=(count, dim))
    share = data.draw(st.sampled_from([0.0, 0.0, 0.2, 0.8]))
    excluded = excluded_arms(generator, arms, *[share] * count)
    size = data.draw(st.integers(1, 100))
    check(compute, planner, contexts, excluded, generator.integers(0, count, size))
    check(compute, planner, contexts, excluded, generator.permutation(count))
    check(compute, planner, contexts, excluded, np.array([generator.integers(count)]))


@pytest.mark.parametrize("remembered", [0, 1 << 24])
@given(seeds, st.sampled_from([1, BLOCK, BLOCK + 1, BLOCK + 17]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_large_batch_that_remembers_no_probabilities_is_planned_to_the_same_bits(
    remembered, seed, arms, single
) -> None:
    generator = np.random.default_rng(seed)
    known, rewards = taste(3, arms, generator), generator.uniform(0.1, 1, arms)
    planner = Planner(known, rewards, horizon=3, dtype=np.float32 if single else np.float64)
    contexts = generator.normal(size=(20, 3))
    expected = with_repeats(planner, contexts, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.heads.REMEMBERED", remembered)
        for name, values in with_repeats(planner, contexts, None).items():
            assert values.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("kind", ["additive", "personal"])
@pytest.mark.parametrize("name", ["ucbbp", "aucbbp"])
@given(seeds, st.integers(1, 30), st.integers(1, 40), st.integers(1, 100), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=20, deadline=None)
def test_a_batch_that_is_planned_in_parts_gets_the_same_slates(name, kind, seed, arms, count, few, share) -> None:
    generator = np.random.default_rng(seed)
    planner = Planner(known_clicks(kind, 3, arms, generator), generator.uniform(0.1, 1, arms), horizon=3)
    contexts, masked = (
        generator.normal(size=(count, 3)),
        planner.masked(excluded_arms(generator, arms, *[share] * count)),
    )
    policy = make_policy(name, thresholds=(0.2, 0.2, 0.25))
    whole = policy.slates(planner, contexts, masked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.policies.optimistic.REMEMBERED", few)
        part = policy.slates(planner, contexts, masked)
    assert np.array_equal(part.arms, whole.arms)
    assert np.array_equal(part.explored, whole.explored)


@pytest.mark.parametrize("kind", ["additive", "personal"])
@given(seeds, st.integers(1, 70), st.integers(1, 20), st.integers(1, 6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_few_rows_are_planned_to_the_bits_of_many(kind, seed, arms, count, horizon, single) -> None:
    generator = np.random.default_rng(seed)
    known, rewards = known_clicks(kind, 3, arms, generator), generator.uniform(0.1, 1, arms)
    planner = Planner(known, rewards, horizon=horizon, dtype=np.float32 if single else np.float64)
    contexts = generator.normal(size=(count, 3)) * generator.choice([1.0, 60.0])
    expected = with_repeats(planner, contexts, None)
    with pytest.MonkeyPatch.context() as patch:
        for short_way in ("LITTLE", "FEW", "NARROWED"):
            patch.setattr(f"worker.bandit.planning.{short_way}", 0)
        for name, values in with_repeats(planner, contexts, None).items():
            assert values.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(seeds, st.sampled_from([0.0, 1.0, 60.0]))
@settings(max_examples=20, deadline=None)
def test_arms_that_a_plan_drops_never_matter(dtype, seed: int, steep: float) -> None:
    # Many arms, and rows with probabilities of exactly 1 or 0 beside others: dropping must change no bit.
    generator = np.random.default_rng(seed)
    known, rewards = taste(3, 400, generator), generator.choice([0.1, 0.4, 0.5, 0.6, 1.0], 400)
    planner = Planner(known, rewards, horizon=4, dtype=dtype)
    contexts = generator.normal(size=(30, 3)) * np.where(generator.random((30, 1)) < 0.3, 1 + steep, 1)
    plan = planner.greedy(contexts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.planning.NARROWED", 10**9)
        whole = planner.greedy(contexts)
    assert np.array_equal(plan.arms, whole.arms)
    assert plan.continuations.tobytes() == whole.continuations.tobytes()


@pytest.mark.parametrize("kind", ["additive", "personal"])
@given(seeds, st.integers(1, 40), st.integers(2, 60))
@settings(max_examples=20, deadline=None)
def test_how_the_contexts_lie_in_memory_does_not_matter(kind: str, seed: int, dim: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    planner = Planner(known_clicks(kind, dim, 20, generator), generator.uniform(0.1, 1, 20), horizon=3)
    contexts = generator.normal(size=(count, dim))
    spread = np.zeros((count, 2 * dim))
    spread[:, ::2] = contexts
    expected = with_repeats(planner, contexts, None)
    for other in (np.asfortranarray(contexts), spread[:, ::2], contexts[::-1].copy()[::-1]):
        for name, values in with_repeats(planner, other, None).items():
            assert values.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("kind", ["additive", "personal"])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_depends_on_the_other_sessions_of_a_batch(name: str, repeats: bool, kind: str) -> None:
    generator = np.random.default_rng(7)
    known = known_clicks(kind, 5, 30, generator)
    planner = Planner(known, generator.uniform(0.1, 1, 30), horizon=4, repeats=repeats)
    contexts, uniforms = generator.normal(size=(50, 5)), generator.random((50, 4, 2))
    excluded = excluded_arms(generator, 30, *[0.2] * 50)
    policy = make_policy(name, thresholds=(0.2, 0.2, 0.25, 0.3))
    whole = policy.slates(planner, contexts, planner.masked(excluded), uniforms)
    for rows in (np.arange(1), np.arange(49, -1, -1), generator.integers(0, 50, 33)):
        part = policy.slates(planner, contexts[rows], planner.masked([excluded[row] for row in rows]), uniforms[rows])
        assert np.array_equal(part.arms, whole.arms[rows])
        assert np.array_equal(part.explored, whole.explored[rows])
        assert np.array_equal(part.propensities, whole.propensities[rows])


# ── under other kernels ──────────────────────────────────────────────────────────────────────────────────────────────


def usable_kernels() -> list[str]:
    """Return one kernel of OpenBLAS for each vector width that this machine has."""
    processor = Path("/proc/cpuinfo")
    flags = set(processor.read_text().split()) if processor.exists() else set()
    needs = {"Prescott": "pni", "Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512dq"}
    return [kernel for kernel, flag in needs.items() if flag in flags] or [""]


def check_many_shapes() -> None:
    generator = np.random.default_rng(1)
    for dim in (1, 3, 8, 16, 26, 33, 40):
        for arms in (1, 2, 9, 50, BLOCK - 1, BLOCK + 1):
            kinds = ["additive", "personal"] if arms < BLOCK or dim < 9 else ["additive"]
            beliefs = [known_clicks(kind, dim, arms, generator) for kind in kinds]
            for known, dtype in product(beliefs, (np.float32, np.float64)):
                planner = Planner(known, generator.uniform(0.1, 1, arms), horizon=2, dtype=dtype)
                contexts = generator.normal(size=(70, dim))
                for _ in range(8 if arms > BLOCK else 1):  # a last column on its own differs rarely, and only just
                    check(with_repeats, planner, contexts, [[]] * 70, generator.integers(0, 70, 70))


@pytest.mark.parametrize("kernel", usable_kernels())
def test_a_row_does_not_depend_on_its_batch_under_any_blas_kernel(kernel: str) -> None:
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": "1"}
    script = "from tests.bandit.test_batches import check_many_shapes; check_many_shapes()"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
