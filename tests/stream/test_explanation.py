from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bandit.beliefs import belief, seen
from tests.bandit.reference import bonus_of, dense_matrix, dense_theta
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import sigmoid
from worker.bandit.bonuses import BONUSES, Spread
from worker.bandit.personal import PersonalModel
from worker.bandit.policies import POLICIES
from worker.errors import InputError
from worker.stream.catalogue import under
from worker.stream.chance import stable_keys
from worker.stream.contexts import Standardisation, pack_context
from worker.stream.events import Arrival
from worker.stream.explanation import explain
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner


def arrival(context, exclude=(), session=""):
    return Arrival(session_id=session, occurred_at=0, context=tuple(context), exclude=tuple(exclude))


def parameters(seed=0, dim=3, arms=6, ties=(), **settings):
    """A version after some learning, with one retired arm if there are several."""
    rng = np.random.default_rng(seed)
    catalogue = tuple(
        Arm(arm=f"arm-{k}", reward=float(reward), active=k != 2 or arms < 4)
        for k, reward in enumerate(rng.uniform(0.2, 3, arms))
    )
    plain = {
        "repeats": True,
        "model": "additive",
        "intercept": settings.get("model") == "personal",
        "answers": "all",
        "standardise": False,
    }
    chosen = LearningSettings(dim=dim, **{"horizon": 4, "warmup": 0, **plain, **settings})
    thresholds = tuple(rng.uniform(0.2, 1, chosen.horizon).tolist())
    learned = belief(dim, arms, rng, displayed=40) if chosen.model == "additive" else tasteful(dim, arms, rng)
    counts = None if chosen.answers == "all" else answers(arms, chosen.horizon, rng)
    return Parameters(
        version=5,
        settings=chosen,
        arms=catalogue,
        model=learned,
        folds=5,
        observations=40,
        thresholds=thresholds,
        ties=ties * chosen.horizon,
        answers=counts,
    )


def tasteful(dim, arms, rng):
    """A personal model after 60 displays of users with tastes, at four positions."""
    contexts, shown, positions = rng.standard_normal((60, dim)), rng.integers(0, arms, 60), rng.integers(0, 4, 60)
    data = seen(contexts, np.arange(60), shown, rng.integers(0, 2, 60), positions)
    return PersonalModel.prior(dim=dim, arms=arms, ridge=1.0, horizon=4).fold(data, estimator="laplace").model


def answers(arms, horizon, rng):
    """Counts of who goes on, rarer at later positions and for some arms."""
    displayed = rng.integers(0, 200, (horizon, arms)).astype(float)
    rates = np.outer(0.9 ** np.arange(horizon), rng.uniform(0.2, 1, arms))
    return AnswerCounts(displayed=displayed, answered=np.floor(displayed * rates))


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
    bonus=st.sampled_from(["curve", "value"]),
    model=st.sampled_from(["additive", "personal"]),
    answers=st.sampled_from(["all", "learned"]),
    spread=st.sampled_from([0.0, 1.0]),
    ties=st.sampled_from([(), (0.5,)]),
)
versions |= st.builds(
    parameters,
    seed=st.integers(0, 10_000),
    policy=policies,
    bonus=st.just("paper"),
    answers=st.sampled_from(["all", "learned"]),
)
versions |= st.builds(parameters, policy=st.just("myopic-ucb"), bonus=st.just("paper"), repeats=st.just(False))


#: Settings by which something else than the policy chooses; "guarded" is the state of a version.
WAYS = st.sampled_from(
    [{}, {"warmup": 9}, {"random_share": 1.0}, {"guarded": True}]
    + [{"control_share": 0.99, "control": control} for control in ("fixed", "popular", "random", "greedy")]
)


def chosen_in(ways, version):
    settings = replace(version.settings, **{name: value for name, value in ways.items() if name != "guarded"})
    return replace(under(settings, version), guarded="guarded" in ways)


@given(
    version=versions,
    seed=st.integers(0, 1000),
    excluded=st.sets(st.integers(0, 8), max_size=4),
    ways=WAYS,
)
def test_the_choice_is_the_one_that_serving_makes(version, seed, excluded, ways):
    version = chosen_in(ways, version)
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    gone = [version.arms[arm].arm for arm in sorted(excluded) if arm < len(version.arms)]
    someone = arrival(context, gone, f"s{seed}")
    reasons = explain(version, someone)
    served = SlatePlanner(version).plan([someone], [pack_context(someone.context)])[0]
    assert reasons.slate == served.arms
    if served.arms:
        assert tuple(position.mode for position in reasons.positions) == served.modes
        assert all(
            {one.arm for one in place.arms} | set(place.out) == set(version.indices) for place in reasons.positions
        )


@given(version=versions, ways=WAYS, seed=st.integers(0, 1000), session=st.sampled_from(["", "s1", "s2"]))
def test_the_choice_has_the_highest_score_among_those_that_competed(version, ways, seed, session):
    version = chosen_in(ways, version)
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    for position in explain(version, arrival(context, session=session)).positions:
        scores = {one.arm: one.score for one in position.arms}
        if position.way in ("scores", "greedy"):
            assert scores[position.choice] == pytest.approx(max(scores.values()), rel=1e-5)
        assert all(one.bonus >= -1e-12 for one in position.arms)
        assert all(one.score == pytest.approx(one.q + one.bonus) for one in position.arms)


@given(seed=st.integers(0, 1000))
def test_with_repeats_the_numbers_are_those_of_the_definition(seed):
    version = parameters(seed, policy="ucbbp", bonus="value", beta=1.5)
    context = np.random.default_rng(seed).standard_normal(3)
    inverse = np.linalg.inv(dense_matrix(version.model.precision))
    ahead = 0.0
    for position in reversed(explain(version, arrival(context)).positions):
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


@given(seed=st.integers(0, 1000), bonus=st.sampled_from(["curve", "value", "paper"]))
def test_with_positions_rates_and_spread_the_numbers_are_those_of_the_definition(seed, bonus):
    version = parameters(seed, policy="ucbbp", bonus=bonus, beta=1.5, model="personal", answers="learned")
    context = np.random.default_rng(seed).standard_normal(3)
    rates, ahead = version.rates, 0.0
    spread = Spread(share=1.0, keys=stable_keys(["s"], version.settings.salt))
    keys = stable_keys(arm.arm for arm in version.arms)
    for h, position in reversed(list(enumerate(explain(version, arrival(context, session="s")).positions))):
        assert position.continuation == pytest.approx(ahead)
        for one in position.arms:
            k = int(one.arm.removeprefix("arm-"))
            mean, covariance = version.model.head(k)
            u = np.concatenate([[1.0], context])
            odds = np.array([u @ mean + version.model.position_effects[h]])
            chance = sigmoid(odds)
            width = np.sqrt(np.array([u @ covariance @ u]))
            stays = min(1.0, rates.arms[k] * rates.positions[h])
            gain = np.array([version.arms[k].reward - stays * ahead])
            assert (one.probability, one.answer_rate) == (pytest.approx(chance[0]), pytest.approx(stays))
            assert one.spread == pytest.approx(spread.factors(slice(0, 1), keys, np.float64, h)[0, k])
            assert one.q == pytest.approx(stays * ahead + chance[0] * gain[0])
            optimism = one.spread * bonus_of(bonus, odds, 1.5 * width, gain)[0]
            assert one.bonus == pytest.approx(optimism, abs=1e-12)
        ahead = max(one.q for one in position.arms)


@given(seed=st.integers(0, 1000), model=st.sampled_from(["additive", "personal"]))
def test_without_repeats_the_first_score_is_the_revenue_of_the_best_slate(seed, model):
    """Brute force over all ordered slates, under the probabilities that the session plans on, with positions alike."""
    version = parameters(seed, arms=4, horizon=3, policy="ucbbp", model=model, repeats=False, answers="learned")
    equal = AnswerCounts(displayed=np.full((3, 4), 1e9), answered=np.tile(version.rates.arms * 1e9, (3, 1)))
    version = replace(version, answers=equal)  # rates of positions are 1, where the order is exact
    if model == "personal":
        version = replace(version, model=replace(version.model, positions=np.zeros(3)))
    context = np.random.default_rng(seed).standard_normal(3)
    odds = version.model.log_odds(context[None])[0]
    chances = BONUSES["curve"].optimistic(odds, version.settings.beta * version.model.widths(context[None])[0])
    best = 0.0
    for slate in permutations([0, 1, 3], 3):
        value = 0.0
        for k in reversed(slate):
            value = chances[k] * version.arms[k].reward + (1 - chances[k]) * version.rates.arms[k] * value
        best = max(best, value)
    first = explain(version, arrival(context)).positions[0]
    assert max(one.score for one in first.arms) == pytest.approx(best, rel=1e-6)


@given(version=versions, seed=st.integers(0, 1000))
def test_the_contributions_of_an_arm_sum_to_its_log_odds_and_the_largest_is_first(version, seed):
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    positions = explain(version, arrival(context)).positions
    for one in positions[0].arms + positions[-1].arms:
        parts = [part.contribution for part in one.contributions]
        assert sigmoid(np.array([sum(parts)]))[0] == pytest.approx(one.probability)
        assert [abs(part) for part in parts] == sorted(map(abs, parts), reverse=True)
        names = {part.feature for part in one.contributions} - {"position"}
        assert names == {"base rate", *(f"x[{number}]" for number in range(1, len(context) + 1))}


def test_contributions_have_the_names_of_the_declaration_and_the_values_of_the_user():
    features = Features.of_table({"context": {"age": "number", "device": ["mobile", "desktop"]}})
    version = parameters(model="personal", features=features)
    scale = Standardisation(centre=np.array([40.0, 0.0, 0.0]), scale=np.array([10.0, 1.0, 1.0]))
    version = replace(version, settings=replace(version.settings, standardise=True), standardisation=scale)
    for one in explain(version, arrival([25.0, 0.0, 1.0])).positions[0].arms:
        coefficients = version.model.head(int(one.arm.removeprefix("arm-")))[0]
        found = {part.feature: part for part in one.contributions}
        assert set(found) == {"base rate", "age", "device=desktop"}
        assert (found["age"].value, found["age"].standardised) == (25.0, -1.5)
        assert found["age"].contribution == pytest.approx(-1.5 * coefficients[1])
        assert found["device=desktop"].contribution == pytest.approx(coefficients[3])
    missing = explain(version, arrival([np.nan, 1.0, 0.0])).positions[0].arms[0].contributions
    age = next(part for part in missing if part.feature == "age")
    assert (age.value, age.contribution) == (None, 0.0)


def test_an_arm_that_fills_a_slate_competes_with_all_that_are_left():
    """Users leave after the first position: no plan puts a second arm before it, but slates are never short."""
    version = parameters(arms=3, horizon=3, repeats=False, policy="greedy", answers="learned")
    fading = np.array([[1e6], [1e6], [1e6]]) * np.ones(3)
    version = replace(version, answers=AnswerCounts(displayed=fading, answered=fading * [[1.0], [1e-3], [1e-6]]))
    reasons = explain(version, arrival(np.zeros(3)))
    assert sorted(reasons.slate) == ["arm-0", "arm-1", "arm-2"]
    for shown, position in enumerate(reasons.positions):
        assert {one.arm for one in position.arms} <= {"arm-0", "arm-1", "arm-2"} - set(reasons.slate[:shown])
        assert position.choice in {one.arm for one in position.arms}


def test_ties_with_a_threshold_explore_and_a_note_says_so():
    version = parameters(policy="aucbbp", horizon=2)
    assert not any("ties" in note for note in explain(version, arrival(np.ones(3))).notes)
    halved = replace(version, ties=(0.5, 1.0))
    tied = explain(halved, arrival(np.ones(3)))
    assert tied.positions == explain(version, arrival(np.ones(3))).positions
    assert any("here all of them explore" in note for note in tied.notes)
    assert not any("ties" in note for note in explain(halved, arrival(np.ones(3), session="s")).notes)


def test_sessions_differ_in_their_factors_and_without_one_a_note_says_so():
    version = parameters(policy="ucbbp")
    alone, one, other = (explain(version, arrival(np.ones(3), session=name)) for name in ("", "s", "t"))
    assert any("no session id: without the spread of 1" in note for note in alone.notes)
    assert not any("session id" in note for note in one.notes + other.notes)
    spreads = [tuple(arm.spread for arm in found.positions[0].arms) for found in (one, other)]
    assert spreads[0] != spreads[1]
    assert all(0.5 <= factor <= 1.5 for factor in spreads[0] + spreads[1])
    assert {arm.spread for arm in alone.positions[0].arms} == {None}
    for policy in ("greedy", "myopic-ucb"):
        plain = explain(under(replace(version.settings, policy=policy), version), arrival(np.ones(3)))
        assert not any("spread" in note for note in plain.notes)


def test_new_arms_that_are_alike_are_shown_by_turns_and_score_the_same():
    version = parameters(arms=3, horizon=3, repeats=False, policy="aucbbp", model="personal", spread=1.0)
    alike = tuple(Arm(arm=name, reward=2.5) for name in ("new-1", "new-2", "new-3"))
    version = replace(
        version, arms=version.arms + alike, model=version.model.with_arms(3), thresholds=(1e9,) * 3, ties=()
    )
    firsts = []
    for number in range(60):
        found = explain(version, arrival(np.zeros(3), ["new-2"] * (number % 2), session=f"session-{number}"))
        assert all(position.choice in [one.arm for one in position.arms] for position in found.positions)
        scores = {one.arm: one.score for one in found.positions[0].arms}
        assert scores[found.slate[0]] == pytest.approx(max(scores.values()))
        firsts.append(next(arm for arm in found.slate if arm.startswith("new")))
    assert all(firsts.count(name) >= 12 for name in ("new-1", "new-3"))
    assert firsts.count("new-2") >= 5


def test_retired_and_excluded_arms_do_not_compete():
    reasons = explain(parameters(), arrival(np.zeros(3), ["arm-4"]))
    competed = [one.arm for one in reasons.positions[0].arms]
    assert competed == ["arm-0", "arm-1", "arm-3", "arm-5"]


def test_without_repeats_every_arm_is_shown_once_and_a_slate_may_be_short():
    reasons = explain(parameters(arms=3, repeats=False, horizon=5), arrival(np.zeros(3)))
    assert sorted(reasons.slate) == ["arm-0", "arm-1", "arm-2"]
    assert [len(position.arms) for position in reasons.positions] == [3, 2, 1]
    rewards = {arm.arm: arm.reward for arm in parameters(arms=3).arms}
    assert [rewards[arm] for arm in reasons.slate] == sorted(rewards.values(), reverse=True)


def test_myopic_ucb_ignores_later_positions():
    for repeats in (True, False):
        for position in explain(parameters(policy="myopic-ucb", repeats=repeats), arrival(np.ones(3))).positions:
            assert position.continuation == 0
            for one in position.arms:
                k = int(one.arm.removeprefix("arm-"))
                assert one.q == pytest.approx(one.probability * parameters().arms[k].reward)


def test_with_nothing_eligible_the_slate_is_empty_and_its_mode_is_none():
    reasons = explain(parameters(arms=2), arrival(np.zeros(3), ["arm-0", "arm-1"]))
    assert reasons.slate == ()
    assert [(position.choice, position.mode) for position in reasons.positions] == [(None, "none")]


@pytest.mark.parametrize(
    ("change", "mode", "said"),
    [
        ({"warmup": 9}, "explore", "draws any eligible arm at random"),
        ({"policy": "random"}, "exploit", "draws any eligible arm"),
        ({"policy": "epsilon-greedy", "epsilon": 0.25}, "exploit", "with probability 0.25"),
        ({"policy": "ucbbp", "random_share": 0.05}, "explore", "5.0% of sessions"),
        ({"policy": "aucbbp"}, "explore", "no exploration thresholds"),
    ],
)
def test_the_notes_name_every_random_choice(change, mode, said):
    version = replace(parameters(), thresholds=())
    reasons = explain(under(replace(version.settings, **change), version), arrival(np.zeros(3)))
    assert {position.mode for position in reasons.positions} == {mode}
    assert said in " ".join(reasons.notes)
    assert all(position.arms for position in reasons.positions)


def test_a_context_beyond_the_number_range_is_refused():
    with pytest.raises(InputError, match="too large"):
        explain(parameters(), arrival(np.full(3, 1e200)))


def test_a_session_that_no_plan_was_possible_for_has_its_fallback_and_the_cause():
    version, someone = parameters(repeats=False), arrival(np.full(3, 1e200), session="s")
    fallback = SlatePlanner(version).fallback(someone)
    reasons = explain(version, someone, served=fallback)
    assert (reasons.slate, reasons.positions) == (fallback.arms, ())
    assert "too large" in reasons.notes[0]
