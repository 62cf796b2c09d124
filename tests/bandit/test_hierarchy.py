"""The hierarchical precision, compared with the whole matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.click_model import inputs
from worker.bandit.estimators import ByArm
from worker.bandit.hierarchy import Hierarchy
from worker.errors import EstimationError

from .beliefs import displays, lawful, seeds
from .tastes import Tastes, covariance_of, grown, head_of, marginal, prior_of, row_of, tastes, vector, whole_matrix


def close(actual: object, expected: NDArray[np.floating], tolerance: float = 1e-10) -> None:
    """Check to a part of the largest entry: small ones are differences of large ones in any method."""
    wanted = np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * max(1e-300, np.abs(wanted).max()))


def plain(prior: NDArray[np.float64], information: NDArray[np.float64]) -> Hierarchy:
    """Return a hierarchy of arms without features, at one position."""
    arms, size = information.shape[:2]
    crossing = np.zeros((arms, size, 0))
    return Hierarchy(
        features=np.ones((arms, 1)), prior=prior, own=np.ones(size), information=information, crossing=crossing
    )


# ── structured equals dense ──────────────────────────────────────────────────────────────────────────────────────────


class OneNormalAfterTheOther:
    """Gives the unit vectors of all normals that a draw asks for, one per draw."""

    def __init__(self, size: int) -> None:
        self._unit = iter(np.eye(size).ravel().tolist())

    def standard_normal(self, size: int | tuple[int, ...]) -> NDArray[np.float64]:
        count = int(np.prod(size))
        return np.array([next(self._unit) for _ in range(count)]).reshape(size)


@given(tastes())
@lawful
def test_the_covariance_of_a_draw_is_exactly_the_inverse(scene: Tastes) -> None:
    size = len(whole_matrix(scene.precision))
    draws = scene.precision.draws(OneNormalAfterTheOther(size), size)  # type: ignore[arg-type]
    through = np.array([vector(*drawn) for drawn in draws])
    close(through.T @ through, covariance_of(scene.precision))


def parts_of(precision: Hierarchy) -> list[NDArray[np.float64]]:
    shapes = (precision.prior.shape, (precision.positions,), (precision.arms, precision.size))
    return [np.zeros(shape) for shape in shapes]


@given(tastes(), st.data())
@lawful
def test_choosing_arms_is_the_marginal_of_the_whole(scene: Tastes, data: st.DataObject) -> None:
    arms = data.draw(st.permutations(range(scene.precision.arms)))[: data.draw(st.integers(1, scene.precision.arms))]
    chosen = scene.precision.choose_arms(arms)
    close(covariance_of(chosen), marginal(scene.precision, arms))
    close(chosen.covariances, scene.precision.covariances[list(arms)])
    again = grown(chosen, 20, scene.generator)  # what the others have said is inherited by further folds and choices
    fewer = again.choose_arms(range(len(arms) - 1))
    close(covariance_of(fewer), marginal(again, range(len(arms) - 1)))
    assert fewer.is_positive_definite  # without any arm, too
    right = [scene.generator.normal(size=part.shape) for part in parts_of(again)]
    close(vector(*again.solve(*right)), covariance_of(again) @ vector(*right))
    close(vector(*again.times(*right)), whole_matrix(again) @ vector(*right))
    determinant = np.linalg.slogdet(whole_matrix(again))[1]
    assert again.log_determinant == pytest.approx(determinant, rel=1e-9, abs=1e-9)
    close(again.own_variances.ravel(), np.diag(covariance_of(again))[-again.own_variances.size :])


# ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(tastes(), st.integers(0, 60))
@lawful
def test_adding_displays_adds_their_outer_products(scene: Tastes, count: int) -> None:
    before = scene.precision
    contexts = inputs(scene.generator.normal(size=(7, before.size - 1)))
    sessions, arms = displays(contexts, before.arms, count, scene.generator)
    positions = scene.generator.integers(0, before.positions + 1, count)
    weights = scene.generator.uniform(0, 0.25, count)
    expected = whole_matrix(before)
    for session, arm, position, weight in zip(sessions, arms, positions, weights, strict=True):
        z = row_of(before, contexts[session], arm, position)
        expected = expected + weight * np.outer(z, z)
    after = before.plus(ByArm(contexts, sessions=sessions, arms=arms, positions=positions), weights)
    close(whole_matrix(after), expected, 1e-13)
    assert np.array_equal(after.information, after.information.transpose(0, 2, 1))


@given(seeds, st.integers(1, 60), st.integers(1, 200))
@lawful
def test_displays_that_are_summed_in_slices_leave_no_seam(seed: int, count: int, gathered: int) -> None:
    generator = np.random.default_rng(seed)
    contexts = generator.integers(-8, 8, size=(7, 3)).astype(float)  # whole numbers, so that no sum is rounded
    sessions, arms = displays(contexts, 4, count, generator)
    weights = generator.integers(0, 3, count).astype(float) ** 2
    prior = plain(np.ones((3, 1)), np.zeros((4, 3, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.estimators.GATHERED", gathered)
        after = prior.plus(ByArm(contexts, sessions=sessions, arms=arms), weights)
    for arm in range(4):
        seen = contexts[sessions[arms == arm]]
        assert np.array_equal(after.information[arm], (seen.T * weights[arms == arm]) @ seen)


@given(tastes(), st.booleans())
@lawful
def test_what_was_factorised_before_changes_no_bit(scene: Tastes, factorised: bool) -> None:
    # Only arms with new displays are factorised again.
    before = scene.precision
    if factorised:
        assert before.inverses.shape == before.information.shape
    after = grown(before, 3, scene.generator)
    afresh = replace(after, information=after.information.copy(), before=None)
    assert after.inverses.tobytes() == afresh.inverses.tobytes()
    assert after.covariances.tobytes() == afresh.covariances.tobytes()


@given(tastes(), st.sampled_from([1.0, 0.9, 0.5, 1e-6]))
@lawful
def test_forgetting_fades_what_displays_said_and_keeps_the_prior(scene: Tastes, keep: float) -> None:
    prior = np.diag(prior_of(scene.precision))
    expected = prior + keep * (whole_matrix(scene.precision) - prior)
    close(whole_matrix(scene.precision.faded(keep)), expected, 1e-13)


@given(tastes(), st.integers(0, 3))
@lawful
def test_new_arms_change_no_head_of_the_others(scene: Tastes, count: int) -> None:
    before = scene.precision
    more = np.concatenate([before.features, np.ones((count, before.features.shape[1]))])
    after = before.with_features(more)
    assert after.arms == before.arms + count
    close(after.covariances[: before.arms], before.covariances)
    expected = covariance_of(after)
    for arm in range(before.arms, after.arms):
        through = head_of(after, arm)
        close(after.covariances[arm], through @ expected @ through.T)


# ── unusable numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prior", "information"),
    [(-1.0, np.zeros((1, 2, 2))), (1.0, np.full((1, 2, 2), np.nan)), (1.0, -9 * np.eye(2)[None])],
)
def test_a_precision_that_is_not_positive_definite_says_so(prior, information) -> None:
    assert not plain(np.full((2, 1), prior), information).is_positive_definite


def test_a_shared_part_without_information_is_an_error_where_it_is_needed() -> None:
    precision = plain(-np.ones((2, 1)), np.zeros((1, 2, 2)))
    with pytest.raises(EstimationError, match="not positive definite in the shared part"):
        precision.solve(np.ones((2, 1)), np.ones(0), np.ones((1, 2)))
