import numpy as np
import pytest

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.errors import InputError
from worker.simulation.environments import ENVIRONMENTS, make_environment
from worker.simulation.world import Chance

#: Of seed 3, the mean revenue of a display of any arm, and the mean share of users that goes on without a click.
WORLDS = {
    "opposite": (0.0356032878792, 1),
    "uniform": (0.377396680332, 1),
    "rare": (0.0193552860898, 1),
    "tastes": (0.0449040456058, 1),
    "leaving": (0.0449040456058, 0.487208520382),
    "digits": (0.135, 1),
    "categories": (0.0747323313991, 1),
    "silent": (0.0449040456058, 0.5),
    "newcomers": (0.126426496917, 1),
    "drift": (0.0449040456058, 1),
    "interactions": (0.0499187593999, 1),
    "skewed": (0.0449040456058, 1),
}


def world(name, seed=0, dim=5, arms=10, **more):
    return make_environment(name, dim=dim, arms=arms, generator=Chance.of(seed).environment, **more)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_seed_has_the_same_world_in_every_release(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    made = world(name, 3, dim=64 if name == "digits" else 5)
    revenue = sigmoid(made.log_odds(made.contexts(Chance.of(3).contexts, 50))) * made.rewards
    assert (revenue.mean(), made.stay.mean()) == pytest.approx(WORLDS[name], rel=1e-9)
    assert name == "digits" or made.truth != world(name, 4).truth


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mars", {}, "unknown environment 'mars'"),
        ("rare", {"arms": 0}, "at least one arm"),
        ("rare", {"stay": 0}, "stay must be above 0"),
        ("tastes", {"dim": 0}, "needs at least one arm and one feature"),
        ("skewed", {"dim": 1}, "needs at least 2 context features"),
        ("interactions", {"dim": 1}, "needs at least 2 context features"),
        ("tastes", {"levels": 5}, "the environment tastes has no levels; use categories"),
        ("digits", {}, "the environment digits has 64 context features and 10 arms"),
    ],
)
def test_a_world_that_cannot_be_is_refused(name, changes, message):
    with pytest.raises(InputError, match=message):
        world(name, **changes)


# ── tastes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["tastes", "leaving"])
def test_a_world_with_tastes_has_the_revenues_biases_and_shared_effects_of_opposite(name):
    made, base = world(name, 4), world("opposite", 4)
    assert made.rewards.tolist() == base.rewards.tolist()
    assert made.truth.biases.tolist() == base.truth.biases.tolist()
    assert made.truth.effects.tolist() == base.truth.effects.tolist()


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
