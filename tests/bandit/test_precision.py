"""The block precision, compared with the dense matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.estimators import ByArm
from worker.bandit.precision import Precision
from worker.errors import EstimationError, InputError

from .beliefs import Scene, contexts_of, displays, kinds, lawful, ridges, scenes, seeds
from .reference import dense_matrix, features, inverse, squared_widths


def made(context: object, cross: object, arms: object) -> Precision:
    parts: dict[str, Any] = {"context": context, "cross": cross, "arms": arms}
    return Precision(**parts)


def close(
    actual: NDArray[np.floating], expected: NDArray[np.floating], precision: Precision, *, least: float = 1e-3
) -> None:
    """Check to 1e-10 relative, or to the accuracy that the condition of A leaves of 53 bits to any method.

    Entries below `least` times the largest are checked as if they had that size.
    """
    bits = 16 * np.finfo(float).eps * np.linalg.cond(dense_matrix(precision))
    scale = np.maximum(np.abs(expected), least * np.abs(expected).max())
    assert float((np.abs(actual - expected) / scale).max()) <= max(1e-10, min(bits, 1e-8))


# ── structured equals dense ──────────────────────────────────────────────────────────────────────────────────────────


@given(scenes())
@lawful
def test_widths_are_those_of_the_dense_inverse(scene: Scene) -> None:
    expected = squared_widths(scene.precision, scene.contexts)
    close(scene.precision.squared_widths(scene.contexts), expected, scene.precision)
    # An arm's own information bounds its width from below, whatever is known of the context.
    assert (scene.precision.squared_widths(scene.contexts) >= 1 / scene.precision.arms).all()


@given(scenes(), st.integers(0, 5))
@lawful
def test_widths_of_chosen_pairs_are_those_of_the_dense_inverse(scene: Scene, horizon: int) -> None:
    arms = scene.generator.integers(0, len(scene.precision.arms), (len(scene.contexts), horizon))
    actual = scene.precision.squared_widths_of(scene.contexts, arms)
    assert actual.shape == arms.shape
    if horizon:
        every = squared_widths(scene.precision, scene.contexts)
        close(actual, np.take_along_axis(every, arms, axis=1), scene.precision)


@given(scenes())
@lawful
def test_solve_is_the_dense_solution(scene: Scene) -> None:
    precision = scene.precision
    right = scene.generator.normal(size=precision.dim + len(precision.arms))
    context, arms = precision.solve(right[: precision.dim], right[precision.dim :])
    # Relative to the largest entry: no method is more accurate for small entries. Where this one exceeds the tolerance
    # of `close` 3 times, LAPACK's dense solution exceeds it 7 times elsewhere.
    close(np.concatenate([context, arms]), inverse(dense_matrix(precision)) @ right, precision, least=1)


@given(scenes())
@lawful
def test_the_covariance_of_a_draw_is_exactly_the_inverse(scene: Scene) -> None:
    precision = scene.precision
    unit = np.eye(precision.dim + len(precision.arms))
    context, arms = precision.draw(unit[:, : precision.dim], unit[:, precision.dim :])
    through = np.hstack([context, arms])
    # Relative to the largest entry, as above: LAPACK's dense inverse exceeds the tolerance as much, 4 times.
    close(through.T @ through, inverse(dense_matrix(precision)), precision, least=1)


# ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, kinds, ridges, st.integers(1, 5), st.integers(1, 5), st.integers(0, 40))
@lawful
def test_adding_displays_adds_their_outer_products(seed, kind, ridge, dim, arms, count) -> None:
    generator = np.random.default_rng(seed)
    contexts = contexts_of(kind, 5, dim, generator)
    sessions, shown = displays(contexts, arms, count, generator)
    weights = generator.uniform(0, 0.25, count)
    prior = Precision.diagonal(np.full(dim, ridge), np.full(arms, ridge))
    expected = dense_matrix(prior)
    if count:
        z = features(contexts, sessions, shown, arms)
        expected = expected + (z.T * weights) @ z
    actual = dense_matrix(prior.plus(ByArm(contexts, sessions=sessions, arms=shown), weights))
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert (np.abs(actual - expected) / scale).max() <= 1e-13
    assert np.array_equal(actual, actual.T)


@given(scenes(), st.integers(0, 4))
@lawful
def test_new_arms_start_at_the_prior_and_change_nothing_else(scene: Scene, count: int) -> None:
    before = scene.precision
    after = before.with_arms(count, ridge=scene.ridge)
    old = before.dim + len(before.arms)
    expected = np.eye(old + count) * scene.ridge
    expected[:old, :old] = dense_matrix(before)
    assert np.array_equal(dense_matrix(after), expected)
    kept = after.squared_widths(scene.contexts)[:, : len(before.arms)]
    close(kept, squared_widths(before, scene.contexts), before)


@given(scenes(), st.sampled_from([1.0, 0.99, 0.5, 1e-6]))
@lawful
def test_forgetting_fades_towards_the_prior(scene: Scene, keep: float) -> None:
    before = dense_matrix(scene.precision)
    context = scene.generator.uniform(0.5, 2, scene.precision.dim) * scene.ridge
    prior = np.diag(np.concatenate([context, np.full(len(scene.precision.arms), scene.ridge)]))
    after = scene.precision.forget(keep, context=context, arms=scene.ridge)
    np.testing.assert_allclose(dense_matrix(after), keep * before + (1 - keep) * prior, rtol=1e-14, atol=0)
    assert keep != 1 or np.array_equal(dense_matrix(after), before)


# ── a value ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_precision_is_a_value() -> None:
    given_context = np.eye(2)
    precision = Precision(context=given_context, cross=np.zeros((3, 2)), arms=np.ones(3))
    given_context[0, 0] = 7.0
    assert precision.context[0, 0] == 1.0
    for array in (precision.context, precision.cross, precision.arms, precision.centres, precision.whitening):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((np.eye(2), np.zeros((3, 2)), [1.0, np.nan, 1.0]), "not finite"),
        ((np.full((2, 2), np.inf), np.zeros((3, 2)), np.ones(3)), "not finite"),
        ((np.eye(2), np.zeros((3, 3)), np.ones(3)), "shape"),
        ((np.zeros((2, 3)), np.zeros((3, 2)), np.ones(3)), "shape"),
        ((np.ones(2), np.zeros((3, 2)), np.ones(3)), "d×d"),
        ((np.eye(2), np.zeros((3, 2)), np.ones((3, 1))), "a list"),
        ((np.eye(2), "abc", np.ones(3)), "numbers"),
        (([[1.0, 0.5], [0.4, 1.0]], np.zeros((3, 2)), np.ones(3)), "symmetric"),
    ],
)
def test_blocks_that_make_no_precision_are_refused(parts: tuple[object, object, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(*parts)


@pytest.mark.parametrize(
    "precision",
    [
        made([[1.0]], [[0.0]], [0.0]),
        made([[1.0]], [[0.0]], [-1.0]),
        made([[1.0]], [[2.0]], [1.0]),
        made([[0.0]], [[0.0]], [1.0]),
        made([[1.0]], [[1e200]], [1e-200]),
        made([[1.0, 0.0], [0.0, -1.0]], np.zeros((0, 2)), []),
    ],
    ids=["arm without information", "negative arm", "cross too strong", "no context", "overflow", "no arms"],
)
def test_a_precision_that_is_not_positive_definite_is_not_used(precision: Precision) -> None:
    assert not precision.is_positive_definite
    with pytest.raises(EstimationError, match="precision"):
        _ = precision.whitening


def test_without_arms_there_is_still_a_context_block() -> None:
    precision = Precision.diagonal(np.full(2, 3.0), np.zeros(0))
    assert precision.is_positive_definite
    assert np.array_equal(dense_matrix(precision.with_arms(2, ridge=3.0)), 3 * np.eye(4))
