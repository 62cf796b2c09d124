import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.errors import InputError
from worker.simulation.environments import ENVIRONMENTS, make_environment
from worker.simulation.world import Chance

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 20)


def world(name, seed=0, dim=5, arms=10, **more):
    return make_environment(name, dim=dim, arms=arms, generator=Chance.of(seed).environment, **more)


@given(seed=seeds, dim=sizes, arms=sizes)
def test_opposite_has_high_paying_unlikely_ads(seed, dim, arms):
    made = world("opposite", seed, dim, arms)
    biases = made.truth.biases
    assert ((biases >= -4) & (biases <= -1)).all()
    assert made.rewards.max() == 1.0
    noise = made.rewards * sigmoid(biases) ** 0.8
    assert noise.max() / noise.min() <= 1.3 / 0.7 + 1e-9


@given(seed=seeds, arms=sizes)
def test_revenues_of_uniform_and_rare_are_in_range(seed, arms):
    uniform, rare = world("uniform", seed, arms=arms), world("rare", seed, arms=arms)
    assert ((uniform.rewards >= 0.5) & (uniform.rewards <= 1)).all()
    assert ((rare.rewards >= 0.1) & (rare.rewards <= 1)).all()
    assert ((rare.truth.biases >= -5) & (rare.truth.biases <= -2)).all()


def test_biases_and_context_weights_have_the_stated_spread():
    many = world("uniform", dim=4_000, arms=4_000)
    assert np.std(many.truth.biases) == pytest.approx(1, rel=0.05)
    assert np.linalg.norm(many.truth.effects) == pytest.approx(1, rel=0.05)
    assert np.mean(world("opposite", arms=4_000).truth.biases) == pytest.approx(-2.5, abs=0.05)


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name != "digits"])
def test_the_same_seed_gives_the_same_world_and_another_seed_another(name):
    assert world(name, 3).truth == world(name, 3).truth
    assert world(name, 3).truth != world(name, 4).truth


def test_the_catalogue_names_the_arms_in_the_order_of_the_world():
    made = world("rare", 3, dim=4, arms=12)
    assert [arm.reward for arm in made.catalogue()] == made.rewards.tolist()
    assert [arm.arm for arm in made.catalogue()][:2] == ["ad-01", "ad-02"]


def test_the_four_streams_of_a_seed_are_independent_of_each_other():
    chance = Chance.of(1)
    first = [stream.random() for stream in (chance.environment, chance.contexts, chance.clicks, chance.policy)]
    assert len(set(first)) == 4
    again = Chance.of(1)
    again.policy.random(1000)
    assert again.contexts.random() == first[1]


def test_a_session_ends_at_its_first_click():
    made = world("uniform", arms=3)
    slates = np.array([[0, 1, 2], [0, 1, 2], [0, 1, NO_ARM]])
    moods = np.array([[0.99, 0.0, 0.0], [0.99, 0.99, 0.99], [0.99, 0.99, 0.0]])
    clicked, seen = made.answers(np.zeros((3, 5)), slates, moods)
    assert clicked.tolist() == [1, -1, -1]
    assert seen.tolist() == [2, 3, 2]


def test_an_unknown_or_empty_world_is_refused():
    with pytest.raises(InputError, match="unknown environment 'mars'"):
        world("mars")
    with pytest.raises(InputError, match="at least one arm"):
        world("rare", arms=0)


# ── tastes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["tastes", "leaving"])
def test_a_world_with_tastes_has_the_revenues_biases_and_shared_effects_of_opposite(name):
    made, base = world(name, 4), world("opposite", 4)
    assert made.rewards.tolist() == base.rewards.tolist()
    assert made.truth.biases.tolist() == base.truth.biases.tolist()
    assert made.truth.effects.tolist() == base.truth.effects.tolist()


def test_tastes_vary_by_one_in_the_log_odds_of_a_typical_user():
    made = world("tastes", dim=20, arms=500)
    assert np.linalg.norm(made.truth.own[:, 1:], axis=1).mean() == pytest.approx(1, rel=0.05)


def test_features_of_arms_explain_most_of_the_tastes():
    made = world("tastes", dim=4, arms=400, features=3)
    tastes = made.truth.own[:, 1:]
    assert np.var(tastes) * 4 == pytest.approx(1, rel=0.4)
    fitted = made.features @ np.linalg.lstsq(made.features, tastes, rcond=None)[0]
    assert 1 - np.var(tastes - fitted) / np.var(tastes) == pytest.approx(0.9, abs=0.05)
    unrelated = np.random.default_rng(1).standard_normal(made.features.shape)
    fitted = unrelated @ np.linalg.lstsq(unrelated, tastes, rcond=None)[0]
    assert 1 - np.var(tastes - fitted) / np.var(tastes) < 0.05


# ── users who leave ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_leaving_has_one_mute_ad_and_rates_from_three_tenths_on():
    stay = np.concatenate([world("leaving", seed, arms=40).stay for seed in range(10)])
    assert (stay == 0).sum() == 10
    assert stay[stay > 0].min() >= 0.3
    assert stay[stay > 0].mean() == pytest.approx(0.65, abs=0.03)


def test_stay_multiplies_the_rates_of_the_arms():
    assert world("opposite", stay=0.5).stay.tolist() == [0.5] * 10
    assert world("leaving", 3, stay=0.5).stay == pytest.approx(world("leaving", 3).stay / 2)


def test_of_the_users_who_do_not_click_a_share_goes_on_by_the_arm_and_clicks_are_always_answered():
    made = world("leaving", 3)
    count = 20_000
    contexts, slates = np.zeros((count, 5)), np.tile([0, 2, 1], (count, 1))
    clicked, answered = made.answers(contexts, slates, Chance.of(0).clicks.random((count, 3)))
    chances = sigmoid(made.truth.log_odds(contexts[:1]))[0]
    assert (clicked == 0).mean() == pytest.approx(chances[0], abs=0.02)
    unclicked = clicked != 0
    assert (answered[unclicked] >= 1).mean() == pytest.approx(made.stay[0], abs=0.02)
    passed = unclicked & (answered >= 1)
    assert (clicked[passed] == 1).mean() == pytest.approx(chances[2], abs=0.02)
    assert (answered[passed & (clicked != 1)] >= 2).mean() == pytest.approx(made.stay[2], abs=0.02)


# ── worlds for what the learner has to notice ────────────────────────────────────────────────────────────────────────


def test_a_category_explains_as_much_as_all_numbers_and_noise_nothing():
    made = world("categories", dim=4, arms=500, levels=30)
    own = made.truth.own[:, 1:]
    assert (own[:, :4] ** 2).sum(axis=1).mean() == pytest.approx(1, rel=0.1)
    assert np.var(own[:, 4:]) == pytest.approx(1, rel=0.05)
    assert made.declared.widths == [1, 1, 1, 1, 30]
    contexts = made.contexts(Chance.of(0).contexts, 50)
    assert contexts.shape == (50, 34)
    assert (contexts[:, 4:].sum(axis=1) == 1).all()
    noise = world("categories", dim=4, arms=5, levels=30, noise=True).truth
    assert not noise.own[:, 5:].any()
    assert not noise.effects[4:].any()
    assert world("categories", dim=0, levels=7).declared.dim == 7


@pytest.mark.parametrize("change", ["tastes", "ads", "nothing"])
def test_drift_changes_what_it_says_and_nothing_else(change):
    made = world("drift", 2, change=change)
    before, after = made.truth, made.later.truth
    same = (before.own == after.own).all(axis=1)
    assert same.tolist() == [change == "nothing"] * 3 + [change != "tastes"] * 7
    assert (before.effects.tolist() == after.effects.tolist()) is (change != "tastes")
    assert (before.biases.tolist() == after.biases.tolist()) is (change != "ads")
    assert made.later.rewards.tolist() == world("tastes", 2).rewards.tolist()


def test_products_add_the_stated_deviation_to_the_log_odds():
    made, plain = world("interactions", arms=200, interaction=2.0), world("tastes", arms=200)
    contexts = made.contexts(Chance.of(0).contexts, 500)
    added = made.log_odds(contexts) - plain.truth.log_odds(contexts)
    assert np.std(added) == pytest.approx(2, rel=0.1)
    slates = np.tile([3, 200, NO_ARM], (500, 1))
    odds = made.log_odds_of(contexts, slates)
    assert odds[:, 0] == pytest.approx(made.log_odds(contexts)[:, 3])
    assert (odds[:, 1:] == -np.inf).all()
    assert len(made.declared.crosses) == 10
    assert world("interactions", crosses="none").declared.crosses == ()
    none = world("interactions", 1, interaction=0.0)
    assert none.log_odds(contexts) == pytest.approx(world("tastes", 1).truth.log_odds(contexts))


def test_skewed_numbers_are_seen_through_an_exponential_and_matter_as_before():
    made, plain = world("skewed", 1), world("tastes", 1)
    seen, behind = (one.contexts(Chance.of(0).contexts, 50) for one in (made, plain))
    assert seen[:, :2] == pytest.approx(np.exp(2 * behind[:, :2]))
    assert made.log_odds(seen) == pytest.approx(plain.truth.log_odds(behind))


def test_newcomers_are_better_or_cost_the_same():
    made = world("newcomers", 3, arms=12, new_arms=2, better=4.0)
    chances = sigmoid(made.truth.biases)
    assert ((chances[:10] >= 0.001) & (chances[:10] <= 0.004)).all()
    assert chances[10:] == pytest.approx(4 * chances[:10].max())
    assert set(made.rewards) == {1.0}
    assert world("newcomers", 3, new_arms=2, prices="unequal").rewards.tolist() == world("tastes", 3).rewards.tolist()


@pytest.mark.parametrize(("name", "dim"), [("interactions", 1), ("skewed", 1), ("tastes", 0)])
def test_a_world_with_too_few_numbers_is_refused(name, dim):
    with pytest.raises(InputError, match="needs at least"):
        world(name, dim=dim)


def test_an_option_of_another_world_is_refused():
    with pytest.raises(InputError, match="the environment tastes has no levels; use categories"):
        world("tastes", levels=5)


# ── digits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def images():
    pytest.importorskip("sklearn")
    return world("digits", dim=64, arms=10)


def test_users_click_the_ad_of_their_class_and_seldom_another(images):
    contexts = images.contexts(Chance.of(0).contexts, 40)
    chances = sigmoid(images.log_odds(contexts))
    own = np.arange(10) == images.columns(contexts).argmax(axis=1)[:, None]
    assert (own.sum(axis=1) == 1).all()
    assert chances[own] == pytest.approx(0.9)
    assert chances[~own] == pytest.approx(0.05)
    slates = np.tile([3, 10, NO_ARM], (40, 1))
    odds = images.log_odds_of(contexts, slates)
    assert odds[:, 0].tolist() == images.log_odds(contexts)[:, 3].tolist()
    assert (odds[:, 1:] == -np.inf).all()


def test_images_are_standardised_and_constant_pixels_are_zero(images):
    pixels = images.population
    assert pixels.shape == (1797, 64)
    assert pixels.mean(axis=0) == pytest.approx(0, abs=1e-9)
    assert set(pixels.std(axis=0).round(9)) == {0.0, 1.0}


def test_a_context_that_is_no_image_is_refused(images):
    with pytest.raises(InputError, match="one of its images"):
        images.log_odds(np.full((1, 64), 0.5))
