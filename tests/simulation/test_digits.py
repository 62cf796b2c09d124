import numpy as np
import pytest

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.errors import InputError
from worker.simulation.environments import Chance, seeded_environment
from worker.simulation.experiment import ExperimentSettings, ExperimentTask, run_task


@pytest.fixture
def world():
    pytest.importorskip("sklearn")
    return seeded_environment("digits", dim=64, arms=10, seed=0)


def test_users_click_the_ad_of_their_class_and_seldom_another(world):
    contexts = world.contexts(Chance.of(0).contexts, 40)
    chances = sigmoid(world.truth.log_odds(contexts))
    own = np.arange(10) == world.truth.classes_of(contexts)[:, None]
    assert (own.sum(axis=1) == 1).all()
    assert chances[own] == pytest.approx(0.9)
    assert chances[~own] == pytest.approx(0.05)
    slates = np.tile([3, 10, NO_ARM], (40, 1))
    odds = world.truth.log_odds_of(contexts, slates)
    assert odds[:, 0].tolist() == world.truth.log_odds(contexts)[:, 3].tolist()
    assert (odds[:, 1:] == -np.inf).all()


def test_images_are_standardised_and_constant_pixels_are_zero(world):
    images = world.population
    assert images.shape == (1797, 64)
    assert images.mean(axis=0) == pytest.approx(0, abs=1e-9)
    assert set(images.std(axis=0).round(9)) == {0.0, 1.0}


def test_a_context_that_is_no_image_is_refused(world):
    with pytest.raises(InputError, match="one of its images"):
        world.truth.log_odds(np.full((1, 64), 0.5))


def test_the_personal_model_learns_to_read_digits_and_the_additive_one_does_not(world):
    def lost(model):
        settings = ExperimentSettings(environment="digits", dim=64, horizon=3, episodes=25, model=model)
        return run_task(settings, ExperimentTask(policy="ucbbp", users=50, seed=1000)).lost(16)

    assert lost("personal") < 0.3
    assert lost("additive") > 0.4
