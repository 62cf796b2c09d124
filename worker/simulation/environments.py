"""Simulated worlds: a true click model, the revenue of each arm, and users who follow the model.

Three worlds (docs/design.md §6), each with standard normal contexts and context effects ~ N(0, I)/√d:

- `opposite`: the dearer an ad, the less likely its click, so that order matters;
- `uniform`: revenues are independent of the probabilities;
- `rare`: clicks are rare and revenues differ by a factor of ten.

Randomness comes in four independent streams of one seed. The environment, the contexts and the users' moods are
therefore the same for every policy compared on that seed, whatever randomness the policy itself uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints, check_rewards, sigmoid
from worker.bandit.click_model import ClickModel
from worker.errors import InputError
from worker.stream.settings import Arm

Bools = NDArray[np.bool_]

ENVIRONMENTS = ("opposite", "uniform", "rare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The four random streams of one seed."""

    environment: np.random.Generator
    contexts: np.random.Generator
    clicks: np.random.Generator
    policy: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        """Return the streams of `seed`, from their beginning."""
        streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)]
        return cls(environment=streams[0], contexts=streams[1], clicks=streams[2], policy=streams[3])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Environment:
    """A true click model and the revenue e_k of each arm, (K,)."""

    truth: ClickModel
    rewards: Floats

    def contexts(self, generator: np.random.Generator, users: int) -> Floats:
        """Draw the contexts of `users` sessions: (n, d)."""
        return generator.standard_normal((users, self.truth.dim))

    def answers(self, contexts: Floats, slates: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
        """Return `first_clicks` of users with moods `uniforms` (n, H) in [0, 1) on slates (n, H)."""
        chances = sigmoid(self.truth.log_odds_of(contexts, slates))
        return first_clicks(uniforms < chances, slates != NO_ARM)

    def catalogue(self) -> list[Arm]:
        """Return the arms under the names of all simulations, such as ad-01."""
        digits = len(str(len(self.rewards)))
        return [Arm(arm=f"ad-{k:0{digits}}", reward=reward) for k, reward in enumerate(self.rewards.tolist(), start=1)]


def first_clicks(clicks: Bools, shown: Bools) -> tuple[Ints, Ints]:
    """Return the position of the first click of each session, from 0, or −1, and the number of positions seen.

    A session ends with its first click. `clicks` and `shown` are (n, H): whether the user would click a position, and
    whether it is shown.

    >>> first_clicks(np.array([[False, True, True]]), np.array([[True, True, True]]))
    (array([1]), array([2]))
    """
    clicks = clicks & shown
    any_click, first = clicks.any(axis=1), clicks.argmax(axis=1)
    return np.where(any_click, first, -1), np.where(any_click, first + 1, shown.sum(axis=1))


def seeded_environment(name: str, *, dim: int, arms: int, seed: int) -> Environment:
    """Draw the world called `name` from the environment stream of a seed."""
    return make_environment(name, dim=dim, arms=arms, generator=Chance.of(seed).environment)


def make_environment(name: str, *, dim: int, arms: int, generator: np.random.Generator) -> Environment:
    """Draw the world called `name`.

    >>> world = make_environment("opposite", dim=3, arms=5, generator=np.random.default_rng(1))
    >>> float(world.rewards.max())
    1.0
    """
    if arms < 1 or dim < 1:
        raise InputError(f"an environment needs at least one arm and one feature, not {arms} and {dim}")
    effects = generator.standard_normal(dim) / np.sqrt(dim)
    match name:
        case "opposite":
            biases = generator.uniform(-4, -1, arms)
            rewards = (1 / sigmoid(biases)) ** 0.8 * generator.uniform(0.7, 1.3, arms)
            rewards /= rewards.max()
        case "uniform":
            biases = generator.standard_normal(arms)
            rewards = generator.uniform(0.5, 1, arms)
        case "rare":
            biases = generator.uniform(-5, -2, arms)
            rewards = generator.uniform(0.1, 1, arms)
        case _:
            raise InputError(f"unknown environment {name!r}; one of {', '.join(ENVIRONMENTS)}")
    truth = AdditiveModel.certain(effects, biases)
    return Environment(truth=truth, rewards=check_rewards(rewards))
