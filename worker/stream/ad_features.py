"""Features of ads: what fits a declaration, and a declaration for a catalogue that comes without one.

Rules that hold in this file:

- All ads have the same features. A missing or undeclared one, or a value of another type, is refused with one line. A
  value that a category does not list has no mark, as in contexts. Commands refuse it, journals may have it.
- The declared feature `reward` is no further column of a catalogue: an ad has its revenue anyway. After a new price the
  coefficients of the ad stay as they are (`catalogue.py`).
- Without a declaration, the first catalogue gives it: a feature that is a number in every ad is a number, any other is
  a category with the values that occur, in the order of their first appearance.
- Numbers are standardised by mean and deviation over the first catalogue, which the declaration keeps, and clipped like
  contexts. A number that was constant has scale 1. No exponent is chosen: catalogues are too small to judge by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from msgspec import structs

from worker.errors import InputError, OtherFeaturesError
from worker.stream.contexts import Standardisation
from worker.stream.features import REWARD, Feature, Features, listed, numbers_of

if TYPE_CHECKING:
    from worker.stream.settings import Arm

Value: TypeAlias = float | str

#: Most values of a category that nobody declared: more of them are names rather than features.
MOST_INFERRED: Final = 100


def check_ad(declared: Sequence[Feature], given: Mapping[str, Value], where: str) -> None:
    """Raise `OtherFeaturesError` if an ad has not the declared features; `where` is its place in a file, or its id."""
    columns = [feature for feature in declared if feature.name != REWARD]
    names = [feature.name for feature in columns]
    for name in given:
        if name not in names:
            known = f"; features of ads are {listed(names)}" if names else ": this catalogue has no features of ads"
            raise OtherFeaturesError(f"{where}, {name}: this feature is not declared{known}")
    for feature in columns:
        if feature.name not in given:
            raise OtherFeaturesError(f"{where} has no {feature.name}, a declared feature of ads")
        value = given[feature.name]
        if feature.kind == "number" and isinstance(value, str):
            raise OtherFeaturesError(f"{where}, {feature.name}: a number is declared, not the text {value!r}")
        if feature.kind != "number" and not isinstance(value, str):
            reason = f"a category is declared, a text, not the number {value:g}"
            raise OtherFeaturesError(f"{where}, {feature.name}: {reason}")


def check_listed(declared: Sequence[Feature], given: Mapping[str, Value], where: str) -> None:
    """Raise `OtherFeaturesError` if an ad has a value that its category does not list, with the nearest one."""
    for feature in declared:
        value = given.get(feature.name)
        if feature.kind == "category" and isinstance(value, str) and value not in feature.values:
            near = get_close_matches(value, feature.values, n=1)
            guess = f"did you mean {near[0]}?" if near else f"values are {listed(feature.values)}."
            raise OtherFeaturesError(
                f"{where}, {feature.name}: {value!r} is not a listed value; {guess} "
                "`adcascade features apply` adds values"
            )


def infer(ads: Sequence[tuple[str, Mapping[str, Value]]]) -> tuple[Feature, ...]:
    """Return the declaration that fits the ads of the first catalogue, each given with its place or id.

    >>> infer([("row 2", {"price": 1.0, "brand": "x"}), ("row 3", {"price": 2.0, "brand": "y"})])[1].values
    ('x', 'y')
    """
    if not ads:
        return ()
    place, first = ads[0]
    for where, given in ads:
        if set(given) != set(first):
            name = next(name for name in (*first, *given) if (name in first) != (name in given))
            has, lacks = (place, where) if name in first else (where, place)
            raise InputError(f"{lacks} has no {name}, which {has} has: all ads must have the same features")
    return tuple(_inferred(name, [given[name] for _, given in ads]) for name in first)


def _inferred(name: str, values: Sequence[Value]) -> Feature:
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    if not texts:
        return Feature(name=name, kind="number")
    if not all(isinstance(value, str) for value in values):
        raise InputError(f"{name}: some ads have a number, others a text")
    if len(texts) > MOST_INFERRED:
        raise InputError(
            f"{name}: {len(texts):,} different texts, more than {MOST_INFERRED}: declare it in [features.ads], as "
            f"{{ hashed = 16 }} for instance, or leave it out"
        )
    return Feature(name=name, kind="category", values=texts)


def with_ads(features: Features | None, arms: Sequence[Arm]) -> Features | None:
    """Return a declaration completed by the first catalogue: inferred if it says nothing of ads, and with scales.

    Raise `InputError` if an ad does not fit.
    """
    ads = () if features is None else features.ads
    if arms and not ads and any(arm.features for arm in arms):
        ads = infer([(f"arm {arm.arm!r}", dict(arm.features)) for arm in arms])
    check_ads(ads, arms)
    if not ads:
        return features
    ads = scaled_ads(ads, arms)
    return Features(ads=ads) if features is None else replace(features, ads=ads)


def check_ads(declared: Sequence[Feature], arms: Iterable[Arm]) -> None:
    """Raise `InputError` if the features of an arm are not those declared."""
    for arm in arms:
        check_ad(declared, dict(arm.features), f"arm {arm.arm!r}")


def scaled_ads(ads: Sequence[Feature], arms: Sequence[Arm]) -> tuple[Feature, ...]:
    """Return features of ads with scales; a number that no arm has yet gets none."""
    return tuple(_scaled(feature, arms) for feature in ads)


def _scaled(feature: Feature, arms: Sequence[Arm]) -> Feature:
    if feature.kind != "number" or feature.centre is not None:
        return feature
    numbers = numbers_of(feature, arms)
    if not np.isfinite(numbers).any():
        return feature
    standard = Standardisation.estimate(numbers[:, None], straighten=False)
    return structs.replace(feature, centre=float(standard.centre[0]), scale=float(standard.scale[0]))
