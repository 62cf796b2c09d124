"""Which ad for whom: the log-odds of an ad as a sum of named parts, the tastes of its users, and which features matter.

The first two come from an ad's head (`ClickModel.head`), the coefficients of [1; x] in its log-odds. x is the context
as the model takes it: numbers standardised, categories as marks of 0 and 1. So the first coefficient is the base rate,
the log-odds for the average user. The coefficient of a number is the change of the log-odds per standard deviation,
that of a value of a category the change for users who have it.

Columns of contexts have the names of the declaration; without one they are x[1], x[2], …

A feature g of contexts has the strength sqrt(q_g / λ_g): the standard deviation, over users and ads, of the log-odds
that tastes by it explain (docs/math.md §9). Of a feature of ads it is that of the log-odds that it explains across ads,
relative to the prior of a base rate. Before the first fold all features are alike, and nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from worker.bandit.arrays import Floats, sigmoid
from worker.bandit.personal import PersonalModel
from worker.stream.crosses import spans_of
from worker.stream.features import Features
from worker.stream.parameters import Parameters

BASE_RATE: Final = "base rate"
POSITION: Final = "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A part of the log-odds of a click: coefficient × standardised value.

    `value` is the number of the context as it came, None if it is missing; a mark of a category is 1, a cross the
    product of its standardised parts.
    """

    feature: str
    value: float | None
    standardised: float
    coefficient: float
    contribution: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "contribution", self.coefficient * self.standardised)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """The coefficient of a feature in the log-odds of an ad, and its mean over the active ads.

    low, high : interval of the coefficient, from the posterior
    scale : size of a unit of the feature as it comes: its standard deviation, or 1
    """

    feature: str
    coefficient: float
    low: float
    high: float
    average: float
    scale: float

    @property
    def difference(self) -> float:
        """How much more the feature moves this ad than the average one."""
        return self.coefficient - self.average

    @property
    def is_clear(self) -> bool:
        """Whether the average is outside of the interval."""
        return not self.low <= self.average <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class AdProfile:
    """For whom an ad works; `tastes` begin with the one that differs most from the average ad.

    log_odds, low, high : log-odds of a click of the average user, with their interval
    answer_rate, displays : None where answers are not counted
    """

    arm: str
    reward: float
    active: bool
    features: Mapping[str, float | str]
    probability: float
    log_odds: float
    low: float
    high: float
    answer_rate: float | None
    displays: float | None
    tastes: tuple[Taste, ...]


def context_columns(parameters: Parameters) -> tuple[str, ...]:
    """Return the names of the columns of a context in the model: those declared, or x[1], x[2] and so on."""
    declared = parameters.settings.features
    if declared is not None and declared.context:
        return declared.model_names
    return tuple(f"x[{number}]" for number in range(1, parameters.settings.dim + 1))


def columns_of_object(parameters: Parameters, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of columns for one context object: a hashed category has the value that it was given.

    >>> declared = Features.of_table({"context": {"city": {"hashed": 2}}})
    >>> from worker.stream.settings import LearningSettings
    >>> version = Parameters.first(LearningSettings(dim=2, features=declared), ())
    >>> columns_of_object(version, {"city": "Rome"})
    ('city=Rome', 'city=Rome')
    """
    declared = parameters.settings.features
    if declared is None or not declared.context:
        return context_columns(parameters)
    names, spans = list(declared.context_names), spans_of(declared.context)
    values = {name: f"{name}={value}" for name, value in given.items()}
    for feature in declared.context:
        if feature.kind == "hashed" and feature.name in given:
            # One of these columns has the mark, the others are 0 and not shown.
            for column in spans[feature.name]:
                names[column] = values[feature.name]
    return declared.crossing.names(names, values)


def contributions(
    parameters: Parameters, arm: int, context: Floats, standardised: Floats, names: tuple[str, ...]
) -> tuple[Contribution, ...]:
    """Return the parts of the log-odds of an arm, the largest first; they sum to it.

    `context` (d,) is as it came, nan where a number is missing; `standardised` and `names` are of the model's columns.
    Marks that are not set are left out.
    """
    coefficients, _ = parameters.model.head(arm)
    parts = [Contribution(feature=BASE_RATE, value=1.0, standardised=1.0, coefficient=float(coefficients[0]))]
    marks = _marks(parameters.settings.features, len(context))
    values = [*context.tolist(), *standardised[len(context) :].tolist()]
    columns = zip(names, values, standardised.tolist(), coefficients[1:].tolist(), marks, strict=True)
    parts += [
        Contribution(
            feature=name,
            value=None if np.isnan(value) else value,
            standardised=standard,
            coefficient=coefficient,
        )
        for name, value, standard, coefficient, is_mark in columns
        if not is_mark or standard != 0
    ]
    return strongest_first(parts)


def strongest_first(parts: Iterable[Contribution]) -> tuple[Contribution, ...]:
    """Return parts of log-odds, the largest first."""
    return tuple(sorted(parts, key=lambda part: -abs(part.contribution)))


def position_effect(parameters: Parameters, h: int) -> tuple[Contribution, ...]:
    """Return the part of a position, from 0, in the log-odds of every ad; none if it has no effect."""
    effects = parameters.model.position_effects
    effect = float(effects[min(h, len(effects) - 1)])
    if not effect:
        return ()
    return (Contribution(feature=POSITION, value=h + 1.0, standardised=1.0, coefficient=effect),)


def _marks(features: Features | None, dim: int) -> list[bool]:
    """Return whether each column of the model is a mark of a category, or a cross with one."""
    if features is None or not features.context:
        return [False] * dim
    return [not is_number for is_number in features.crossing.numbers(features.number_columns).tolist()]


def ad_profile(parameters: Parameters, arm: int, *, confidence: float = 0.95) -> AdProfile:
    """Return for whom an ad works, compared with the mean over the active ads."""
    ad, model = parameters.arms[arm], parameters.model
    coefficients, covariance = model.head(arm)
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    active = [index for index, other in enumerate(parameters.arms) if other.active] or [arm]
    average = np.mean([model.head(index)[0] for index in active], axis=0)
    known = parameters.standardisation
    scales = np.ones(model.dim)
    if known is not None:
        scales[: len(known.scale)] = known.typical[1]
    tastes = [
        Taste(
            feature=name,
            coefficient=float(coefficients[column]),
            low=float(coefficients[column] - reach[column]),
            high=float(coefficients[column] + reach[column]),
            average=float(average[column]),
            scale=float(scales[column - 1]),
        )
        for column, name in enumerate(context_columns(parameters), start=1)
    ]
    counts, rates = parameters.answers, parameters.rates
    return AdProfile(
        arm=ad.arm,
        reward=ad.reward,
        active=ad.active,
        features=dict(ad.features),
        probability=float(sigmoid(coefficients[:1])[0]),
        log_odds=float(coefficients[0]),
        low=float(coefficients[0] - reach[0]),
        high=float(coefficients[0] + reach[0]),
        answer_rate=None if rates is None else float(rates.arms[arm]),
        displays=None if counts is None else float(counts.displayed[:, arm].sum()),
        tastes=tuple(sorted(tastes, key=lambda taste: (-abs(taste.difference), -abs(taste.coefficient)))),
    )


# ── which features matter ─────────────────────────────────────────────────────────────────────────────────────────────

#: Words for a strength, from this value on. With 0.7, users of two kinds differ in their odds by a factor of two.
WORDS: Final = ((0.7, "strong"), (0.3, "clear"), (0.1, "weak"), (0.0, "negligible"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """A feature by its name, and how much it matters; `of` is "context" or "ad"."""

    feature: str
    of: str
    strength: float

    @property
    def word(self) -> str:
        """The strength in words.

        >>> Strength(feature="age", of="context", strength=0.4).word
        'clear'
        """
        return next(word for least, word in WORDS if self.strength >= least)


def strengths(parameters: Parameters) -> tuple[Strength, ...]:
    """Return the features of contexts and of ads, the strongest of each first; none before a fold and without tastes.

    A feature that no display, or no ad, has had yet is left out: its strength is that of its prior.

    >>> from worker.stream.settings import LearningSettings
    >>> strengths(Parameters.first(LearningSettings(dim=2), ()))
    ()
    """
    model, features = parameters.model, parameters.settings.features
    if not isinstance(model, PersonalModel) or not parameters.folds:
        return ()
    contexts = [f"x[1] … x[{parameters.settings.dim}]"] if parameters.settings.dim > 1 else ["x[1]"]
    if features is not None and features.context:
        contexts = [*(one.name for one in features.context), *(f"{one} × {other}" for one, other in features.crosses)]
    ads = [] if features is None else [feature.name for feature in features.ads]
    displayed = np.einsum("kii->i", model.precision.information)[1:]
    described = (model.precision.features[:, 1:] ** 2).sum(axis=0)
    found = []
    for of, names, groups, precisions, said in (
        ("context", contexts, model.groups, model.strengths, displayed),
        ("ad", ads, model.ad_groups, model.ad_strengths, described),
    ):
        values = zip(names, np.sqrt(groups.squares / precisions).tolist(), groups.sums(said), strict=True)
        some = [Strength(feature=name, of=of, strength=value) for name, value, has in values if has > 0]
        found += sorted(some, key=lambda one: -one.strength)
    return tuple(found)
