import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.errors import InputError
from worker.simulation.environments import ENVIRONMENTS, Chance, seeded_environment

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 20)


def world(name, seed=0, dim=5, arms=10):
    return seeded_environment(name, dim=dim, arms=arms, seed=seed)


@given(seed=seeds, dim=sizes, arms=sizes)
def test_opposite_has_dear_unlikely_ads(seed, dim, arms):
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


@pytest.mark.parametrize("name", ENVIRONMENTS)
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
    moods = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    clicked, seen = made.answers(np.zeros((3, 5)), slates, moods)
    assert clicked.tolist() == [1, -1, -1]
    assert seen.tolist() == [2, 3, 2]


def test_the_click_rate_is_that_of_the_model():
    made = world("opposite", dim=2, arms=2)
    contexts = np.tile([0.3, -0.7], (40_000, 1))
    clicked, _ = made.answers(contexts, np.ones((40_000, 1), dtype=np.intp), Chance.of(0).clicks.random((40_000, 1)))
    assert (clicked == 0).mean() == pytest.approx(sigmoid(made.truth.log_odds(contexts[:1]))[0, 1], rel=0.1)


def test_an_unknown_or_empty_world_is_refused():
    with pytest.raises(InputError, match="unknown environment 'mars'"):
        world("mars")
    with pytest.raises(InputError, match="at least one arm"):
        world("rare", arms=0)
