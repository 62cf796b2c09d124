"""The score test for what a model misses, against a slow reference and against worlds where nothing is missed."""

from __future__ import annotations

import numpy as np
import pytest

from worker.bandit.arrays import Floats, Ints
from worker.bandit.misfit import NOTHING, SHARED, Products, evidence_of, score_sums

#: Products of numbers, of a number and a mark, of two marks, and single columns.
EVERY = Products(left=np.array([0, 0, 1, 3, 0, 4]), right=np.array([1, 3, NOTHING, 4, NOTHING, 2]))
PAIRS = Products(left=np.array([0, 2]), right=np.array([1, 4]))


def scene(displays: int, seed: int) -> tuple[Floats, Ints, Floats, Floats]:
    """Return contexts of three numbers and two marks, arms, residuals and weights."""
    generator = np.random.default_rng(seed)
    marks = np.eye(2)[generator.integers(2, size=displays)]
    contexts = np.column_stack([generator.standard_normal((displays, 3)), marks])
    p = generator.random(displays)
    return contexts, generator.integers(3, size=displays), (generator.random(displays) < p) - p, p * (1 - p)


def slow_sums(
    products: Products, contexts: Floats, arms: Ints, residuals: Floats, weights: Floats, count: int
) -> tuple[Floats, Floats]:
    """Regress every product of every ad by itself, with the displays of all ads at `SHARED` in all."""
    scores, informations = np.zeros((2, count, len(products.left)))
    for j, (a, b) in enumerate(zip(products.left, products.right, strict=True)):
        ones, left = np.ones(len(contexts)), contexts[:, a]
        right = ones if b == NOTHING else contexts[:, b]
        linear = ones[:, None] if b == NOTHING else np.column_stack([ones, left, right])
        for k in np.unique(arms):
            its = arms == k
            rows, columns = np.vstack([linear[its], linear]), np.concatenate([(left * right)[its], left * right])
            roots = np.sqrt(np.concatenate([weights[its], weights * SHARED / len(contexts)]))
            c = np.linalg.lstsq(rows * roots[:, None], columns * roots, rcond=None)[0]
            rest = (left * right)[its] - linear[its] @ c
            scores[k, j], informations[k, j] = rest @ residuals[its], weights[its] @ rest**2
    return scores, informations


@pytest.mark.parametrize("products", [EVERY, PAIRS], ids=["every", "pairs"])
@pytest.mark.parametrize("displays", [1, 5, 300])
def test_sums_are_those_of_a_regression_of_every_product_of_every_ad(products: Products, displays: int) -> None:
    seen = scene(displays, seed=displays)
    for found, expected in zip(score_sums(products, *seen, count=4), slow_sums(products, *seen, 4), strict=True):
        assert found == pytest.approx(expected, abs=1e-7)


def test_what_a_model_is_still_learning_of_linear_columns_is_no_misfit() -> None:
    contexts, arms, _, weights = scene(3000, seed=1)
    wrong = weights * (0.3 + contexts @ np.array([0.5, -0.2, 0.1, 0.0, 0.4]))  # what a wrong estimate leaves over
    scores, informations = score_sums(PAIRS, contexts, arms, wrong, weights, count=3)
    assert np.abs(scores / np.sqrt(informations)).max() < 1


def test_no_displays_say_nothing() -> None:
    scores, informations = score_sums(EVERY, *scene(0, seed=0), count=2)
    assert evidence_of(scores, informations, common=True).deviations == scores.any() == 0


@pytest.mark.parametrize("common", [True, False])
def test_evidence_is_a_standard_normal_number_if_nothing_is_missed(common: bool) -> None:
    generator = np.random.default_rng(0)
    informations = generator.exponential(100.0, (10, 2))  # ads are not shown equally often
    found = [
        evidence_of(generator.standard_normal((10, 2)) * np.sqrt(informations), informations, common=common).deviations
        for _ in range(4000)
    ]
    assert np.mean(found) == pytest.approx(0.0, abs=0.1)
    assert np.mean(np.array(found) > 2.33) < 0.02
    assert max(found) < 5


def test_what_all_ads_share_is_no_taste() -> None:
    informations = np.full((5, 1), 100.0)
    shared = evidence_of(0.5 * informations, informations, common=False)
    assert (shared.strength, shared.arms) == (0.0, 0)
    assert evidence_of(0.5 * informations, informations, common=True).deviations > 5
