"""Simulated worlds: a true click model, revenues, and users who follow it.

Three worlds (design.md §6), each with θ_x ~ N(0, I)/√d and contexts N(0, I):

- `opposite`: the dearer an ad, the less likely its click, so that order matters;
- `uniform`: revenues that have nothing to do with the probabilities;
- `rare`: clicks are rare and revenues differ by a factor of ten.

Chance comes in four independent streams of one seed. The environment, the contexts and the users' moods are therefore
the same for every policy compared on that seed, however much chance the policy itself uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.bandit.model import Posterior, check_rewards, sigmoid
from worker.bandit.planning import NO_ARM
from worker.bandit.precision import Floats, Ints, Precision
from worker.errors import InputError

ENVIRONMENTS = ("opposite", "uniform", "rare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The four streams of one seed; used up as the experiment goes."""

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
    """A true click model (as a belief that is not in doubt) and the revenue e_k of each arm, (K,)."""

    truth: Posterior
    rewards: Floats

    def contexts(self, generator: np.random.Generator, users: int) -> Floats:
        """Draw the contexts of `users` sessions: (n, d)."""
        return generator.standard_normal((users, self.truth.dim))

    def answers(self, contexts: Floats, slates: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
        """Let users look at slates (n, H), each with moods uniforms (n, H) in [0, 1).

        Returns
        -------
        clicked : (n,), the position clicked, counted from 0, or −1
        seen : (n,), how many positions were seen: up to the click, else the whole slate
        """
        chances = sigmoid((contexts @ self.truth.theta_context)[:, None] + self.truth.theta_arms[slates])
        clicks = (uniforms < chances) & (slates != NO_ARM)
        any_click = clicks.any(axis=1)
        first = clicks.argmax(axis=1)
        return np.where(any_click, first, -1), np.where(any_click, first + 1, (slates != NO_ARM).sum(axis=1))


def make_environment(name: str, *, dim: int, arms: int, generator: np.random.Generator) -> Environment:
    """Draw the world called `name`.

    Examples
    --------
    >>> world = make_environment("opposite", dim=3, arms=5, generator=np.random.default_rng(1))
    >>> float(world.rewards.max())
    1.0
    """
    if arms < 1 or dim < 1:
        raise InputError(f"an environment needs at least one arm and one feature, not {arms} and {dim}")
    theta_context = generator.standard_normal(dim) / np.sqrt(dim)
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
    truth = Posterior(
        theta_context=theta_context,
        theta_arms=biases,
        precision=Precision.prior(dim=dim, arms=arms, ridge=1.0),
    )
    return Environment(truth=truth, rewards=check_rewards(rewards))
