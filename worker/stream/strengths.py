"""Which features matter: how strongly ads differ by a feature of contexts, and clicks by a feature of ads.

A feature g of contexts has the strength sqrt(q_g / λ_g): the standard deviation, over users and ads, of the log-odds
that tastes by it explain (docs/math.md §9). Of a feature of ads it is that of the log-odds that it explains across ads,
relative to the prior of a base rate. Before the first fold all features are alike, and nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker.bandit.personal import PersonalModel
from worker.stream.parameters import Parameters

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
    found = []
    for of, names, groups, precisions in (
        ("context", contexts, model.groups, model.strengths),
        ("ad", ads, model.ad_groups, model.ad_strengths),
    ):
        values = np.sqrt(groups.squares / precisions).tolist()
        some = [Strength(feature=name, of=of, strength=value) for name, value in zip(names, values, strict=True)]
        found += sorted(some, key=lambda one: -one.strength)
    return tuple(found)
