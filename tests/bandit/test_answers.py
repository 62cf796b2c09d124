"""Who goes on, and effects of positions: how rates are counted, and plans compared with every possible slate."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import NO_ARM, sigmoid
from worker.bandit.bonuses import BONUSES, Spread
from worker.bandit.ordering import best_values, greedy_slates
from worker.bandit.planning import Planner, optimal_values, slate_values
from worker.bandit.policies import Greedy, Ucbbp
from worker.bandit.regret import best_revenue
from worker.errors import InputError

from .beliefs import belief, excluded_arms, lawful, probabilities, pseudo_regret, seeds
from .reference import bonus_of
from .tastes import taste

Floats = NDArray[np.float64]


def value(table: Floats, planner: Planner, slate: Any) -> float:
    """Return Q_1 of a slate, by Q_h = f_kh e + (1 − f_kh) s_kh Q_{h+1}; `table` are log-odds at the first position."""
    ahead, effects, rates = 0.0, planner.model.position_effects, planner.answers
    for h, arm in reversed(list(enumerate(slate))):
        f = 1 / (1 + np.exp(-table[arm] - effects[min(h, len(effects) - 1)]))
        rate = 1.0 if rates is None else min(1.0, float(rates.arms[arm] * rates.positions[h]))
        ahead = float(f * planner.rewards[arm] + (1 - f) * rate * ahead)
    return ahead


def best_of_all(table, planner, eligible) -> float:
    horizon, repeats = planner.horizon, planner.repeats
    sizes = [horizon] if repeats else range(min(horizon, len(eligible)) + 1)
    slates = (s for n in sizes for s in (product(eligible, repeat=n) if repeats else permutations(eligible, n)))
    return max((value(table, planner, slate) for slate in slates), default=0.0)


def scene(kind, seed: int, arms: int, horizon: int, *, repeats: bool, constant: bool) -> tuple[Planner, Any]:
    generator = np.random.default_rng(seed)
    positions = np.full(horizon, generator.uniform(0.3, 1)) if constant else generator.uniform(0.3, 1.2, horizon)
    rates = AnswerRates(arms=generator.uniform(0.02, 1, arms), positions=positions)
    later = {} if constant or kind is belief else {"horizon": int(generator.integers(1, horizon + 1))}
    planner = Planner(
        kind(2, arms, generator, **later),
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
    plan = planner.plan(contexts, planner.masked(excluded))
    values = planner.slate_values(contexts, plan.arms)
    odds, chances = planner.model.log_odds(contexts), probabilities(planner.model, contexts)
    for row in range(3):
        eligible = [k for k in range(arms) if k not in excluded[row]]
        best = best_of_all(odds[row], planner, eligible)
        assert plan.continuations[row, 0] == pytest.approx(best, abs=1e-12)
        assert values[row, 0] == pytest.approx(best, abs=1e-12)
    everything = optimal_values(chances, planner.rewards, horizon, planner.cascade)
    np.testing.assert_allclose(everything, planner.plan(contexts).continuations[:, :-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [belief, taste])
@pytest.mark.parametrize("bonus", BONUSES)
@given(seeds, st.integers(1, 6), st.integers(1, 4), st.sampled_from([0.0, 1.5, 30.0]))
@lawful
def test_the_optimistic_arm_is_the_argmax_of_the_formula_with_any_spread(
    kind, bonus, seed, arms, horizon, beta
) -> None:
    planner, generator = scene(kind, seed, arms, horizon, repeats=True, constant=False)
    contexts = generator.normal(size=(4, 2))
    plan = planner.plan(contexts)
    spread = Spread(share=float(generator.random()), keys=generator.integers(0, 2**32, 4, dtype=np.uint32))
    policy = Ucbbp(beta=beta, bonus=BONUSES[bonus], spread=spread.share)
    chosen = policy.slates(planner, contexts, keys=spread.keys).arms
    odds, widths = planner.model.log_odds(contexts), beta * planner.model.widths(contexts)
    rates, effects = planner.answers.of_arms(np.arange(arms), horizon), planner.model.position_effects
    for h in range(horizon):
        here = odds + effects[min(h, len(effects) - 1)]
        f, ahead = sigmoid(here), rates[h] * plan.continuations[:, h + 1 : h + 2]
        factors = spread.factors(slice(0, 4), np.arange(arms, dtype=np.uint32), np.float64, h)
        extra = factors * bonus_of(bonus, here, widths, planner.rewards - ahead)
        table = f * planner.rewards + (1 - f) * ahead + extra
        assert (table[np.arange(4), chosen[:, h]] >= table.max(axis=1) - 1e-12).all()


@pytest.mark.parametrize("kind", [belief, taste])
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.booleans())
@lawful
def test_without_repeats_the_plan_is_exact_where_positions_are_alike_and_promises_no_more_elsewhere(
    kind, seed, arms, horizon, constant
) -> None:
    planner, generator = scene(kind, seed, arms, horizon, repeats=False, constant=constant)
    contexts = generator.normal(size=(3, 2))
    excluded = excluded_arms(generator, arms, 0.0, 0.4, 1.0)
    slates = greedy_slates(planner, contexts, planner.masked(excluded))
    odds, chances = planner.model.log_odds(contexts), probabilities(planner.model, contexts)
    for row in range(3):
        eligible = [k for k in range(arms) if k not in excluded[row]]
        shown = [arm for arm in slates[row].tolist() if arm != NO_ARM]
        assert len(set(shown)) == len(shown) == min(horizon, len(eligible))
        assert set(shown) <= set(eligible)
        best = best_of_all(odds[row], planner, eligible)
        cascade = planner.cascade.choose(np.array(eligible, dtype=np.intp))
        found = best_values(chances[row : row + 1, eligible], planner.rewards[eligible], horizon, cascade)[0]
        earned = value(odds[row], planner, shown)
        if constant:
            assert earned == pytest.approx(found, abs=1e-12)
            assert found == pytest.approx(best, abs=1e-12)
        else:
            # A slate is full: the arms that fill it up at its end may earn a little more than was promised.
            assert found - 1e-12 <= earned <= best + 1e-12


@given(seeds, st.integers(1, 5), st.integers(1, 4), st.booleans())
@lawful
def test_regret_is_the_lead_of_the_best_slate_with_the_same_rates(seed, arms, horizon, repeats) -> None:
    planner, generator = scene(taste, seed, arms, horizon, repeats=repeats, constant=True)
    truth, contexts = taste(2, arms, generator), generator.normal(size=(3, 2))
    slates = generator.integers(0, arms, (3, horizon))
    odds, chances = truth.log_odds(contexts), probabilities(truth, contexts)
    earned = slate_values(truth, planner.rewards, contexts, slates, planner.answers)[:, 0]
    losses = pseudo_regret(planner, truth, contexts, slates)
    for row in range(3):
        expected = value(odds[row], planner, slates[row])
        assert earned[row] == pytest.approx(expected, abs=1e-12)
        best = best_of_all(odds[row], planner, list(range(arms)))
        assert best_revenue(planner, chances)[row] == pytest.approx(best, abs=1e-12)
        assert losses[row] == pytest.approx(best - expected, abs=1e-12)


@pytest.mark.parametrize("repeats", [True, False])
@given(seeds)
@lawful
def test_rates_of_one_change_nothing(repeats: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    known, rewards = taste(2, 6, generator), generator.uniform(0.1, 1, 6)
    everybody = AnswerRates(arms=np.ones(6), positions=np.ones(3))
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
    by_arm, by_position = [1.0] * arms, [1.0] * horizon
    for _ in range(20):  # by turns, one display after the other
        due = [
            sum(by_position[h] for h, k in zip(positions, shown, strict=True) if k == j and h < horizon)
            for j in range(arms)
        ]
        got = [answered[inside & (shown == j)].sum() for j in range(arms)]
        by_arm = [(got[j] + 20 * overall) / (due[j] + 20) for j in range(arms)]
        due = [sum(by_arm[k] for k in shown[positions == j]) for j in range(horizon)]
        by_position = [(answered[positions == j].sum() + 50) / (due[j] + 50) for j in range(horizon)]
    np.testing.assert_allclose(rates.arms, by_arm, rtol=1e-12)
    np.testing.assert_allclose(rates.positions, by_position, rtol=1e-12)
    assert (rates.of_arms(np.arange(arms), horizon + 2) <= 1).all()


def test_an_arm_that_is_only_shown_last_does_not_take_the_rate_of_that_position_for_its_own() -> None:
    # Position 2 loses every other user, whatever arm it shows. Pooled once, arm 2 would be blamed.
    displayed = np.array([[1e6, 1e6, 0.0], [1e6, 1e6, 1e6]])
    rates = counted(displayed, displayed * [[0.8], [0.4]]).rates()
    np.testing.assert_allclose(rates.arms / rates.arms[0], 1.0, rtol=1e-3)
    np.testing.assert_allclose(rates.positions[1] / rates.positions[0], 0.5, rtol=1e-3)


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
    more = counts.choose_arms([0, 1, 2, 3, -1, -1])
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
