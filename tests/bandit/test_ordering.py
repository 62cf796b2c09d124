"""Slates without repeats, compared with every ordered subset of the arms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import NO_ARM
from worker.bandit.bonuses import BONUSES, Spread
from worker.bandit.ordering import both_slates, fixed_slates, greedy_slates, optimistic_slates
from worker.bandit.planning import Optimism, Planner

from .beliefs import excluded_arms, lawful, planner_of, probabilities, seeds
from .reference import best_value, logistic, slate_value, squared_widths

Floats = NDArray[np.float64]

horizons = st.integers(1, 4)


def check_slate(slate: NDArray[np.intp], chances: Floats, planner: Planner, eligible: list[int]) -> None:
    """Check that a slate is full, of eligible arms, each once, by falling revenue, and no ordered subset is better."""
    shown = [arm for arm in slate.tolist() if arm != NO_ARM]
    assert slate.tolist() == shown + [NO_ARM] * (planner.horizon - len(shown))
    assert len(shown) == min(planner.horizon, len(eligible))
    assert len(set(shown)) == len(shown)
    assert set(shown) <= set(eligible)
    assert (np.diff(planner.rewards[shown]) <= 0).all()
    best = best_value(chances, planner.rewards, planner.horizon, eligible)
    assert slate_value(chances, planner.rewards, shown) == pytest.approx(best, abs=1e-12)


@given(seeds, st.integers(1, 6), horizons, st.sampled_from([0.0, 1.0, 30.0]), st.data())
@lawful
def test_greedy_and_optimistic_slates_are_the_best_of_all_ordered_subsets(seed, arms, horizon, beta, data) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, active=active, repeats=False, equal_rewards=True)
    contexts = generator.normal(size=(3, 2))
    excluded = excluded_arms(generator, arms, 0.0, 0.4, 1.0)
    masked = planner.masked(excluded)
    likely = probabilities(planner.model, contexts)
    widths = np.sqrt(squared_widths(planner.model.precision, contexts))
    spread = Spread(share=float(generator.random()), keys=generator.integers(0, 2**32, 3, dtype=np.uint32))
    factors = np.ones((3, arms))
    factors[:, planner.shown] = spread.factors(slice(0, 3), planner.arm_keys, np.float64)
    hopeful = np.asarray(logistic(planner.model.log_odds(contexts) + beta * widths * factors), dtype=float)
    optimism = Optimism(beta=beta, bonus=BONUSES["value"], spread=spread)
    for slates, chances in (
        (greedy_slates(planner, contexts, masked), likely),
        (optimistic_slates(planner, contexts, optimism, masked), hopeful),
        (both_slates(planner, contexts, optimism, masked)[1], hopeful),
    ):
        for row in range(3):
            eligible = [k for k in range(arms) if active[k] and k not in excluded[row]]
            check_slate(slates[row], chances[row], planner, eligible)


@given(seeds, horizons, st.booleans(), st.data())
@lawful
def test_by_turns_slates_are_as_good_and_arms_that_are_alike_are_shown_as_often(seed, horizon, leaving, data) -> None:
    kinds = st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([-1.0, 0.5]))
    arms = data.draw(st.lists(kinds, min_size=1, max_size=7))
    generator = np.random.default_rng(seed)
    known = AdditiveModel.certain(np.ones(1), np.array([theta for _, theta in arms]))
    rates = AnswerRates(arms=np.where(known.theta_arms < 0, 0.4, 0.8), positions=np.ones(1)) if leaving else None
    active = np.array(data.draw(st.lists(st.booleans(), min_size=len(arms), max_size=len(arms))))
    rewards = [reward for reward, _ in arms]
    planner = Planner(known, rewards, horizon=horizon, repeats=False, active=active, answers=rates)
    turns, excluded = np.arange(420, dtype=np.uint32), excluded_arms(generator, len(arms), *[0.3] * 420)
    contexts = np.repeat(generator.normal(size=(1, 1)), 420, axis=0)
    spread = Optimism(beta=1.0, bonus=BONUSES["value"], spread=Spread(share=1.0, keys=turns))
    slates, _ = both_slates(planner, contexts, spread, planner.masked(excluded))
    for slate, gone in zip(slates.tolist(), excluded, strict=True):
        shown = [arm for arm in slate if arm != NO_ARM]
        assert not set(shown) & (set(gone) | set(np.flatnonzero(~active)))
        assert len(set(shown)) == len(shown) == min(horizon, len(set(planner.shown) - set(gone)))
    values, without = (
        planner.slate_values(contexts, some)[:, 0]
        for some in (slates, greedy_slates(planner, contexts, planner.masked(excluded)))
    )
    assert values == pytest.approx(without, abs=1e-6)
    free, _ = both_slates(planner, contexts, spread)
    for kind in set(arms):
        alike = [arm for arm in planner.shown.tolist() if arms[arm] == kind]
        assert len({int((free == arm).sum()) for arm in alike}) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    st.lists(st.tuples(st.sampled_from([0.05, 0.1, 0.17, 0.7, 1.0]), st.floats(-500, 500)), min_size=1, max_size=7),
    st.sampled_from([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.5, 300.0]),
    st.data(),
)
@lawful
def test_steep_odds_bring_no_excluded_arm_onto_a_slate_and_leave_no_position_empty(
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
        optimistic_slates(planner, contexts, Optimism(beta=beta, bonus=BONUSES["value"]), masked),
    ):
        for slate, gone in zip(slates, excluded, strict=True):
            shown = [arm for arm in slate.tolist() if arm != NO_ARM]
            assert not set(shown) & set(gone)
            assert len(set(shown)) == len(shown) == min(horizon, len(arms) - len(gone))
            assert (np.diff(planner.rewards[shown]) <= 0).all()


@given(seeds, st.integers(1, 6), horizons, st.booleans(), st.data())
@lawful
def test_a_fixed_slate_has_the_first_eligible_arms_of_the_order(seed, arms, horizon, repeats, data) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    order = data.draw(st.lists(st.integers(0, arms - 1), unique=True))
    excluded = data.draw(st.lists(st.lists(st.integers(0, arms - 1)), min_size=3, max_size=3))
    planner, _ = planner_of(seed, arms, horizon, repeats=repeats, active=active)
    slates = fixed_slates(planner, 3, order, planner.masked(excluded)).tolist()
    for slate, out in zip(slates, excluded, strict=True):
        whole = [*order, *(arm for arm in range(arms) if arm not in order)]
        expected = [arm for arm in whole if active[arm] and arm not in out][:horizon]
        assert slate == expected + [NO_ARM] * (horizon - len(expected))
