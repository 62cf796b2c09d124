"""The slates of each policy, the sessions that explore, and the propensities of the choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM
from worker.bandit.bonuses import BONUSES
from worker.bandit.ordering import optimistic_slates
from worker.bandit.planning import Optimism, Planner
from worker.bandit.policies import (
    POLICIES,
    Aucbbp,
    EpsilonGreedy,
    Greedy,
    MyopicUcb,
    Random,
    RoundRobin,
    Slates,
    Ucbbp,
    exploration_scores,
)
from worker.errors import InputError

from .beliefs import belief, excluded_arms, lawful, make_policy, planner_of, probabilities, seeds
from .reference import squared_widths

Floats = NDArray[np.float64]


def grid(*sizes: int) -> Floats:
    """Return the midpoints of a grid over the unit cube, a row each: chance laid out instead of drawn."""
    return np.array(list(product(*[(np.arange(size) + 0.5) / size for size in sizes])))


# ── the policies ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("bonus", "repeats"), [("value", True), ("paper", True), ("value", False)])
def test_ucbbp_takes_the_optimistic_arms_on_the_greedy_continuation(bonus: str, repeats: bool) -> None:
    planner, generator = planner_of(2, 6, 3, repeats=repeats)
    contexts = generator.normal(size=(5, 2))
    slates = Ucbbp(beta=2.0, bonus=BONUSES[bonus]).slates(planner, contexts)
    if repeats:
        expected = planner.plan(contexts, optimism=Optimism(beta=2.0, bonus=BONUSES[bonus])).optimistic
    else:
        expected = optimistic_slates(planner, contexts, Optimism(beta=2.0, bonus=BONUSES["value"]))
    assert np.array_equal(slates.arms, expected)
    assert slates.explored.all()
    assert (slates.propensities == 1).all()


@given(seeds, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["value", "paper"]))
@lawful
def test_myopic_ucb_without_repeats_goes_down_the_list(seed: int, arms: int, horizon: int, bonus: str) -> None:
    planner, generator = planner_of(seed, arms, horizon, repeats=False)
    contexts = generator.normal(size=(4, 2))
    excluded = excluded_arms(generator, arms, *[0.3] * 4)
    slates = MyopicUcb(beta=1.0, bonus=BONUSES[bonus]).slates(planner, contexts, planner.masked(excluded))
    f = probabilities(planner.model, contexts)
    widths = np.sqrt(squared_widths(planner.model.precision, contexts))
    bonuses = widths * f * (1 - f) * planner.rewards if bonus == "value" else widths
    scores = f * planner.rewards + bonuses
    for row in range(4):
        eligible = [k for k in range(arms) if k not in excluded[row]]
        shown = [arm for arm in slates.arms[row].tolist() if arm != NO_ARM]
        assert sorted(set(shown)) == sorted(shown)
        assert len(shown) == min(horizon, len(eligible))
        best = sorted(scores[row, eligible], reverse=True)[: len(shown)]
        np.testing.assert_allclose(scores[row, shown], best, rtol=1e-9)
        assert slates.explored[row].tolist() == [True] * len(shown) + [False] * (horizon - len(shown))


# ── active exploration ───────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 12), st.integers(0, 15), st.booleans())
@lawful
def test_aucbbp_explores_for_the_sessions_of_the_highest_scores(seed, count, budget, repeats) -> None:
    planner, generator = planner_of(seed, 6, 3, repeats=repeats)
    contexts = generator.normal(size=(count, 2))
    optimistic, greedy = (p.slates(planner, contexts).arms for p in (Ucbbp(beta=2.0), Greedy()))
    slates = Aucbbp(beta=2.0, budget=budget).slates(planner, contexts)
    scores = exploration_scores(planner, contexts, optimistic)
    for h in range(3):
        ranked = sorted(range(count), key=lambda n, h=h: (-scores[n, h if repeats else 0], n))  # type: ignore[misc]
        exploring = set(ranked[:budget])
        assert set(np.flatnonzero(slates.explored[:, h]).tolist()) == exploring
        for n in range(count):
            assert slates.arms[n, h] == (optimistic if n in exploring else greedy)[n, h]
    assert (slates.propensities == 1).all()


@given(seeds, st.integers(1, 12), st.integers(1, 12), st.booleans())
@lawful
def test_thresholds_at_the_score_of_the_last_rank_explore_as_the_ranking_does(seed, count, budget, repeats) -> None:
    planner, generator = planner_of(seed, 6, 3, repeats=repeats)
    contexts = generator.normal(size=(count, 2))
    scores = exploration_scores(planner, contexts, Ucbbp(beta=2.0).slates(planner, contexts).arms)
    thresholds = tuple(np.sort(scores, axis=0)[::-1][min(budget, count) - 1].tolist())
    ranked = Aucbbp(beta=2.0, budget=budget).slates(planner, contexts)
    streamed = Aucbbp(beta=2.0, thresholds=thresholds).slates(planner, contexts)
    assert np.array_equal(ranked.explored, streamed.explored)
    assert np.array_equal(ranked.arms, streamed.arms)


@given(seeds, st.integers(1, 5), st.integers(1, 5), st.sampled_from([0.5, 300.0]), st.data())
@lawful
def test_aucbbp_without_repeats_never_mixes_two_slates(seed, arms, horizon, beta, data) -> None:
    generator = np.random.default_rng(seed)
    rewards = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=arms, max_size=arms))
    planner = Planner(belief(2, arms, generator), rewards, horizon=horizon, repeats=False)
    contexts = generator.normal(size=(4, 2))
    excluded = excluded_arms(generator, arms, *[0.3] * 4)
    slates = Aucbbp(beta=beta, budget=2).slates(planner, contexts, planner.masked(excluded))
    for row in range(4):
        shown = [arm for arm in slates.arms[row].tolist() if arm != NO_ARM]
        assert len(set(shown)) == len(shown) == min(horizon, arms - len(excluded[row]))
        assert not set(shown) & set(excluded[row])
        assert len(set(slates.explored[row, : len(shown)].tolist())) <= 1


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_propensities(slates: Slates) -> None:
    """Check that each propensity is the share of its arm among all chances, given the earlier positions."""
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for slate in slates.arms.tolist():
        for h, arm in enumerate(slate):
            following[tuple(slate[:h])][arm] += 1
    for slate, propensities in zip(slates.arms.tolist(), slates.propensities, strict=True):
        for h, arm in enumerate(slate):
            options = following[tuple(slate[:h])]
            assert propensities[h] == pytest.approx(options[arm] / options.total(), rel=1e-12)


@pytest.mark.parametrize("excluded", [[], [1], [0, 3]])
def test_the_propensities_of_epsilon_greedy_are_the_shares_of_its_choices(excluded: list[int]) -> None:
    planner, _ = planner_of(7, 5, 2, active=[True, True, True, True, False])
    coins = grid(4, 12, 4, 12).reshape(-1, 2, 2)
    contexts = np.tile([[0.3, -0.2]], (len(coins), 1))
    masked = planner.masked([excluded] * len(coins))
    slates = EpsilonGreedy(epsilon=0.25).slates(planner, contexts, masked, coins)
    check_propensities(slates)
    assert not set(slates.arms.ravel().tolist()) & {4, *excluded}
    assert np.array_equal(slates.explored, coins[:, :, 0] < 0.25)
    greedy = Greedy().slates(planner, contexts, masked).arms
    assert np.array_equal(slates.arms[~slates.explored], greedy[~slates.explored])
    np.testing.assert_allclose(slates.propensities[slates.arms != greedy], 0.25 / (4 - len(excluded)))


@pytest.mark.parametrize(("horizon", "excluded"), [(1, []), (2, []), (2, [1]), (2, [0, 1, 2])])
def test_the_propensities_of_epsilon_greedy_without_repeats_are_the_shares_of_its_choices(horizon, excluded) -> None:
    planner, _ = planner_of(8, 4, horizon, repeats=False)
    coins = grid(*[4, 12] * horizon).reshape(-1, horizon, 2)
    contexts = np.tile([[0.3, -0.2]], (len(coins), 1))
    masked = planner.masked([excluded] * len(coins))
    slates = EpsilonGreedy(epsilon=0.25).slates(planner, contexts, masked, coins)
    check_propensities(slates)
    for slate in slates.arms.tolist():
        shown = [arm for arm in slate if arm != NO_ARM]
        assert len(set(shown)) == len(shown) == min(horizon, 4 - len(excluded))
        assert not set(shown) & set(excluded)
    assert np.array_equal(slates.explored, (coins[:, :, 0] < 0.25) & (slates.arms != NO_ARM))


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("excluded", [[], [0], [2, 4], [0, 1, 2, 3, 4, 5]])
def test_random_is_uniform_over_the_eligible_arms(repeats: bool, excluded: list[int]) -> None:
    planner, _ = planner_of(10, 6, 2, repeats=repeats, active=[True, True, True, False, True, True])
    coins = np.zeros((60 * 60, 2, 2))
    coins[:, :, 1] = grid(60, 60)
    slates = Random().slates(planner, np.zeros((len(coins), 2)), planner.masked([excluded] * len(coins)), coins)
    eligible = [k for k in (0, 1, 2, 4, 5) if k not in excluded]
    check_propensities(slates)
    assert set(slates.arms[:, 0].tolist()) == (set(eligible) or {NO_ARM})
    assert np.array_equal(slates.explored, slates.arms != NO_ARM)
    if eligible:
        assert slates.propensities[:, 0] == pytest.approx(1 / len(eligible))
        left = len(eligible) if repeats else len(eligible) - 1
        assert slates.propensities[:, 1] == pytest.approx(1 / left)
        assert repeats or (slates.arms[:, 0] != slates.arms[:, 1]).all()


@given(seeds, st.integers(1, 8), st.integers(1, 6), st.booleans(), st.data())
@lawful
def test_random_gives_every_session_all_it_can_get(seed, arms, horizon, repeats, data) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, repeats=repeats, active=active)
    excluded = excluded_arms(generator, arms, 0.0, 0.3, 0.7, 1.0)
    coins = np.minimum(generator.random((4, horizon, 2)) * 1.2, np.nextafter(1.0, 0.0))  # the last number before 1 too
    slates = Random().slates(planner, np.zeros((4, 2)), planner.masked(excluded), coins)
    for row in range(4):
        eligible = {k for k in range(arms) if active[k] and k not in excluded[row]}
        shown = [arm for arm in slates.arms[row].tolist() if arm != NO_ARM]
        expected = (horizon if repeats else min(horizon, len(eligible))) if eligible else 0
        assert len(shown) == expected
        assert set(shown) <= eligible
        assert repeats or len(set(shown)) == len(shown)


@pytest.mark.parametrize("policy", [Random(), EpsilonGreedy(epsilon=0.5)])
def test_a_policy_that_draws_is_refused_without_uniforms(policy: Any) -> None:
    planner, _ = planner_of(0, 3, 2)
    with pytest.raises(InputError, match="uniforms"):
        policy.slates(planner, np.zeros((1, 2)))


# ── the warm-up ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("start", "horizon", "options", "slates"),
    [
        (0, 3, {"active": [True, False, True, True]}, [[0, 3, 2], [2, 0, 3]]),
        (1, 3, {"active": [True, False, True, True]}, [[2, 0, 3], [3, 2, 0]]),
        (1, 5, {"repeats": False}, [[1, 2, 3, 0, NO_ARM], [2, 3, 0, 1, NO_ARM]]),
        (0, 2, {"active": [False] * 4}, [[NO_ARM] * 2] * 2),
    ],
    ids=["active arms", "a later start", "no repeats", "no arm"],
)
def test_round_robin_goes_through_the_active_arms_position_by_position(start, horizon, options, slates) -> None:
    planner, _ = planner_of(0, 4, horizon, **options)
    found = RoundRobin(start=start).slates(planner, np.zeros((2, 2)))
    assert found.arms.tolist() == slates
    assert np.array_equal(found.explored, found.arms != NO_ARM)


def test_round_robin_shows_every_arm_as_often_to_the_users_who_are_there() -> None:
    planner, _ = planner_of(0, 5, 3)
    left = {1: np.arange(10) % 3 > 0, 2: np.arange(10) % 2 > 0}
    slates = RoundRobin(start=2, stays=lambda shown: left[shown.shape[1]]).slates(planner, np.zeros((10, 2)))
    seen = np.concatenate([slates.arms[:, 0], slates.arms[left[1], 1], slates.arms[left[2], 2]])
    counts = np.bincount(seen, minlength=5)
    assert counts.max() - counts.min() <= 1


def test_round_robin_without_repeats_shows_nobody_an_arm_twice() -> None:
    planner, _ = planner_of(0, 5, 4, repeats=False)
    slates = RoundRobin(start=3).slates(planner, np.zeros((20, 2)))
    assert all(len(set(slate)) == 4 for slate in slates.arms.tolist())
    assert np.bincount(slates.arms.ravel()).tolist() == [16] * 5


def test_round_robin_excludes_nothing() -> None:
    planner, _ = planner_of(0, 2, 2)
    with pytest.raises(InputError, match="exclude no arms"):
        RoundRobin().slates(planner, np.zeros((1, 2)), planner.masked([[0]]))


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_nothing_where_nothing_is_eligible_and_explores_nothing_there(name, repeats) -> None:
    policy = make_policy(name, budget=1)
    for active, excluded in (([True, True], [[0, 1], []]), ([False, False], [[], []])):
        planner, generator = planner_of(3, 2, 3, repeats=repeats, active=active)
        slates = policy.slates(planner, np.ones((2, 2)), planner.masked(excluded), generator.random((2, 3, 2)))
        assert (slates.arms[0] == NO_ARM).all()
        assert not slates.explored[slates.arms == NO_ARM].any()
        assert (slates.propensities[slates.arms == NO_ARM] == 1).all()
        assert (slates.arms[1] != NO_ARM).sum() == (0 if not active[0] else 3 if repeats and name != "fixed" else 2)
        for other in (policy, make_policy(name, thresholds=(0.0,) * 3)):
            none = other.slates(planner, np.zeros((0, 2)), None, np.zeros((0, 3, 2)))
            assert none.arms.shape == none.explored.shape == none.propensities.shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aucbbp", {}, "either a budget"),
        ("aucbbp", {"budget": 1, "thresholds": (0.0,)}, "either a budget"),
    ],
)
def test_settings_of_a_policy_that_make_no_sense_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_policy(name, **options)


# ── ties ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.06, 0.5, 1.0])
def test_of_sessions_with_equal_contexts_the_share_of_ties_explores(share: float, repeats: bool) -> None:
    planner, _ = planner_of(8, 6, 3, repeats=repeats)
    count = 400
    contexts = np.tile([[0.4, -1.0]], (count, 1))
    optimistic = Ucbbp(beta=2.0).slates(planner, contexts[:1]).arms
    thresholds = tuple(exploration_scores(planner, contexts[:1], optimistic)[0].tolist())
    policy = Aucbbp(beta=2.0, thresholds=thresholds, ties=(share,) * 3)
    assert policy.needs_chance == (share < 1)
    coins = np.zeros((count, 3, 2))
    coins[:, :, 0] = ((np.arange(count) + 0.5) / count)[:, None]
    slates = policy.slates(planner, contexts, None, coins)
    assert slates.explored.sum(axis=0).tolist() == [round(share * count)] * 3
    without = Aucbbp(beta=2.0, thresholds=thresholds).slates(planner, contexts)
    assert without.explored.all()


def test_ties_decide_only_at_the_threshold_itself() -> None:
    planner, generator = planner_of(9, 6, 2)
    contexts = generator.normal(size=(30, 2))
    scores = exploration_scores(planner, contexts, Ucbbp(beta=2.0).slates(planner, contexts).arms)
    thresholds = tuple(np.median(scores, axis=0).tolist())  # between two scores, so no score is equal
    certain = Aucbbp(beta=2.0, thresholds=thresholds).slates(planner, contexts)
    never = Aucbbp(beta=2.0, thresholds=thresholds, ties=(0.0, 0.0))
    drawn = never.slates(planner, contexts, None, generator.random((30, 2, 2)))
    assert np.array_equal(certain.explored, drawn.explored)
    with pytest.raises(InputError, match="give it uniforms"):
        never.slates(planner, contexts)
