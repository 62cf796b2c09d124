"""A row's result depends on that row alone, to the bit: any split, order, repetition or padding gives the same.

BLAS sums in another order on another processor and with other threads, so the law is also checked under each of its
kernels that this machine can run, each in a process of its own, because the kernel is chosen when BLAS is loaded.
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
from threadpoolctl import threadpool_limits

from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import COLUMNS, row_products
from worker.bandit.bonuses import BONUSES
from worker.bandit.click_model import ClickModel
from worker.bandit.ordering import greedy_slates, optimistic_slates
from worker.bandit.planning import Masked, Optimism, Planner
from worker.bandit.policies import POLICIES, exploration_scores

from .beliefs import belief, excluded_arms, make_policy, seeds
from .tastes import taste

Contexts = NDArray[np.float64]
Results = Mapping[str, NDArray[Any]]

arm_counts = st.one_of(st.integers(1, 70), st.sampled_from([COLUMNS - 1, COLUMNS, COLUMNS + 1, COLUMNS + 2, 1100]))


def with_repeats(planner: Planner, contexts: Contexts, masked: Masked | None) -> Results:
    plan = planner.plan(contexts, masked)
    optimistic = {
        bonus: planner.plan(contexts, masked, Optimism(beta=1.5, bonus=BONUSES[bonus])).optimistic for bonus in BONUSES
    }
    return {
        "log-odds": planner.heads.log_odds(contexts),
        "probabilities": planner.heads.probabilities(contexts),
        "widths": planner.heads.widths(contexts),
        "greedy": plan.arms,
        "continuations": plan.continuations,
        "slate values": planner.slate_values(contexts, optimistic["value"]),
        "scores": exploration_scores(planner, contexts, optimistic["value"]),
        **optimistic,
    }


def without_repeats(planner: Planner, contexts: Contexts, masked: Masked | None) -> Results:
    optimistic = optimistic_slates(planner, contexts, Optimism(beta=1.5, bonus=BONUSES["value"]), masked)
    return {
        "greedy": greedy_slates(planner, contexts, masked),
        "optimistic": optimistic,
        "slate values": planner.slate_values(contexts, optimistic),
        "scores": exploration_scores(planner, contexts, optimistic),
    }


def known_clicks(kind: str, dim: int, arms: int, generator: np.random.Generator) -> ClickModel:
    if kind == "additive":
        return belief(dim, arms, generator)
    horizon = int(generator.integers(1, 4))
    return taste(dim, arms, generator, features=int(generator.integers(0, 3)), horizon=horizon)


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


@pytest.mark.parametrize("compute", [with_repeats, without_repeats])
@pytest.mark.parametrize("kind", ["additive", "personal"])
@given(seeds, st.integers(1, 40), st.integers(1, 60), st.integers(1, 200), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=20, deadline=None)
def test_a_batch_that_is_planned_in_slices_leaves_no_seam(compute, kind, seed, arms, count, elements, share) -> None:
    generator = np.random.default_rng(seed)
    rewards, repeats = generator.uniform(0.1, 1, arms), compute is with_repeats
    planner = Planner(known_clicks(kind, 3, arms, generator), rewards, horizon=3, repeats=repeats)
    contexts = generator.normal(size=(count, 3)) * generator.choice([1.0, 60.0])
    masked = planner.masked(excluded_arms(generator, arms, *[share] * count))
    whole = compute(planner, contexts, masked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.planning.ELEMENTS", elements)
        patch.setattr("worker.bandit.planning.LEAST_ROWS", 1)
        for name, values in compute(planner, contexts, masked).items():
            assert values.tobytes() == whole[name].tobytes(), name


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
    policy = make_policy(name, thresholds=(0.2, 0.2, 0.25, 0.3), spread=1.0)
    keys = generator.integers(0, 2**32, 50, dtype=np.uint32)
    whole = policy.slates(planner, contexts, planner.masked(excluded), uniforms, keys)
    for rows in (np.arange(1), np.arange(49, -1, -1), generator.integers(0, 50, 33)):
        masked = planner.masked([excluded[row] for row in rows])
        part = policy.slates(planner, contexts[rows], masked, uniforms[rows], keys[rows])
        assert np.array_equal(part.arms, whole.arms[rows])
        assert np.array_equal(part.explored, whole.explored[rows])
        assert np.array_equal(part.propensities, whole.propensities[rows])


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(seeds, st.integers(0, 60), st.sampled_from([1, 2, 33, 153, 320]), st.one_of(st.integers(1, 40), arm_counts))
@settings(max_examples=40, deadline=None)
def test_products_by_rows_are_the_matrix_product(dtype, seed, rows, length, columns) -> None:
    generator = np.random.default_rng(seed)
    left = generator.standard_normal((rows, length)).astype(dtype)
    right = generator.standard_normal((length, columns)).astype(dtype)
    result = row_products(left, right)
    assert (result.dtype, result.shape) == (dtype, (rows, columns))
    exact = left.astype(np.longdouble) @ right.astype(np.longdouble)
    np.testing.assert_allclose(result, exact.astype(float), rtol=0, atol=40 * np.finfo(dtype).eps * length**0.5)


# ── under other kernels and threads ──────────────────────────────────────────────────────────────────────────────────


def usable_kernels() -> list[str]:
    """Return one kernel of OpenBLAS for each vector width that this machine has."""
    processor = Path("/proc/cpuinfo")
    flags = set(processor.read_text().split()) if processor.exists() else set()
    needs = {"Prescott": "pni", "Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512dq"}
    return [kernel for kernel, flag in needs.items() if flag in flags] or [""]


def check_many_shapes() -> None:
    """Check the law with planners that were built under one thread, and serve under one and under several."""
    generator = np.random.default_rng(1)
    for dim, arms in product((1, 8, 33), (2, 50, COLUMNS + 1)):
        kinds = ["additive", "personal"] if arms < COLUMNS or dim < 9 else ["additive"]
        beliefs = [known_clicks(kind, dim, arms, generator) for kind in kinds]
        for known, dtype in product(beliefs, (np.float32, np.float64)):
            planner = Planner(known, generator.uniform(0.1, 1, arms), horizon=2, dtype=dtype)
            contexts = generator.normal(size=(70, dim))
            for threads in (1, 2):
                with threadpool_limits(threads, user_api="blas"):
                    check(with_repeats, planner, contexts, [[]] * 70, generator.integers(0, 70, 70))


@pytest.mark.parametrize("kernel", usable_kernels())
def test_a_row_does_not_depend_on_its_batch_under_any_blas_kernel_and_number_of_threads(kernel: str) -> None:
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": "2"}
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
