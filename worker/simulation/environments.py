"""Simulated worlds: a true click model, the revenue of each arm, and users who follow the model.

Worlds with standard normal contexts and context effects ~ N(0, I)/√d that all arms share:

- `opposite`: the more an ad pays, the less likely its click, so that order matters;
- `uniform`: revenues are independent of the probabilities;
- `rare`: clicks are rare and revenues differ by a factor of ten;
- `tastes`: as `opposite`, and each ad has context effects δ_k ~ N(0, I)/√d as well: users differ in what they like;
- `leaving`: as `tastes`, and users leave: a display of ad k is answered with probability ρ_k ~ U(0.3, 1), and of one ad
  never.

`digits` has contexts that nobody here made: scikit-learn's images of digits. Each of the ten classes is an ad, all of
the same revenue. A user has an image as context, and clicks the ad of its class with probability 0.9 and any other with
0.05. 64 pixels say which class it is, and no pixel says it alone.

Randomness comes in four independent streams of one seed. The environment, the contexts and the users' moods are
therefore the same for every policy compared on that seed, for any randomness of the policy itself. The numbers of a
world that builds on another are drawn after the other's, so that the common part is the same for a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import NO_ARM, Floats, Ints, check_rewards, sigmoid
from worker.bandit.click_model import Truth
from worker.bandit.personal import PersonalModel
from worker.errors import FailedError, InputError
from worker.stream.contexts import Standardisation
from worker.stream.settings import Arm

Bools = NDArray[np.bool_]

#: Worlds in which every user prefers the same arms.
WITHOUT_TASTES = ("opposite", "uniform", "rare")
#: Worlds whose tastes features of arms may explain.
WITH_TASTES = ("tastes", "leaving")
ENVIRONMENTS = (*WITHOUT_TASTES, *WITH_TASTES, "digits")

OWN, OTHER = 0.9, 0.05  # digits: click probability on the ad of the own class, and on any other
EXPLAINED = 0.9  # share of the variance of tastes that features of arms explain, where there are features


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The random streams of one seed."""

    environment: np.random.Generator
    contexts: np.random.Generator
    clicks: np.random.Generator
    policy: np.random.Generator
    journal: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        """Return the streams of `seed`, from their beginning."""
        streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)]
        environment, contexts, clicks, policy, journal = streams
        return cls(environment=environment, contexts=contexts, clicks=clicks, policy=policy, journal=journal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Environment:
    """A true click model, the revenue e_k of each arm, (K,), and how users come and go.

    stay : (K,), probability that a display of each arm is answered; None if every display is
    features : (K, M), features of each arm that explain most of its tastes; None if there are none
    population : (rows, d), the contexts that there are; None for standard normal ones
    """

    truth: Truth
    rewards: Floats
    stay: Floats | None = None
    features: Floats | None = None
    population: Floats | None = None

    def contexts(self, generator: np.random.Generator, users: int) -> Floats:
        """Draw the contexts of `users` sessions: (n, d)."""
        if self.population is not None:
            return np.asarray(self.population[generator.integers(len(self.population), size=users)])
        return generator.standard_normal((users, self.truth.dim))

    def answer_rates(self, horizon: int) -> AnswerRates | None:
        """Return the true answer rates; None if every display is answered."""
        return None if self.stay is None else AnswerRates(arms=self.stay, positions=np.ones(horizon))

    def answers(self, contexts: Floats, slates: Ints, uniforms: Floats) -> tuple[Ints, Ints]:
        """Return `first_clicks` of users with moods `uniforms` (n, H) in [0, 1) on slates (n, H).

        A mood below ρ f is a click, below ρ a pass; otherwise the user leaves without an answer.
        """
        chances = sigmoid(self.truth.log_odds_of(contexts, slates))
        shown = slates != NO_ARM
        rates = self.answer_rates(slates.shape[1])
        if rates is None:
            return first_clicks(uniforms < chances, shown)
        answering = rates.of_slates(slates)
        stays = np.logical_and.accumulate(shown & (uniforms < answering), axis=1)
        return first_clicks(uniforms < answering * chances, stays)

    def first_arms(self, count: int) -> Environment:
        """Return the same world while only the first arms may be shown; the truth still has the others."""
        stay = None if self.stay is None else self.stay[:count]
        features = None if self.features is None else self.features[:count]
        return replace(self, rewards=self.rewards[:count], stay=stay, features=features)

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


def seeded_environment(
    name: str, *, dim: int, arms: int, seed: int, features: int = 0, stay: float = 1.0
) -> Environment:
    """Draw the world called `name` from the environment stream of a seed."""
    generator = Chance.of(seed).environment
    return make_environment(name, dim=dim, arms=arms, generator=generator, features=features, stay=stay)


def make_environment(
    name: str, *, dim: int, arms: int, generator: np.random.Generator, features: int = 0, stay: float = 1.0
) -> Environment:
    """Draw the world called `name`.

    With `features` above 0, each arm has as many, and they explain most of the tastes. Every display is answered with
    probability `stay`, times the rate of the arm where arms have one.

    >>> world = make_environment("opposite", dim=3, arms=5, generator=np.random.default_rng(1))
    >>> float(world.rewards.max())
    1.0
    """
    check_world(name, dim=dim, arms=arms, features=features, stay=stay)
    if name == "digits":
        truth = DigitsTruth.load()
        world = Environment(truth=truth, rewards=np.ones(truth.arms), population=truth.images)
    elif name in WITH_TASTES:
        world = _with_tastes(name, dim=dim, arms=arms, generator=generator, features=features)
    else:
        effects, biases, rewards = _common(name, dim=dim, arms=arms, generator=generator)
        world = Environment(truth=AdditiveModel.certain(effects, biases), rewards=check_rewards(rewards))
    if stay == 1:
        return world
    rates = np.ones(arms) if world.stay is None else world.stay
    return replace(world, stay=stay * rates)


def check_world(name: str, *, dim: int, arms: int, features: int = 0, stay: float = 1.0) -> None:
    """Raise `InputError` if there is no such world."""
    if name not in ENVIRONMENTS:
        raise InputError(f"unknown environment {name!r}; one of {', '.join(ENVIRONMENTS)}")
    if arms < 1 or dim < 1:
        raise InputError(f"an environment needs at least one arm and one feature, not {arms} and {dim}")
    if not 0 < stay <= 1:
        raise InputError(f"stay must be above 0 and at most 1, not {stay:g}")
    if name == "digits" and (dim, arms) != (DigitsTruth.PIXELS, DigitsTruth.CLASSES):
        size = f"{DigitsTruth.PIXELS} context features and {DigitsTruth.CLASSES} arms"
        raise InputError(f"the environment digits has {size}, not {dim} and {arms}")
    if features and name not in WITH_TASTES:
        raise InputError(f"features of arms explain tastes, and {name} has none; use {' or '.join(WITH_TASTES)}")


def _common(name: str, *, dim: int, arms: int, generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Draw the effects of contexts that arms share, the biases of arms and their revenues."""
    effects = generator.standard_normal(dim) / np.sqrt(dim)
    match name:
        case "uniform":
            biases = generator.standard_normal(arms)
            rewards = generator.uniform(0.5, 1, arms)
        case "rare":
            biases = generator.uniform(-5, -2, arms)
            rewards = generator.uniform(0.1, 1, arms)
        case _:
            biases = generator.uniform(-4, -1, arms)
            rewards = (1 / sigmoid(biases)) ** 0.8 * generator.uniform(0.7, 1.3, arms)
            rewards /= rewards.max()
    return effects, biases, rewards


def _with_tastes(name: str, *, dim: int, arms: int, generator: np.random.Generator, features: int) -> Environment:
    effects, biases, rewards = _common("opposite", dim=dim, arms=arms, generator=generator)
    tastes = generator.standard_normal((arms, dim)) / np.sqrt(dim)
    stay = None
    if name == "leaving":
        stay = generator.uniform(0.3, 1, arms)
        stay[generator.integers(arms)] = 0.0
    described = None
    if features:
        described = generator.standard_normal((arms, features))
        directions = generator.standard_normal((features, dim)) / np.sqrt(dim * features)
        tastes = np.sqrt(EXPLAINED) * described @ directions + np.sqrt(1 - EXPLAINED) * tastes
    heads = PersonalModel.certain(np.column_stack([biases, tastes]))
    truth = replace(heads, shared=np.concatenate([[0.0], effects])[:, None])
    return Environment(truth=truth, rewards=check_rewards(rewards), stay=stay, features=described)


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

    @classmethod
    def load(cls) -> DigitsTruth:
        """Return the data of scikit-learn; they come with the package."""
        return _loaded()

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
        return _log_odds(self.classes_of(contexts)[:, None] == np.arange(self.CLASSES))

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the log-odds of chosen arms, −inf for NO_ARM and for K: (n, d), (n, h) → (n, h)."""
        odds = _log_odds(self.classes_of(contexts)[:, None] == arms)
        return np.where((arms >= 0) & (arms < self.CLASSES), odds, -np.inf)

    def classes_of(self, contexts: Floats) -> Ints:
        """Return the class of each image, (n, d) → (n,)."""
        rows = [self.rows.get(np.ascontiguousarray(context).tobytes(), -1) for context in contexts]
        if -1 in rows:
            raise InputError("a context of the environment digits must be one of its images")
        return np.asarray(self.classes[rows])


def _log_odds(own: NDArray[np.bool_]) -> Floats:
    return np.asarray(np.where(own, math.log(OWN / (1 - OWN)), math.log(OTHER / (1 - OTHER))), dtype=np.float64)


@cache
def _loaded() -> DigitsTruth:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FailedError("the environment digits needs scikit-learn: pip install scikit-learn") from None
    pixels, classes = load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.float64)
    deviations = images.std(axis=0)
    # A pixel that is the same in all images stays 0. Adding 0 turns −0.0 into 0.0.
    images = (images - images.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0) + 0.0
    rows = {image.tobytes(): row for row, image in enumerate(images)}
    return DigitsTruth(images=images, classes=np.asarray(classes, dtype=np.intp), rows=rows)
