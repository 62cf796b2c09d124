"""A simulated world: its true click model, the revenue of each arm, and users who follow the model.

Randomness comes in independent streams of one seed. The environment, the contexts and the users' moods are therefore
the same for every policy compared on that seed, for any randomness of the policy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel
from worker.stream.contexts import Standardisation
from worker.stream.features import Features
from worker.stream.settings import Arm

Bools = NDArray[np.bool_]


class Chance(NamedTuple):
    """The random streams of one seed."""

    environment: np.random.Generator
    contexts: np.random.Generator
    clicks: np.random.Generator
    policy: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        """Return the streams of `seed`, from their beginning."""
        return cls(*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(cls._fields))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Environment:
    """A true click model, the revenue e_k of each arm, (K,), and how users come and go; contexts have `dim` features.

    columns : what the truth is linear in, from contexts: (n, d) → (n, columns); None for the contexts themselves
    average : (K,), log-odds of the mean click probability of each arm; None for those at x = 0
    stay : (K,), of the users who do not click a display of each arm, the share that goes on
    features : (K, M), features of each arm that explain most of its tastes; None if there are none
    population : (rows, d), the contexts that there are; None for standard normal ones
    levels : the last features of a context that are a category of as many values, each as likely
    skewed : the first features of a context that are exp(2z), z standard normal
    declared : the features of contexts that the learner knows of; None for a plain vector
    interacting : the pairs of these features that matter together
    later : the world in the second half of a run; None if it does not change
    """

    truth: ClickModel
    dim: int
    rewards: Floats
    stay: Floats
    columns: Callable[[Floats], Floats] | None = None
    average: Floats | None = None
    features: Floats | None = None
    population: Floats | None = None
    levels: int = 0
    skewed: int = 0
    declared: Features | None = None
    interacting: tuple[tuple[str, str], ...] = ()
    later: Environment | None = None

    def contexts(self, generator: np.random.Generator, users: int) -> Floats:
        """Draw the contexts of `users` sessions: (n, d)."""
        if self.population is not None:
            return np.asarray(self.population[generator.integers(len(self.population), size=users)])
        numbers = generator.standard_normal((users, self.dim - self.levels))
        numbers[:, : self.skewed] = np.exp(2 * numbers[:, : self.skewed])
        if not self.levels:
            return numbers
        return np.hstack([numbers, np.eye(self.levels)[generator.integers(self.levels, size=users)]])

    def log_odds(self, contexts: Floats) -> Floats:
        """Return the true log-odds of a click: (n, d) → (n, K)."""
        return self.truth.log_odds(self._columns_of(contexts))

    def log_odds_of(self, contexts: Floats, slates: Ints) -> Floats:
        """Return the same of the arms of slates, −inf for NO_ARM and for K: (n, d), (n, H) → (n, H)."""
        return self.truth.log_odds_of(self._columns_of(contexts), slates)

    def _columns_of(self, contexts: Floats) -> Floats:
        return contexts if self.columns is None else self.columns(contexts)

    @property
    def biases(self) -> Floats:
        """The log-odds of each arm for the average user, (K,)."""
        return self.truth.biases if self.average is None else self.average

    def staying(self, slates: Ints) -> Floats:
        """Return the share that goes on after each display of slates, 1 without a known arm: (n, H) → (n, H)."""
        return np.asarray(np.append(self.stay, 1.0)[np.minimum(slates, len(self.stay))])

    def answers(self, contexts: Floats, slates: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
        """Return `first_clicks` of users with moods `uniforms` (n, H) in [0, 1) on slates (n, H).

        A mood below f is a click, below f + (1 − f) s a pass; otherwise the user leaves without an answer.
        """
        chances = sigmoid(self.log_odds_of(contexts, slates))
        answering = uniforms < chances + (1 - chances) * self.staying(slates)
        stays = np.logical_and.accumulate((slates != NO_ARM) & answering, axis=1)
        return first_clicks(uniforms < chances, stays)

    def first_arms(self, count: int) -> Environment:
        """Return the same world while only the first arms may be shown; the truth still has the others."""
        features = None if self.features is None else self.features[:count]
        return replace(self, rewards=self.rewards[:count], stay=self.stay[:count], features=features)

    def known_of_arms(self, first: int) -> Floats | None:
        """Return what is known of each arm beforehand, (K, M+1): its features and its revenue; None without features.

        As where the revenue is declared as a feature, it is its logarithm on the scale of the `first` arms.
        """
        if self.features is None:
            return None
        revenue = np.log(self.rewards)[:, None]
        scale = Standardisation.estimate(revenue[:first], straighten=False)
        return np.column_stack([self.features, scale.apply(revenue)])

    def catalogue(self) -> list[Arm]:
        """Return the arms under the names of all simulations, such as ad-01."""
        digits = len(str(len(self.rewards)))
        return [Arm(arm=f"ad-{k:0{digits}}", reward=reward) for k, reward in enumerate(self.rewards.tolist(), start=1)]


def first_clicks(clicks: Bools, shown: Bools) -> tuple[Ints, Ints]:
    """Return the position of the first click of each session, from 0, or −1, and the number of positions answered.

    A session ends with its first click. `clicks` and `shown` are (n, H): whether the user would click a position, and
    whether it is shown and answered; no position is after one that is not.

    >>> first_clicks(np.array([[False, True, True]]), np.array([[True, True, True]]))
    (array([1]), array([2]))
    """
    clicks = clicks & shown
    any_click, first = clicks.any(axis=1), clicks.argmax(axis=1)
    return np.where(any_click, first, -1), np.where(any_click, first + 1, shown.sum(axis=1))


def true_heads(truth: ClickModel) -> Floats:
    """Return the coefficients of [1; x] in the true log-odds of each arm, which are linear in x: (K, d+1)."""
    corners = np.vstack([np.zeros(truth.dim), np.eye(truth.dim)])
    log_odds = truth.log_odds(corners).T
    log_odds[:, 1:] -= log_odds[:, :1]
    return log_odds
