from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bandit.beliefs import belief
from worker.bandit.dense import dense_matrix, dense_theta
from worker.bandit.policies import POLICIES
from worker.errors import InputError
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.explanation import explain
from worker.stream.parameters import Parameters, with_settings
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner

NOBODY = np.array([], dtype=np.intp)


def parameters(seed=0, dim=3, arms=6, **settings):
    """A version after some learning, with one retired arm if there are several."""
    rng = np.random.default_rng(seed)
    catalogue = tuple(
        Arm(arm=f"arm-{k}", reward=float(reward), active=k != 2 or arms < 4)
        for k, reward in enumerate(rng.uniform(0.2, 3, arms))
    )
    chosen = LearningSettings(dim=dim, **{"horizon": 4, "warmup": 0, **settings})
    thresholds = tuple(rng.uniform(0.2, 1, chosen.horizon).tolist())
    return Parameters(
        version=5,
        settings=chosen,
        arms=catalogue,
        model=belief(dim, arms, rng, displayed=40),
        folds=5,
        observations=40,
        thresholds=thresholds,
    )


policies = st.sampled_from(sorted(POLICIES))
versions = st.builds(
    parameters,
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 5),
    arms=st.integers(1, 9),
    horizon=st.integers(1, 5),
    repeats=st.booleans(),
    policy=policies,
    beta=st.sampled_from([0.0, 0.5, 2.0]),
)
versions |= st.builds(parameters, seed=st.integers(0, 10_000), policy=policies, bonus=st.just("paper"))
versions |= st.builds(parameters, policy=st.just("myopic-ucb"), bonus=st.just("paper"), repeats=st.just(False))


@given(version=versions, seed=st.integers(0, 1000), excluded=st.sets(st.integers(0, 8), max_size=4))
def test_the_choice_is_the_one_that_serving_makes(version, seed, excluded):
    if version.settings.policy in ("random", "epsilon-greedy"):
        version = with_settings(version, policy="greedy")
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    gone = np.array([arm for arm in sorted(excluded) if arm < len(version.arms)], dtype=np.intp)
    reasons = explain(version, context, gone)
    arrival = Arrival(
        session_id="s",
        occurred_at=0,
        context=tuple(context.tolist()),
        exclude=tuple(version.arms[k].arm for k in gone),
    )
    served = SlatePlanner(version).plan([arrival], [pack_context(arrival.context)])[0]
    assert reasons.slate == served.arms
    if served.arms:
        assert tuple(position.mode for position in reasons.positions) == served.modes


@given(version=versions, seed=st.integers(0, 1000))
def test_the_choice_has_the_highest_score_among_those_that_competed(version, seed):
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    for position in explain(version, context, NOBODY).positions:
        scores = {one.arm: one.score for one in position.arms}
        assert scores[position.choice] == pytest.approx(max(scores.values()), rel=1e-5)
        assert all(one.bonus >= -1e-12 for one in position.arms)
        assert all(one.score == pytest.approx(one.q + one.bonus) for one in position.arms)


@given(seed=st.integers(0, 1000))
def test_with_repeats_the_numbers_are_those_of_the_definition(seed):
    version = parameters(seed, policy="ucbbp", beta=1.5)
    context = np.random.default_rng(seed).standard_normal(3)
    inverse = np.linalg.inv(dense_matrix(version.model.precision))
    ahead = 0.0
    for position in reversed(explain(version, context, NOBODY).positions):
        assert position.continuation == pytest.approx(ahead)
        for one in position.arms:
            k = int(one.arm.removeprefix("arm-"))
            z = np.concatenate([context, np.eye(6)[k]])
            chance = 1 / (1 + np.exp(-z @ dense_theta(version.model)))
            gain = version.arms[k].reward - ahead
            assert one.probability == pytest.approx(chance)
            assert one.q == pytest.approx(chance * version.arms[k].reward + (1 - chance) * ahead)
            assert one.width == pytest.approx(np.sqrt(z @ inverse @ z))
            assert one.bonus == pytest.approx(1.5 * one.width * chance * (1 - chance) * max(gain, 0))
        ahead = max(one.q for one in position.arms)


def test_the_papers_bonus_is_the_width_alone():
    version = parameters(bonus="paper", beta=0.5)
    for position in explain(version, np.ones(3), NOBODY).positions:
        assert all(one.bonus == pytest.approx(0.5 * one.width) for one in position.arms)


def test_retired_and_excluded_arms_do_not_compete():
    reasons = explain(parameters(), np.zeros(3), np.array([4]))
    competed = [one.arm for one in reasons.positions[0].arms]
    assert competed == ["arm-0", "arm-1", "arm-3", "arm-5"]


def test_without_repeats_every_arm_is_shown_once_and_a_slate_may_be_short():
    reasons = explain(parameters(arms=3, repeats=False, horizon=5), np.zeros(3), NOBODY)
    assert sorted(reasons.slate) == ["arm-0", "arm-1", "arm-2"]
    assert [len(position.arms) for position in reasons.positions] == [3, 2, 1]
    rewards = {arm.arm: arm.reward for arm in parameters(arms=3).arms}
    assert [rewards[arm] for arm in reasons.slate] == sorted(rewards.values(), reverse=True)


def test_myopic_ucb_ignores_later_positions():
    for repeats in (True, False):
        for position in explain(parameters(policy="myopic-ucb", repeats=repeats), np.ones(3), NOBODY).positions:
            assert position.continuation == 0
            for one in position.arms:
                k = int(one.arm.removeprefix("arm-"))
                assert one.q == pytest.approx(one.probability * parameters().arms[k].reward)


def test_with_nothing_eligible_the_slate_is_empty_and_its_mode_is_none():
    reasons = explain(parameters(arms=2), np.zeros(3), np.array([0, 1]))
    assert reasons.slate == ()
    assert [(position.choice, position.mode) for position in reasons.positions] == [(None, "none")]


@pytest.mark.parametrize(
    ("change", "mode", "said"),
    [
        ({"warmup": 9}, "warmup", "draws any eligible arm at random"),
        ({"policy": "random"}, "random", "draws any eligible arm"),
        ({"policy": "epsilon-greedy", "epsilon": 0.25}, "exploit", "with probability 0.25"),
        ({"random_share": 0.05}, "explore", "5.0% of sessions"),
        ({"policy": "aucbbp", "horizon": 2}, "explore", "no exploration thresholds"),
    ],
)
def test_the_notes_name_every_random_choice(change, mode, said):
    reasons = explain(with_settings(parameters(), **change), np.zeros(3), NOBODY)
    assert {position.mode for position in reasons.positions} == {mode}
    assert said in " ".join(reasons.notes)
    assert all(position.arms for position in reasons.positions)


def test_theory_without_a_recorded_radius_is_computed():
    recorded = replace(parameters(beta="theory", bonus="paper"), radius=3.0)
    for position in explain(recorded, np.ones(3), NOBODY).positions:
        assert all(one.bonus == pytest.approx(3 * one.width) for one in position.arms)
    computed = explain(replace(recorded, radius=0.0), np.ones(3), NOBODY)
    assert all(one.bonus > 50 * one.width for one in computed.positions[0].arms)


def test_a_context_beyond_the_number_range_is_refused():
    with pytest.raises(InputError, match="too large"):
        explain(parameters(), np.full(3, 1e200), NOBODY)
