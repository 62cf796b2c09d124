"""Answer rates: how they are counted, and plans with them compared with every possible slate."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import NO_ARM
from worker.bandit.bonuses import BONUSES
from worker.bandit.ordering import best_values, greedy_slates
from worker.bandit.planning import Planner, optimal_values
from worker.bandit.policies import Greedy, Ucbbp
from worker.bandit.regret import best_revenue, pseudo_regret, slate_revenue
from worker.errors import InputError

from .beliefs import belief, excluded_arms, lawful, probabilities, seeds
from .tastes import taste

Floats = NDArray[np.float64]


def value(chances: Floats, rewards: Floats, rates: AnswerRates, slate: Any) -> float:
    """Return Q_1 of a slate, by Q_h = ρ_k r_h [f e + (1 − f) Q_{h+1}] with ρ_k r_h at most 1."""
    ahead = 0.0
    for h, arm in reversed(list(enumerate(slate))):
        rate = min(1.0, float(rates.arms[arm] * rates.positions[h]))
        ahead = rate * float(chances[arm] * rewards[arm] + (1 - chances[arm]) * ahead)
    return ahead


def best_of_all(chances, rewards, rates, horizon, eligible, *, repeats) -> float:
    sizes = [horizon] if repeats else range(min(horizon, len(eligible)) + 1)
    slates = (s for n in sizes for s in (product(eligible, repeat=n) if repeats else permutations(eligible, n)))
    return max((value(chances, rewards, rates, slate) for slate in slates), default=0.0)


def scene(kind, seed: int, arms: int, horizon: int, *, repeats: bool, constant: bool) -> tuple[Planner, Any]:
    generator = np.random.default_rng(seed)
    positions = np.full(horizon, generator.uniform(0.3, 1)) if constant else generator.uniform(0.3, 1.2, horizon)
    rates = AnswerRates(arms=generator.uniform(0.02, 1, arms), positions=positions)
    planner = Planner(
        kind(2, arms, generator),
        generator.uniform(0.1, 1, arms),
        horizon=horizon,
        repeats=repeats,
        answers=rates,
        dtype=np.float64,
    )
    return planner, generator


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [belief, taste])
@given(seeds, st.integers(1, 4), st.integers(1, 4))
@lawful
def test_the_greedy_plan_is_the_best_of_all_slates(kind, seed: int, arms: int, horizon: int) -> None:
    planner, generator = scene(kind, seed, arms, horizon, repeats=True, constant=False)
    contexts = generator.normal(size=(3, 2))
    excluded = excluded_arms(generator, arms, 0.0, 0.4, 1.0)
    plan = planner.greedy(contexts, planner.masked(excluded))
    values = planner.slate_values(contexts, plan.arms)
    chances = probabilities(planner.model, contexts)
    for row in range(3):
        eligible = [k for k in range(arms) if k not in excluded[row]]
        best = best_of_all(chances[row], planner.rewards, planner.answers, horizon, eligible, repeats=True)
        assert plan.continuations[row, 0] == pytest.approx(best, abs=1e-12)
        assert values[row, 0] == pytest.approx(best, abs=1e-12)
    everything = optimal_values(chances, planner.rewards, horizon, planner.answers.of_arms(np.arange(arms)))
    np.testing.assert_allclose(everything, planner.greedy(contexts).continuations[:, :-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [belief, taste])
@pytest.mark.parametrize("bonus", BONUSES)
@given(seeds, st.integers(1, 6), st.integers(1, 4), st.sampled_from([0.0, 1.5, 30.0]))
@lawful
def test_the_optimistic_arm_has_both_parts_of_its_score_times_the_rate(kind, bonus, seed, arms, horizon, beta) -> None:
    planner, generator = scene(kind, seed, arms, horizon, repeats=True, constant=False)
    contexts = generator.normal(size=(4, 2))
    plan = planner.greedy(contexts)
    chosen = planner.optimistic(contexts, plan.continuations, beta=beta, bonus=BONUSES[bonus])
    f, widths = probabilities(planner.model, contexts), beta * planner.model.widths(contexts)
    rates = planner.answers.of_arms(np.arange(arms))
    for h in range(horizon):
        ahead = plan.continuations[:, h + 1 : h + 2]
        extra = BONUSES[bonus].of(f, widths, planner.rewards - ahead)
        table = rates[h] * (f * planner.rewards + (1 - f) * ahead + extra)
        assert (table[np.arange(4), chosen[:, h]] >= table.max(axis=1) - 1e-12).all()


@pytest.mark.parametrize("kind", [belief, taste])
@given(seeds, st.integers(1, 5), st.integers(1, 4))
@lawful
def test_without_repeats_the_plan_is_exact_where_positions_do_not_differ(kind, seed, arms, horizon) -> None:
    planner, generator = scene(kind, seed, arms, horizon, repeats=False, constant=True)
    contexts = generator.normal(size=(3, 2))
    excluded = excluded_arms(generator, arms, 0.0, 0.4, 1.0)
    slates = greedy_slates(planner, contexts, planner.masked(excluded))
    chances = probabilities(planner.model, contexts)
    for row in range(3):
        eligible = [k for k in range(arms) if k not in excluded[row]]
        shown = [arm for arm in slates[row].tolist() if arm != NO_ARM]
        assert len(set(shown)) == len(shown) == min(horizon, len(eligible))
        assert set(shown) <= set(eligible)
        best = best_of_all(chances[row], planner.rewards, planner.answers, horizon, eligible, repeats=False)
        assert best_values(
            chances[row : row + 1, eligible],
            planner.rewards[eligible],
            horizon,
            planner.answers.choose_arms(np.array(eligible, dtype=np.intp)),
        )[0] == pytest.approx(best, abs=1e-12)
        # A slate is full, even where a further arm at its end brings next to nothing.
        assert value(chances[row], planner.rewards, planner.answers, shown) == pytest.approx(best, abs=1e-12)


@given(seeds, st.integers(1, 5), st.integers(1, 4), st.booleans())
@lawful
def test_regret_is_the_lead_of_the_best_slate_with_the_same_rates(seed, arms, horizon, repeats) -> None:
    planner, generator = scene(taste, seed, arms, horizon, repeats=repeats, constant=True)
    truth, contexts = taste(2, arms, generator), generator.normal(size=(3, 2))
    slates = generator.integers(0, arms, (3, horizon))
    chances = probabilities(truth, contexts)
    earned = slate_revenue(truth, planner.rewards, contexts, slates, planner.answers)
    losses = pseudo_regret(planner, truth, contexts, slates)
    for row in range(3):
        expected = value(chances[row], planner.rewards, planner.answers, slates[row])
        assert earned[row] == pytest.approx(expected, abs=1e-12)
        best = best_of_all(chances[row], planner.rewards, planner.answers, horizon, list(range(arms)), repeats=repeats)
        assert best_revenue(planner, chances)[row] == pytest.approx(best, abs=1e-12)
        assert losses[row] == pytest.approx(best - expected, abs=1e-12)


@pytest.mark.parametrize("repeats", [True, False])
@given(seeds)
@lawful
def test_rates_of_one_change_nothing(repeats: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    known, rewards = taste(2, 6, generator), generator.uniform(0.1, 1, 6)
    everybody = AnswerRates.everybody(arms=6, horizon=3)
    plain, rated = (Planner(known, rewards, horizon=3, repeats=repeats, answers=a) for a in (None, everybody))
    contexts = generator.normal(size=(5, 2))
    for policy in (Greedy(), Ucbbp(beta=1.5)):
        assert np.array_equal(policy.slates(plain, contexts).arms, policy.slates(rated, contexts).arms)


# ── counting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(displayed: Any, answered: Any) -> AnswerCounts:
    return AnswerCounts(displayed=np.asarray(displayed, dtype=float), answered=np.asarray(answered, dtype=float))


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.integers(0, 200))
@lawful
def test_rates_are_their_formulas(seed: int, horizon: int, arms: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    positions, shown = generator.integers(0, horizon + 1, count), generator.integers(0, arms, count)
    answered = (generator.random(count) < 0.6).astype(float)
    counts = AnswerCounts.none(arms=arms, horizon=horizon)
    counts = counts.plus(positions=positions, arms=shown, answered=answered)
    inside = positions < horizon
    rates = counts.rates()
    overall = (answered[inside].sum() + 1) / (inside.sum() + 1)  # one more, so that it is never 0
    expected = [
        (answered[inside & (shown == k)].sum() + 20 * overall) / ((inside & (shown == k)).sum() + 20)
        for k in range(arms)
    ]
    np.testing.assert_allclose(rates.arms, expected, rtol=1e-12)
    for h in range(horizon):
        there = positions == h
        due = sum(expected[k] for k in shown[there])
        assert rates.positions[h] == pytest.approx((answered[there].sum() + 50) / (due + 50), rel=1e-12)
    assert (rates.of_arms(np.arange(arms)) <= 1).all()


def test_without_displays_every_rate_is_one_and_with_many_it_is_the_share() -> None:
    assert AnswerCounts.none(arms=3, horizon=2).rates().are_all_one
    rates = counted([[1e9, 1e9]], [[9e8, 1e8]]).rates()
    np.testing.assert_allclose(rates.arms, [0.9, 0.1], rtol=1e-6)
    assert rates.positions == pytest.approx(1.0, rel=1e-6)


@given(seeds)
@lawful
def test_counts_follow_their_arms_and_positions(seed: int) -> None:
    generator = np.random.default_rng(seed)
    displayed = generator.integers(0, 9, (3, 4)).astype(float)
    counts = counted(displayed, np.floor(displayed / 2))
    assert np.array_equal(counts.faded(0.5).displayed, displayed / 2)
    more = counts.with_arms(2)
    assert np.array_equal(more.displayed, np.hstack([displayed, np.zeros((3, 2))]))
    assert np.array_equal(more.choose_arms([5, 0, 2]).displayed, more.displayed[:, [5, 0, 2]])
    assert np.array_equal(counts.with_horizon(2).displayed, displayed[:2])
    assert np.array_equal(counts.with_horizon(5).displayed[:3], displayed)
    assert (counts.with_horizon(5).answered[3:] == 0).all()


@pytest.mark.parametrize(
    ("displayed", "answered"),
    [
        ([[1.0]], [[2.0]]),
        ([[-1.0]], [[0.0]]),
        ([[1.0]], [[-1.0]]),
        ([[np.nan]], [[0.0]]),
        ([[np.inf]], [[0.0]]),
        ([1.0], [1.0]),
        ([[1.0, 1.0]], [[1.0]]),
    ],
)
def test_counts_that_cannot_be_are_refused(displayed: Any, answered: Any) -> None:
    with pytest.raises(InputError):
        counted(displayed, answered)


def test_no_arm_and_unknown_arms_take_nothing_from_a_slate() -> None:
    rates = AnswerRates(arms=np.array([0.5, 0.9]), positions=np.array([1.0, 0.5]))
    of = rates.of_slates(np.array([[0, 1, 1], [NO_ARM, 2, 0]]))
    assert of.tolist() == [[0.5, 0.45, 0.45], [1.0, 1.0, 0.25]]
