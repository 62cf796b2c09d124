"""The environments of the simulations.

An environment is a function that draws a world from a generator, for `dim` context features and `arms` arms. Its
further parameters are options of that environment alone. Whoever adds an environment adds a function here, and an
option of `adcascade simulate` for each new parameter.

The numbers of a world that builds on another are drawn after the other's, so that the common part is the same for a
seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import combinations
from typing import Any, Final

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats, frozen_array, sigmoid
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel
from worker.errors import FailedError, InputError
from worker.simulation.world import Environment
from worker.stream.features import Features

#: Environments of the demo and of traffic as well; the others are for `adcascade simulate` alone.
LASTING = ("opposite", "uniform", "rare", "tastes", "leaving", "digits")
#: Environments where users leave.
LEAVING = ("leaving", "silent")
#: What may change at half time in the environment drift.
PRICES = ("equal", "unequal")
CHANGES = ("tastes", "ads", "ads-and-tastes", "nothing")
CROSSES = ("all", "none")

PIXELS, CLASSES = 64, 10  # digits: its context features and its arms
OWN, OTHER = 0.9, 0.05  # digits: click probability on the ad of the own class, and on any other
EXPLAINED = 0.9  # share of the variance of tastes that features of arms explain, where there are features
CHANGING = 0.3  # drift: share of the ads that change
SKEWED = 2  # skewed: numbers that are seen as exp(2z)


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
    truth = _personal(base.truth.biases, base.truth.effects, _effects(generator, dim, arms))
    return _explained(replace(base, truth=truth), generator, features)


def leaving(generator: np.random.Generator, *, dim: int, arms: int, features: int = 0) -> Environment:
    """Draw a world as `tastes` where of those who do not click ad k a share ρ_k ~ U(0.3, 1) goes on, of one nobody."""
    world = tastes(generator, dim=dim, arms=arms)
    stay = generator.uniform(0.3, 1, arms)
    stay[generator.integers(arms)] = 0.0
    return _explained(replace(world, stay=stay), generator, features)


def digits(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Return a world with contexts that nobody here made: scikit-learn's images of digits.

    Each of the ten classes is an ad, all of the same revenue. A user has an image as context, and clicks the ad of its
    class with probability 0.9 and any other with 0.05. 64 pixels say which class it is, and no pixel says it alone.
    """
    images, class_of = load_digits()
    own, other = (math.log(chance / (1 - chance)) for chance in (OWN, OTHER))
    shares = class_of(images).mean(axis=0)
    chances = OTHER + shares * (OWN - OTHER)
    return Environment(
        truth=_personal(np.zeros(arms), np.zeros(arms), np.where(np.eye(arms, dtype=np.bool_), own, other)),
        dim=dim,
        rewards=np.ones(arms),
        stay=np.ones(arms),
        columns=class_of,
        average=np.log(chances / (1 - chances)),
        population=images,
    )


def categories(
    generator: np.random.Generator, *, dim: int, arms: int, levels: int = 50, noise: bool = False
) -> Environment:
    """Draw a world as `tastes` with `dim` numbers, which may be 0, and a declared category with `levels` values.

    The category explains as much of the log-odds as all numbers, with `noise` nothing.

    >>> categories(np.random.default_rng(0), dim=1, arms=2, levels=3).contexts(np.random.default_rng(0), 2).round(1)
    array([[ 0.1,  1. ,  0. ,  0. ],
           [-0.1,  1. ,  0. ,  0. ]])
    """
    base, columns = opposite(generator, dim=dim + levels, arms=arms), dim + levels
    scales = np.sqrt([columns / max(1, dim)] * dim + [0 if noise else columns] * levels)
    truth = _personal(base.truth.biases, base.truth.effects * scales, _effects(generator, columns, arms) * scales)
    category = {"category": [f"level {level}" for level in range(1, levels + 1)]}
    return replace(base, truth=truth, levels=levels, declared=_declared(dim, category))


def silent(generator: np.random.Generator, *, dim: int, arms: int, reported: float = 0.5) -> Environment:
    """Draw a world as `tastes` where clicks are always reported, passes with probability `reported`.

    A user whose pass is not reported leaves.

    >>> silent(np.random.default_rng(0), dim=1, arms=2, reported=0.1).stay
    array([0.1, 0.1])
    """
    return replace(tastes(generator, dim=dim, arms=arms), stay=np.full(arms, reported))


def newcomers(
    generator: np.random.Generator,
    *,
    dim: int,
    arms: int,
    new_arms: int = 1,
    prices: str = "equal",
    better: float = 0.0,
) -> Environment:
    """Draw a world as `tastes` whose last `new_arms` arms join later, all at the same price unless `prices` differ.

    With `better` above 0, clicks are rare, 0.1 to 0.4 %, and new arms get as many times the clicks of the best old one.

    >>> world = newcomers(np.random.default_rng(0), dim=1, arms=3, new_arms=1, better=4)
    >>> sigmoid(world.truth.biases).round(4), world.rewards
    (array([0.0034, 0.001 , 0.0138]), array([1., 1., 1.]))
    """
    world = tastes(generator, dim=dim, arms=arms)
    if better:
        chances = generator.uniform(0.001, 0.004, arms)
        chances[arms - new_arms :] = better * chances[: arms - new_arms].max()
        truth = _personal(np.log(chances / (1 - chances)), world.truth.effects, _tastes_of(world.truth))
        world = replace(world, truth=truth)
    return replace(world, rewards=np.ones(arms)) if prices == "equal" else world


def drift(generator: np.random.Generator, *, dim: int, arms: int, change: str = "tastes") -> Environment:
    """Draw a world as `tastes` in which something changes at half time: all tastes, some ads, or nothing.

    Three tenths of the ads get another base rate, with `ads-and-tastes` other tastes as well.

    >>> from worker.simulation.world import true_heads
    >>> world = drift(np.random.default_rng(0), dim=1, arms=10, change="ads")
    >>> (np.abs(true_heads(world.truth) - true_heads(world.later.truth)) > 1e-9).sum(axis=0)
    array([3, 0])
    """
    world = tastes(generator, dim=dim, arms=arms)
    biases, effects, own = world.truth.biases, world.truth.effects, _tastes_of(world.truth)
    if change == "tastes":
        effects, own = _effects(generator, dim), _effects(generator, dim, arms)
    elif change != "nothing":
        changed = np.arange(arms) < max(1, round(CHANGING * arms))
        biases = np.where(changed, generator.uniform(-4, -1, arms), biases)
        if change == "ads-and-tastes":
            own = np.where(changed[:, None], _effects(generator, dim, arms), own)
    return replace(world, later=replace(world, truth=_personal(biases, effects, own)))


def interactions(
    generator: np.random.Generator,
    *,
    dim: int,
    arms: int,
    interaction: float = 1.0,
    crosses: str = "all",
    pairs: int | None = None,
) -> Environment:
    """Draw a world as `tastes` in which products of two numbers matter: their part of the log-odds has this deviation.

    With `crosses` all, the learner's declaration has all of them. Of all pairs of numbers, `pairs` matter.

    >>> world = interactions(np.random.default_rng(0), dim=2, arms=1, interaction=3.0)
    >>> corners = world.log_odds(np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]))[:, 0]
    >>> round(float(corners @ [1, -1, -1, 1] / 4), 3)  # of x1·x2, without what x1 and x2 do alone
    3.912
    """
    world, every = tastes(generator, dim=dim, arms=arms), list(combinations(range(1, dim + 1), 2))
    products = interaction * _effects(generator, len(every), arms)
    if pairs is None:
        matter = np.arange(len(every))
    elif pairs <= len(every):
        matter = np.sort(generator.permutation(len(every))[:pairs])
    else:
        raise InputError(f"{dim} numbers have {len(every)} pairs, not {pairs}")
    scales = np.zeros(len(every))
    scales[matter] = math.sqrt(len(every) / len(matter))
    truth = _personal(
        world.truth.biases,
        np.concatenate([world.truth.effects, np.zeros(len(every))]),
        np.hstack([_tastes_of(world.truth), products * scales]),
    )
    return replace(
        world,
        truth=truth,
        columns=with_products,
        declared=_declared(dim, crosses=crosses),
        interacting=tuple((f"x{every[k][0]}", f"x{every[k][1]}") for k in matter.tolist() if interaction),
    )


def skewed(generator: np.random.Generator, *, dim: int, arms: int) -> Environment:
    """Draw a world as `tastes` in which two numbers are seen as exp(2z), like seconds or cents.

    >>> skewed(np.random.default_rng(0), dim=3, arms=1).contexts(np.random.default_rng(0), 2).round(1)
    array([[1.3, 0.8, 0.6],
           [1.2, 0.3, 0.4]])
    """
    world = tastes(generator, dim=dim, arms=arms)
    return replace(world, columns=with_logarithms, skewed=SKEWED, declared=_declared(dim))


ENVIRONMENTS: Final[dict[str, Callable[..., Environment]]] = {
    draw.__name__: draw
    for draw in (
        *(opposite, uniform, rare, tastes, leaving, digits),
        *(categories, silent, newcomers, drift, interactions, skewed),
    )
}


def make_environment(
    name: str, *, dim: int, arms: int, generator: np.random.Generator, stay: float = 1.0, **options: Any
) -> Environment:
    """Draw the world of an environment; `options` are those of the environment, None for its default.

    Of the users who do not click, the share `stay` goes on, times the rate of the arm where arms have one.

    >>> world = make_environment("opposite", dim=3, arms=5, generator=np.random.default_rng(1))
    >>> float(world.rewards.max())
    1.0
    """
    check_world(name, dim=dim, arms=arms, stay=stay, **options)
    chosen = {option: value for option, value in options.items() if value is not None}
    world = ENVIRONMENTS[name](generator, dim=dim, arms=arms, **chosen)
    return replace(world, stay=stay * world.stay)


def check_world(name: str, *, dim: int, arms: int, stay: float = 1.0, **options: Any) -> None:
    """Raise `InputError` if there is no such world; an option that is None is not given."""
    if name not in ENVIRONMENTS:
        raise InputError(f"unknown environment {name!r}; one of {', '.join(ENVIRONMENTS)}")
    if arms < 1 or dim < (name != "categories"):
        raise InputError(f"an environment needs at least one arm and one feature, not {arms} and {dim}")
    if not 0 < stay <= 1:
        raise InputError(f"stay must be above 0 and at most 1, not {stay:g}")
    if name == "digits" and (dim, arms) != (PIXELS, CLASSES):
        size = f"{PIXELS} context features and {CLASSES} arms"
        raise InputError(f"the environment digits has {size}, not {dim} and {arms}")
    least = {"interactions": 2, "skewed": SKEWED}.get(name, 0)
    if dim < least:
        raise InputError(f"the environment {name} needs at least {least} context features, not {dim}")
    parameters = {other: signature(draw).parameters for other, draw in ENVIRONMENTS.items()}
    for option, value in options.items():
        if value is not None and option not in parameters[name]:
            others = " or ".join(other for other in parameters if option in parameters[other])
            raise InputError(f"the environment {name} has no {option}; use {others}")


def _effects(generator: np.random.Generator, dim: int, *arms: int) -> Floats:
    """Draw effects of contexts: those that all arms share, (d,), or those of each arm, (K, d)."""
    return np.asarray(generator.standard_normal((*arms, dim)) / np.sqrt(dim))


def _personal(biases: Floats, effects: Floats, own: Floats) -> PersonalModel:
    """Return the truth with these biases (K,), shared effects (d,) and tastes (K, d)."""
    truth = PersonalModel.certain(np.column_stack([biases, own]))
    return replace(truth, shared=np.concatenate([[0.0], effects])[:, None])


def _tastes_of(truth: ClickModel) -> Floats:
    """Return the effects of contexts that each arm has besides the shared ones, (K, d)."""
    assert isinstance(truth, PersonalModel)
    return np.asarray(truth.own[:, 1:])


def _declared(numbers: int, category: dict[str, Any] | None = None, crosses: str = "none") -> Features:
    """Return the declaration of as many numbers, of a category, and of crosses."""
    context = {f"x{number}": "number" for number in range(1, numbers + 1)} | (category or {})
    return Features.of_table({"context": context} | ({"crosses": crosses} if crosses != "none" else {}))


def _additive(effects: Floats, biases: Floats, rewards: Floats) -> Environment:
    """Return a world whose contexts have the same effects on all arms."""
    truth = AdditiveModel.certain(effects, biases)
    return Environment(truth=truth, dim=len(effects), rewards=frozen_array(rewards), stay=np.ones(len(rewards)))


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


# ── columns that truths are linear in, if not in contexts ─────────────────────────────────────────────────────────────


def with_products(contexts: Floats) -> Floats:
    """Return contexts and the products of every two of their numbers: (n, d) → (n, d + d(d−1)/2).

    >>> with_products(np.array([[2.0, 3.0, 5.0]]))
    array([[ 2.,  3.,  5.,  6., 10., 15.]])
    """
    first, second = np.triu_indices(contexts.shape[1], k=1)
    return np.hstack([contexts, contexts[:, first] * contexts[:, second]])


def with_logarithms(contexts: Floats) -> Floats:
    """Return contexts with the numbers behind those that are seen as exp(2z)."""
    return np.hstack([np.log(contexts[:, :SKEWED]) / 2, contexts[:, SKEWED:]])


@cache
def load_digits() -> tuple[Floats, Callable[[Floats], Floats]]:
    """Return scikit-learn's images, (rows, 64), standardised, and the function to their classes, 1 in one of (n, 10).

    A context is one of the images, to the bit.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise FailedError("the environment digits needs scikit-learn: pip install scikit-learn") from None
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.float64)
    deviations = images.std(axis=0)
    # A pixel that is the same in all images stays 0. Adding 0 turns −0.0 into 0.0.
    images = (images - images.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0) + 0.0
    class_of = {image.tobytes(): number for image, number in zip(images, classes.tolist(), strict=True)}

    def with_classes(contexts: Floats) -> Floats:
        numbers = [class_of.get(np.ascontiguousarray(context).tobytes(), -1) for context in contexts]
        if -1 in numbers:
            raise InputError("a context of the environment digits must be one of its images")
        return np.eye(CLASSES)[numbers]

    return images, with_classes
