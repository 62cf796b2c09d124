"""The estimators against the truth: by exact expectations, and by repetition."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from worker.bandit.arrays import Floats
from worker.evaluate.estimators import METHODS, DoublyRobust, Estimate, InversePropensity
from worker.evaluate.model import CrossFit

from .scenes import Scene, any_model, fitted, scenes, seeds, weighted

# ── exact expectations: every slate and every answer, weighted by its probability ────────────────────────────────────


@settings(deadline=None, max_examples=60)
@given(scenes)
def test_the_expectation_of_inverse_propensity_is_the_truth(scene: Scene) -> None:
    sessions, chances = scene.every_session()
    assert chances.sum() == pytest.approx(1)
    found = weighted(sessions)
    value = InversePropensity().value(found, sessions, None)
    assert (chances * (value.value + value.influence)).sum() == pytest.approx(scene.truth(), rel=1e-9)
    np.testing.assert_allclose((chances[:, None] * found.stopped).sum(axis=0), 1.0, rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(scenes, seeds)
def test_the_expectation_of_doubly_robust_is_the_truth_for_any_model(scene: Scene, seed: int) -> None:
    sessions, chances = scene.every_session()
    wrong = any_model(scene, seed)
    fold = np.zeros(len(sessions), dtype=np.intp)
    fit = CrossFit(folds=fold, models=(wrong,), whole=wrong, clicks=0, chances=np.zeros(sessions.slates.shape))
    value = DoublyRobust().value(weighted(sessions), sessions, fit)
    assert (chances * (value.value + value.influence)).sum() == pytest.approx(scene.truth(), rel=1e-9)


# ── repetition: many logs of one world ───────────────────────────────────────────────────────────────────────────────

Runs = dict[str, list[Estimate]]


@cache
def repeated(scene: Scene, count: int, times: int, methods: tuple[str, ...] = tuple(METHODS)) -> Runs:
    generator = np.random.default_rng(11)
    runs: Runs = {method: [] for method in methods}
    for _ in range(times):
        sessions = scene.log(count, generator)
        fit = fitted(sessions, generator) if {"direct", "dr"} & set(methods) else None
        for method in methods:
            runs[method].append(METHODS[method].estimate(sessions, fit, confidence=0.95))
    return runs


def values(runs: list[Estimate]) -> Floats:
    return np.array([run.revenue.estimate for run in runs if run.revenue is not None])


def coverage(runs: list[Estimate], truth: float) -> float:
    ends = [(run.revenue.low, run.revenue.high) for run in runs if run.revenue is not None]
    return float(np.mean([low <= truth <= high for low, high in ends]))


WEIGHTING = ("replay", "ips", "snips")
DRAWN = Scene(leaving=0.05, excluding=3)
MIXED = Scene(share=0.4, arms=3, horizon=2, environment="uniform", repeats=False)
CHANCY = Scene(share=0.6, arms=3, horizon=2, epsilon=0.5, environment="uniform")

# A coverage of 95 % is observed as less than 90 % in 200 logs with a probability of 0.001.
TIMES = 200


@pytest.mark.parametrize("method", METHODS)
def test_mean_error_and_coverage_are_right(method: str) -> None:
    runs, truth = repeated(DRAWN, 1200, TIMES)[method], DRAWN.truth()
    found = values(runs)
    assert abs(found.mean() - truth) < 4 * found.std() / np.sqrt(len(found))
    assert np.mean([run.revenue.error for run in runs if run.revenue is not None]) == pytest.approx(
        found.std(), rel=0.2
    )
    assert coverage(runs, truth) >= 0.9


@pytest.mark.parametrize("method", WEIGHTING)
@pytest.mark.parametrize("scene", [MIXED, CHANCY], ids=["a share drawn", "a target that draws"])
def test_the_coverage_is_right_for_other_rules(scene: Scene, method: str) -> None:
    assert coverage(repeated(scene, 1800, TIMES, WEIGHTING)[method], scene.truth()) >= 0.9


def test_doubly_robust_varies_less_than_inverse_propensity() -> None:
    runs = repeated(DRAWN, 1200, TIMES)
    assert values(runs["dr"]).var() < 0.95 * values(runs["ips"]).var()


def test_doubly_robust_uses_the_model_at_positions_without_support() -> None:
    scene = Scene(horizon=5)
    runs = repeated(scene, 1500, 40, ("dr",))["dr"]
    assert all(run.positions < 5 and run.beyond == 0 for run in runs)
    assert coverage(runs, scene.truth()) >= 0.85


def test_an_average_over_whole_matching_sessions_is_biased() -> None:
    """Therefore replay goes position by position: a session with an early click has less to match."""
    scene, generator = Scene(), np.random.default_rng(2)
    naive = []
    for _ in range(60):
        sessions = scene.log(1500, generator)
        same = (sessions.slates == sessions.target.best) | ~sessions.reached
        naive.append(sessions.earned[same.all(axis=1)].mean())
    assert np.mean(naive) > scene.truth() + 10 * np.std(naive) / np.sqrt(len(naive))


@pytest.mark.parametrize("method", ["ips", "snips"])
def test_a_target_that_served_the_log_has_the_revenue_of_the_log(method: str) -> None:
    sessions = Scene(share=0.0).log(500, np.random.default_rng(0))
    sessions = replace(sessions, target=sessions.served, target_slates=sessions.served.best[None])
    found = METHODS[method].estimate(sessions, None, confidence=0.95)
    assert found.revenue is not None
    assert found.revenue.estimate == pytest.approx(sessions.earned.mean())
    assert found.difference is not None
    assert found.difference.error == pytest.approx(0, abs=1e-12)
    assert found.matching == 500
