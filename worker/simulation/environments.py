"""Simulated worlds: a true click model, the revenue of each arm, and users who follow the model.

An environment is a function that draws a world from a generator, for `dim` context features and `arms` arms. Its
further parameters are options of that environment alone. Whoever adds an environment adds a function here, and an
option of `adcascade simulate` for each new parameter.

Randomness comes in independent streams of one seed. The environment, the contexts and the users' moods are therefore
the same for every policy compared on that seed, for any randomness of the policy itself. The numbers of a world that
builds on another are drawn after the other's, so that the common part is the same for a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints, check_rewards, sigmoid
from worker.bandit.click_model import Truth
from worker.bandit.personal import PersonalModel
from worker.errors import FailedError, InputError
from worker.stream.contexts import Standardisation
from worker.stream.settings import Arm

Bools = NDArray[np.bool_]

#: Environments in which every user prefers the same arms.
WITHOUT_TASTES = ("opposite", "uniform", "rare")

OWN, OTHER = 0.9, 0.05  # digits: click probability on the ad of the own class, and on any other
EXPLAINED = 0.9  # share of the variance of tastes that features of arms explain, where there are features


class Chance(NamedTuple):
    """The random streams of one seed."""

    environment: np.random.Generator
    contexts: np.random.Generator
    clicks: np.random.Generator
    policy: np.random.Generator
    journal: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        """Return the streams of `seed`, from their beginning."""
        return cls(*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(cls._fields))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Environment:
    """A true click model, the revenue e_k of each arm, (K,), and how users come and go.

    stay : (K,), probability that a display of each arm is answered
    features : (K, M), features of each arm that explain most of its tastes; None if there are none
    population : (rows, d), the contexts that there are; None for standard normal ones
    """

    truth: Truth
    rewards: Floats
    stay: Floats
    features: Floats | None = None
    population: Floats | None = None

    def contexts(self, generator: np.random.Generator, users: int) -> Floats:
        """Draw the contexts of `users` sessions: (n, d)."""
        if self.population is not None:
            return np.asarray(self.population[generator.integers(len(self.population), size=users)])
        return generator.standard_normal((users, self.truth.dim))

    def answer_rates(self, slates: Ints) -> Floats:
        """Return the probability that each display of slates is answered, 1 without a known arm: (n, H) → (n, H)."""
        return np.asarray(np.append(self.stay, 1.0)[np.minimum(slates, len(self.stay))])

    def answers(self, contexts: Floats, slates: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
        """Return `first_clicks` of users with moods `uniforms` (n, H) in [0, 1) on slates (n, H).

        A mood below ρ f is a click, below ρ a pass; otherwise the user leaves without an answer.
        """
        chances, rates = sigmoid(self.truth.log_odds_of(contexts, slates)), self.answer_rates(slates)
        stays = np.logical_and.accumulate((slates != NO_ARM) & (uniforms < rates), axis=1)
        return first_clicks(uniforms < rates * chances, stays)

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
        return np.column_stack([self.features, Standardisation.estimate(revenue[:first]).apply(revenue)])

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


def true_heads(truth: Truth) -> Floats:
    """Return the coefficients of [1; x] in the true log-odds of each arm, which are linear in x: (K, d+1)."""
    corners = np.vstack([np.zeros(truth.dim), np.eye(truth.dim)])
    log_odds = truth.log_odds(corners).T
    log_odds[:, 1:] -= log_odds[:, :1]
    return log_odds


# ── the environments ─────────────────────────────────────────────────────────────────────────────────────────────────


def opposite(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Draw a world in which an ad that pays more is less likely to be clicked, so that order matters."""
    effects = _effects(generator, dim)
    biases = generator.uniform(-4, -1, arms)
    rewards = (1 / sigmoid(biases)) ** 0.8 * generator.uniform(0.7, 1.3, arms)
    return _additive(effects, biases, rewards / rewards.max())


def uniform(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Draw a world in which revenues are independent of the click probabilities."""
    effects = _effects(generator, dim)
    return _additive(effects, generator.standard_normal(arms), generator.uniform(0.5, 1, arms))


def rare(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Draw a world in which clicks are rare and revenues differ by a factor of ten."""
    effects = _effects(generator, dim)
    return _additive(effects, generator.uniform(-5, -2, arms), generator.uniform(0.1, 1, arms))


def tastes(generator: np.random.Generator, *, dim: int, arms: int, features: int = 0) -> Environment:
    """Draw a world as `opposite` in which each ad has context effects δ_k ~ N(0, I)/√d too: users differ in taste.

    With `features` above 0, each arm has as many, and they explain most of the tastes.
    """
    base = opposite(generator, dim=dim, arms=arms)
    own = np.column_stack([base.truth.biases, generator.standard_normal((arms, dim)) / np.sqrt(dim)])
    shared = np.concatenate([[0.0], base.truth.effects])[:, None]
    world = replace(base, truth=replace(PersonalModel.certain(own), shared=shared))
    return _explained(world, generator, features)


def leaving(generator: np.random.Generator, *, dim: int, arms: int, features: int = 0) -> Environment:
    """Draw a world as `tastes` where displays of ad k are answered with probability ρ_k ~ U(0.3, 1), of one never."""
    world = tastes(generator, dim=dim, arms=arms)
    stay = generator.uniform(0.3, 1, arms)
    stay[generator.integers(arms)] = 0.0
    return _explained(replace(world, stay=stay), generator, features)


def digits(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Return a world with contexts that nobody here made: scikit-learn's images of digits.

    Each of the ten classes is an ad, all of the same revenue. A user has an image as context, and clicks the ad of its
    class with probability 0.9 and any other with 0.05. 64 pixels say which class it is, and no pixel says it alone.
    """
    truth = load_digits()
    return Environment(truth=truth, rewards=np.ones(arms), stay=np.ones(arms), population=truth.images)


ENVIRONMENTS: Final[dict[str, Callable[..., Environment]]] = {
    draw.__name__: draw for draw in (opposite, uniform, rare, tastes, leaving, digits)
}


def make_environment(
    name: str, *, dim: int, arms: int, generator: np.random.Generator, stay: float = 1.0, **options: int
) -> Environment:
    """Draw the world of an environment; `options` are those of the environment.

    Every display is answered with probability `stay`, times the rate of the arm where arms have one.

    >>> world = make_environment("opposite", dim=3, arms=5, generator=np.random.default_rng(1))
    >>> float(world.rewards.max())
    1.0
    """
    check_world(name, dim=dim, arms=arms, stay=stay, **options)
    chosen = {option: value for option, value in options.items() if value}
    world = ENVIRONMENTS[name](generator, dim=dim, arms=arms, **chosen)
    return replace(world, stay=stay * world.stay)


def check_world(name: str, *, dim: int, arms: int, stay: float = 1.0, **options: int) -> None:
    """Raise `InputError` if there is no such world; an option that is 0 is not given."""
    if name not in ENVIRONMENTS:
        raise InputError(f"unknown environment {name!r}; one of {', '.join(ENVIRONMENTS)}")
    if arms < 1 or dim < 1:
        raise InputError(f"an environment needs at least one arm and one feature, not {arms} and {dim}")
    if not 0 < stay <= 1:
        raise InputError(f"stay must be above 0 and at most 1, not {stay:g}")
    if name == "digits" and (dim, arms) != (DigitsTruth.PIXELS, DigitsTruth.CLASSES):
        size = f"{DigitsTruth.PIXELS} context features and {DigitsTruth.CLASSES} arms"
        raise InputError(f"the environment digits has {size}, not {dim} and {arms}")
    takes = {other: signature(draw).parameters for other, draw in ENVIRONMENTS.items()}
    for option, value in options.items():
        if value and option not in takes[name]:
            others = " or ".join(other for other in takes if option in takes[other])
            raise InputError(f"the environment {name} has no {option}; use {others}")


def _effects(generator: np.random.Generator, dim: int) -> Floats:
    """Draw the effects of contexts that all arms share."""
    return np.asarray(generator.standard_normal(dim) / np.sqrt(dim))


def _additive(effects: Floats, biases: Floats, rewards: Floats) -> Environment:
    """Return a world whose contexts have the same effects on all arms."""
    truth = AdditiveModel.certain(effects, biases)
    return Environment(truth=truth, rewards=check_rewards(rewards), stay=np.ones(len(rewards)))


def _explained(world: Environment, generator: np.random.Generator, features: int) -> Environment:
    """Return the world with as many features of arms, which explain most of their tastes."""
    if not features:
        return world
    truth = world.truth
    assert isinstance(truth, PersonalModel)
    described = generator.standard_normal((truth.arms, features))
    directions = generator.standard_normal((features, truth.dim)) / np.sqrt(truth.dim * features)
    explained = np.sqrt(EXPLAINED) * described @ directions + np.sqrt(1 - EXPLAINED) * truth.own[:, 1:]
    own = np.column_stack([truth.own[:, 0], explained])
    return replace(world, truth=replace(truth, own=own), features=described)


# ── digits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DigitsTruth:
    """The true click model: images (rows, 64), standardised, and the class of each, (rows,).

    A context is one of the images, to the bit.
    """

    PIXELS: ClassVar[int] = 64
    CLASSES: ClassVar[int] = 10

    images: Floats
    classes: Ints
    rows: dict[bytes, int]

    @property
    def dim(self) -> int:
        """The number of pixels."""
        return self.PIXELS

    @property
    def arms(self) -> int:
        """The number of classes."""
        return self.CLASSES

    @property
    def biases(self) -> Floats:
        """The log-odds of the mean click probability of each arm, (K,)."""
        shares = np.bincount(self.classes, minlength=self.CLASSES) / len(self.classes)
        chances = OTHER + shares * (OWN - OTHER)
        return np.asarray(np.log(chances / (1 - chances)))

    @property
    def effects(self) -> Floats:
        """Zeros, (d,): no pixel makes users click more on all arms."""
        return np.zeros(self.PIXELS)

    def log_odds(self, contexts: Floats) -> Floats:
        """Return the log-odds of a click: (n, d) → (n, K)."""
        own = self.classes_of(contexts)[:, None] == np.arange(self.CLASSES)
        return np.asarray(np.where(own, math.log(OWN / (1 - OWN)), math.log(OTHER / (1 - OTHER))))

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the log-odds of chosen arms, −inf for NO_ARM and for K: (n, d), (n, h) → (n, h)."""
        odds = np.column_stack([self.log_odds(contexts), np.full(len(contexts), -np.inf)])
        return np.asarray(np.take_along_axis(odds, np.where(arms == NO_ARM, self.CLASSES, arms), axis=1))

    def classes_of(self, contexts: Floats) -> Ints:
        """Return the class of each image, (n, d) → (n,)."""
        rows = [self.rows.get(np.ascontiguousarray(context).tobytes(), -1) for context in contexts]
        if -1 in rows:
            raise InputError("a context of the environment digits must be one of its images")
        return np.asarray(self.classes[rows])


@cache
def load_digits() -> DigitsTruth:
    """Return the truth of the images of scikit-learn, which come with the package."""
    try:
        from sklearn import datasets
    except ImportError:
        raise FailedError("the environment digits needs scikit-learn: pip install scikit-learn") from None
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.float64)
    deviations = images.std(axis=0)
    # A pixel that is the same in all images stays 0. Adding 0 turns −0.0 into 0.0.
    images = (images - images.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0) + 0.0
    rows = {image.tobytes(): row for row, image in enumerate(images)}
    return DigitsTruth(images=images, classes=np.asarray(classes, dtype=np.intp), rows=rows)
