"""Slates without repeats, held against every ordered subset of the arms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM
from worker.bandit.ordering import best_values, greedy_slates, optimistic_slates
from worker.bandit.planning import Planner

from .beliefs import belief, lawful, probabilities, seeds
from .reference import best_without_repeats, logistic, slate_value, squared_widths

Floats = NDArray[np.float64]

horizons = st.integers(1, 4)


def planner_of(
    seed: int, arms: int, horizon: int, *, active: list[bool] | None = None, dtype: Any = np.float64
) -> tuple[Planner, np.random.Generator]:
    generator = np.random.default_rng(seed)
    known = belief(2, arms, generator)
    marks = None if active is None else np.array(active)
    rewards = generator.choice([0.2, 0.5, 1.0, *generator.uniform(0.05, 1, 3)], arms)  # some are equal
    return Planner(known, rewards, horizon=horizon, active=marks, repeats=False, dtype=dtype), generator


def check_slate(slate: NDArray[np.intp], chances: Floats, planner: Planner, eligible: list[int]) -> None:
    """Demand a slate that no ordered subset beats, of eligible arms, each once, by falling revenue, and full."""
    shown = [arm for arm in slate.tolist() if arm != NO_ARM]
    assert slate.tolist() == shown + [NO_ARM] * (planner.horizon - len(shown))
    assert len(shown) == min(planner.horizon, len(eligible))
    assert len(set(shown)) == len(shown)
    assert set(shown) <= set(eligible)
    assert (np.diff(planner.rewards[shown]) <= 0).all()
    best = best_without_repeats(chances, planner.rewards, planner.horizon, eligible)
    assert slate_value(chances, planner.rewards, shown) == pytest.approx(best, abs=1e-12)


@given(seeds, st.integers(1, 6), horizons, st.data())
@lawful
def test_the_greedy_slate_is_the_best_of_all_ordered_subsets(
    seed: int, arms: int, horizon: int, data: st.DataObject
) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, active=active)
    contexts = generator.normal(size=(3, 2))
    excluded = [np.flatnonzero(generator.random(arms) < share).tolist() for share in (0.0, 0.4, 1.0)]
    slates = greedy_slates(planner, contexts, planner.masked(excluded))
    for row, chances in enumerate(probabilities(planner.model, contexts)):
        eligible = [k for k in range(arms) if active[k] and k not in excluded[row]]
        check_slate(slates[row], chances, planner, eligible)


@given(seeds, st.integers(1, 6), horizons, st.sampled_from([0.0, 1.0, 30.0]), st.data())
@lawful
def test_the_optimistic_slate_is_the_best_under_optimistic_probabilities(
    seed: int, arms: int, horizon: int, beta: float, data: st.DataObject
) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, active=active)
    contexts = generator.normal(size=(3, 2))
    excluded = [np.flatnonzero(generator.random(arms) < share).tolist() for share in (0.0, 0.4, 1.0)]
    slates = optimistic_slates(planner, contexts, beta=beta, masked=planner.masked(excluded))
    widths = np.sqrt(squared_widths(planner.model.precision, contexts))
    chances = np.asarray(logistic(planner.model.log_odds(contexts) + beta * widths), dtype=float)
    for row in range(3):
        eligible = [k for k in range(arms) if active[k] and k not in excluded[row]]
        check_slate(slates[row], chances[row], planner, eligible)


@given(seeds, st.integers(1, 60), st.integers(1, 6))
@lawful
def test_arms_that_are_no_contenders_never_matter(seed: int, arms: int, horizon: int) -> None:
    planner, generator = planner_of(seed, arms, horizon)
    contexts = 4 * generator.normal(size=(5, 2))
    theta, rewards = planner.model.theta_arms, planner.rewards
    for k in set(range(arms)) - set(planner.contenders.tolist()):
        beating = [j for j in range(arms) if j != k and theta[j] >= theta[k] and rewards[j] >= rewards[k]]
        assert len(beating) >= horizon
    chances = probabilities(planner.model, contexts)
    every = best_values(chances, rewards, horizon)
    for row, slate in enumerate(greedy_slates(planner, contexts)):
        shown = slate[slate != NO_ARM]
        assert slate_value(chances[row], rewards, shown) == pytest.approx(every[row], abs=1e-12)


def test_contenders_are_few_among_many() -> None:
    planner, _ = planner_of(0, 2000, 3)
    assert 3 <= len(planner.contenders) < 200


@given(seeds, st.integers(1, 6), horizons)
@lawful
def test_best_values_are_those_of_the_best_ordered_subsets(seed: int, arms: int, horizon: int) -> None:
    generator = np.random.default_rng(seed)
    chances, rewards = generator.random((2, arms)), generator.choice([0.3, 0.7, 1.0, 2.0], arms)
    for row, value in enumerate(best_values(chances, rewards, horizon)):
        assert value == pytest.approx(best_without_repeats(chances[row], rewards, horizon, range(arms)), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    st.lists(st.tuples(st.sampled_from([0.05, 0.1, 0.17, 0.7, 1.0]), st.floats(-500, 500)), min_size=1, max_size=7),
    st.sampled_from([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.5, 300.0]),
    st.data(),
)
@lawful
def test_steep_odds_bring_no_excluded_arm_onto_a_slate_and_leave_no_place_empty(
    dtype: Any,
    arms: list[tuple[float, float]],
    offset: float,
    horizon: int,
    beta: float,
    data: st.DataObject,
) -> None:
    # Probabilities of exactly 0 and 1, where rounding decides what is better.
    known = AdditiveModel.certain(np.ones(1), np.array([theta for _, theta in arms]))
    planner = Planner(known, [reward for reward, _ in arms], horizon=horizon, repeats=False, dtype=dtype)
    excluded = [data.draw(st.lists(st.integers(0, len(arms) - 1), unique=True)) for _ in range(2)]
    contexts, masked = np.array([[offset], [0.0]]), planner.masked(excluded)
    for slates in (
        greedy_slates(planner, contexts, masked),
        optimistic_slates(planner, contexts, beta=beta, masked=masked),
    ):
        for slate, gone in zip(slates, excluded, strict=True):
            shown = [arm for arm in slate.tolist() if arm != NO_ARM]
            assert not set(shown) & set(gone)
            assert len(set(shown)) == len(shown) == min(horizon, len(arms) - len(gone))
            assert (np.diff(planner.rewards[shown]) <= 0).all()


@given(seeds, st.integers(1, 40), st.integers(1, 5))
@lawful
def test_single_precision_loses_nothing_that_matters(seed: int, arms: int, horizon: int) -> None:
    double, generator = planner_of(seed, arms, horizon)
    single = Planner(double.model, double.rewards, horizon=horizon, repeats=False)
    contexts = generator.normal(size=(5, 2))
    fine = double.slate_values(contexts, greedy_slates(double, contexts))[:, 0]
    rough = double.slate_values(contexts, greedy_slates(single, contexts))[:, 0]
    np.testing.assert_allclose(rough, fine, rtol=1e-5)


@pytest.mark.parametrize("active", [[True] * 3, [False] * 3])
def test_no_sessions_get_no_slates(active: list[bool]) -> None:
    planner, _ = planner_of(0, 3, 4, active=active)
    assert greedy_slates(planner, np.zeros((0, 2))).shape == (0, 4)
    assert optimistic_slates(planner, np.zeros((0, 2)), beta=1.0).shape == (0, 4)


def test_without_an_active_arm_every_slate_is_empty() -> None:
    planner, _ = planner_of(0, 3, 2, active=[False] * 3)
    assert greedy_slates(planner, np.ones((2, 2)), planner.masked([[0], []])).tolist() == [[NO_ARM] * 2] * 2
    assert optimistic_slates(planner, np.ones((2, 2)), beta=1.0).tolist() == [[NO_ARM] * 2] * 2
