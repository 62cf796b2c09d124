"""Declared features: the meaning of names in contexts and of further columns of the catalogue.

Rules that hold in this file:

- A feature is a `number`, a `category` with listed values, or a `hashed` category. A number takes one column, a
  category one column per value, a hashed category as many columns as declared.
- A boolean is a number that is 0 or 1: `"boolean"` declares it, and where a number is declared, true and false count.
- Of ads, the name `reward` stands for the revenue that the catalogue has anyway; its logarithm is the column.
- The declaration is part of every version, so workers cannot disagree. Names keep their order; it is the order of the
  columns.
- A declaration that makes no sense is refused with one line, when it is read.
- In a context object, a number that is missing is `MISSING`, which the version replaces by the mean. A category that is
  missing, or that has a value which is not listed, has no mark. A hashed category marks one column, by a stable hash.
- A name that is not declared, or a value of another type, is an error that names the field, never the value.

`worker.stream.ad_features` checks the features of ads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from msgspec import Meta, Struct, structs, to_builtins
from numpy.typing import NDArray

from worker.bandit.arrays import Floats
from worker.errors import InputError
from worker.stream.chance import hashed_column
from worker.stream.contexts import MISSING, Standardisation
from worker.stream.crosses import Crossing, Pair, check_crosses, crosses_of, spans_of, width_of
from worker.stream.events import described

if TYPE_CHECKING:
    from worker.stream.settings import Arm


#: Kinds of features.
Kind: TypeAlias = Literal["number", "category", "hashed"]

#: Finds the column of a value of a category; None if it has none.
ColumnOf: TypeAlias = Callable[[str], int | None]

LONGEST_NAME: Final = 64
#: Most columns of all features of a context, or of an ad: a version has a square of them.
MOST_COLUMNS: Final = 4096

#: The feature of ads that is their revenue. Revenues differ by factors, so it counts by its logarithm.
REWARD: Final = "reward"
#: Names that the catalogue has for itself.
TAKEN: Final = ("arm", REWARD, "active")


class Feature(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One declared feature.

    `values` belong to a category, `columns` to a hashed category. `centre` and `scale` belong to a number of ads, once
    the first catalogue is known.

    >>> Feature(name="device", kind="category", values=("mobile", "desktop")).width
    2
    """

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    kind: Kind
    values: Annotated[tuple[str, ...], described("Values of a category.", minItems=1, uniqueItems=True)] = ()
    columns: Annotated[int, described("Columns of a hashed category.", minimum=1)] = 0
    centre: Annotated[float | None, described("Mean of a number of ads.")] = None
    scale: Annotated[float | None, described("Deviation of a number of ads.", exclusiveMinimum=0)] = None
    hashed_as: Annotated[str, described("Name that its values are hashed with, if it was renamed.")] = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and 0 < len(self.name) <= LONGEST_NAME and self.name.isprintable()):
            raise InputError(f"a feature's name must have 1 to {LONGEST_NAME} printable characters, not {self.name!r}")
        if self.kind == "category":
            self._check_values()
        elif self.values:
            raise InputError(f"feature {self.name!r}: only a category has values")
        if self.kind == "hashed":
            if not isinstance(self.columns, int) or isinstance(self.columns, bool) or self.columns < 1:
                raise InputError(f"feature {self.name!r}: hashed must be a number of columns, at least 1")
        elif self.columns:
            raise InputError(f"feature {self.name!r}: only a hashed category has a number of columns")
        self._check_scale()

    def _check_values(self) -> None:
        if not self.values:
            raise InputError(f"feature {self.name!r}: a category needs at least one value")
        for value in self.values:
            if not isinstance(value, str):
                raise InputError(f"feature {self.name!r}: the values of a category are texts, not {value!r}")
            if self.values.count(value) > 1:
                raise InputError(f"feature {self.name!r}: the value {value!r} is listed twice")

    def _check_scale(self) -> None:
        if (self.centre is None) != (self.scale is None) or (self.centre is not None and self.kind != "number"):
            raise InputError(f"feature {self.name!r}: a number has centre and scale, or neither")
        if self.centre is not None:
            self.standardised(np.zeros(0))  # raises if they are out of range

    @property
    def width(self) -> int:
        """The number of columns."""
        return {"number": 1, "category": len(self.values), "hashed": self.columns}[self.kind]

    @property
    def declared(self) -> Feature:
        """The feature as it was declared, without the scale that the first catalogue gave it, and its first name."""
        return structs.replace(self, centre=None, scale=None, hashed_as="")

    @property
    def hash_name(self) -> str:
        """The name that values are hashed with: the first one, so that a renamed feature keeps its columns."""
        return self.hashed_as or self.name

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns for people: the name, or the name and a value or number.

        >>> Feature(name="device", kind="category", values=("mobile", "desktop")).column_names
        ('device=mobile', 'device=desktop')
        """
        if self.kind == "number":
            return (self.name,)
        if self.kind == "category":
            return tuple(f"{self.name}={value}" for value in self.values)
        return tuple(f"{self.name}#{number}" for number in range(1, self.columns + 1))

    def column_of(self, first: int) -> ColumnOf | None:
        """Return how to find the column of a value, if `first` is the feature's first column; None for a number."""
        if self.kind == "number":
            return None
        if self.kind == "category":
            return {value: first + place for place, value in enumerate(self.values)}.get
        return lambda value: first + hashed_column(self.hash_name, value, self.columns)

    def standardised(self, numbers: Floats) -> Floats:
        """Return values (n,) of a number of ads on the scale of the first catalogue."""
        centre, scale = (0.0, 1.0) if self.centre is None or self.scale is None else (self.centre, self.scale)
        known = Standardisation(centre=np.array([centre]), scale=np.array([scale]))
        return known.apply(numbers[:, None])[:, 0]


@dataclass(frozen=True, kw_only=True)
class Features:
    """All declared features, of contexts and of ads; either part may be empty.

    >>> declared = Features.of_table({"context": {"age": "number", "device": ["mobile", "desktop"]}})
    >>> declared.dim, declared.context_names
    (3, ('age', 'device=mobile', 'device=desktop'))
    """

    context: tuple[Feature, ...] = ()
    ads: tuple[Feature, ...] = ()
    crosses: Annotated[tuple[Pair, ...], described("Pairs of features of contexts that matter together.")] = ()

    def __post_init__(self) -> None:
        if not self.context and not self.ads:
            raise InputError("features are declared, but there is none of contexts and none of ads")
        for part, of in ((self.context, "contexts"), (self.ads, "ads")):
            names = [feature.name for feature in part]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise InputError(f"the feature {repeated!r} of {of} is declared twice")
        for feature in self.ads:
            if feature.name == REWARD:
                if feature.kind != "number":
                    raise InputError(f'the feature {REWARD!r} of ads is their revenue: it can only be a "number"')
            elif feature.name in TAKEN:
                raise InputError(f"a feature of ads cannot have the name {feature.name!r}, which has another meaning")
        check_crosses(self.context, self.crosses)
        for widths, of in ((self.named_widths, "contexts"), (self.ad_widths, "ads")):
            if (total := sum(width for _, width in widths)) > MOST_COLUMNS:
                raise InputError(
                    f"the features of {of} have {total:,} columns, more than {MOST_COLUMNS:,}: {widest(widths)}"
                )

    @property
    def dim(self) -> int:
        """The number of columns of a context; 0 if no features of contexts are declared."""
        return sum(feature.width for feature in self.context)

    @property
    def ad_dim(self) -> int:
        """The number of columns of an ad."""
        return sum(feature.width for feature in self.ads)

    @cached_property
    def context_names(self) -> tuple[str, ...]:
        """Names of the columns of a context, for people."""
        return tuple(name for feature in self.context for name in feature.column_names)

    @cached_property
    def number_columns(self) -> NDArray[np.bool_]:
        """Which columns of a context are numbers, (d,): only these are standardised."""
        return np.array(
            [feature.kind == "number" for feature in self.context for _ in range(feature.width)], dtype=bool
        )

    @cached_property
    def crossing(self) -> Crossing:
        """Computes the columns of crosses from standardised contexts."""
        return Crossing(self.context, self.crosses)

    @cached_property
    def named_widths(self) -> list[tuple[str, int]]:
        """Name of each feature of contexts and its columns in the model; each cross is a feature."""
        features = {feature.name: feature for feature in self.context}
        crosses = [(f"{left} × {right}", width_of(features[left], features[right])) for left, right in self.crosses]
        return [(feature.name, feature.width) for feature in self.context] + crosses

    @property
    def ad_widths(self) -> list[tuple[str, int]]:
        """Name and columns of each feature of ads."""
        return [(feature.name, feature.width) for feature in self.ads]

    @property
    def widths(self) -> list[int]:
        """Columns of each feature of contexts in the model, crosses last."""
        return [width for _, width in self.named_widths]

    @cached_property
    def model_dim(self) -> int:
        """The number of columns of a context in the model, crosses included."""
        return sum(self.widths)

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """Names of the columns of a context in the model, for people."""
        return self.crossing.names(self.context_names)

    @property
    def declared(self) -> Features:
        """The features as they were declared, without scales of ads and first names."""
        context, ads = (tuple(feature.declared for feature in part) for part in (self.context, self.ads))
        return replace(self, context=context, ads=ads)

    def ad_columns(self, arms: Sequence[Arm]) -> Floats:
        """Return the features of arms as the model takes them, (K, columns); (K, 0) if none are declared."""
        columns = np.zeros((len(arms), self.ad_dim))
        given = [dict(arm.features) for arm in arms]
        spans = spans_of(self.ads)
        for feature in self.ads:
            first = spans[feature.name].start
            find = feature.column_of(first)
            if find is None:
                columns[:, first] = feature.standardised(numbers_of(feature, arms))
            else:
                for row, features in enumerate(given):
                    value = features.get(feature.name)
                    if isinstance(value, str) and (column := find(value)) is not None:
                        columns[row, column] = 1.0
        return columns

    # ── as JSON, and as TOML ─────────────────────────────────────────────────────────────────────────────────────────

    def document(self) -> dict[str, Any]:
        """Return the features as they are in the record of a version."""
        return {name: value for name, value in to_builtins(self).items() if value or name != "crosses"}

    @classmethod
    def of_table(cls, table: Any) -> Features:
        """Return the features that the tables [features.context] and [features.ads] of a TOML file declare.

        >>> Features.of_table({"ads": {"country": {"hashed": 16}}}).ads[0].columns
        16
        >>> Features.of_table({"context": {"age": "number", "visits": "number"}, "crosses": "all"}).crosses
        (('age', 'visits'),)
        """
        if not isinstance(table, Mapping):
            raise InputError("[features] must have the tables [features.context] and [features.ads]")
        table = dict(table)
        crosses = table.pop("crosses", [])
        for name, part in table.items():
            if name not in ("context", "ads"):
                raise InputError(f"[features] has no table {name!r}: its tables are context and ads, besides crosses")
            if not isinstance(part, Mapping) or not part:
                raise InputError(f'[features.{name}] must have an entry per feature, such as age = "number"')
        parts = {name: tuple(_declared(name, *entry) for entry in part.items()) for name, part in table.items()}
        try:
            pairs = crosses_of(crosses, parts.get("context", ()))
            for left, right in pairs:
                if left == right and table.get("context", {}).get(left) == "boolean":
                    raise InputError(f"the cross of {left!r} and {right!r} says nothing: it is the boolean again")
            return cls(**parts, crosses=pairs)
        except InputError as error:
            raise InputError(f"[features]: {error}") from None


class FormerFeatures(Struct, frozen=True, kw_only=True, gc=False):
    """The features of contexts before the last change: sessions of earlier versions have their columns."""

    since: Annotated[int, described("Version from which on the present features hold.", minimum=1)]
    first: Annotated[int, described("Version from which on the former features held.", minimum=0)]
    context: tuple[Feature, ...]
    renamed: Annotated[dict[str, str], described("New names of renamed features by their former names.")]


def numbers_of(feature: Feature, arms: Sequence[Arm]) -> Floats:
    """Return a number of ads as it is before it is standardised, (K,); NaN where an ad has none."""
    if feature.name == REWARD:
        return np.asarray(np.log([arm.reward for arm in arms]))
    values = (dict(arm.features).get(feature.name) for arm in arms)
    return np.array([np.nan if value is None or isinstance(value, str) else value for value in values], dtype=float)


def _declared(part: str, name: str, how: Any) -> Feature:
    try:
        if how in ("number", "boolean"):
            return Feature(name=name, kind="number")
        if isinstance(how, list):
            return Feature(name=name, kind="category", values=tuple(how))
        if isinstance(how, Mapping) and set(how) == {"hashed"}:
            return Feature(name=name, kind="hashed", columns=how["hashed"])
    except InputError as error:
        raise InputError(f"[features.{part}]: {error}") from None
    raise InputError(
        f'[features.{part}]: {name} must be "number", "boolean", a list of values such as ["mobile", "desktop"], '
        f"or {{ hashed = 16 }}, not {how!r}"
    )


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for a message, the first few of them.

    >>> listed(["age", "device"]), listed("abcdefghij")
    ('age, device', 'a, b, c, d, e, f, g, h and 2 more')
    """
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def widest(widths: Sequence[tuple[str, int]]) -> str:
    """Return for a message which feature has the most columns, and what to do about it.

    >>> widest([("age", 1), ("country", 1000)])
    "'country' has the most, 1,000: hash it into fewer, or leave it out"
    """
    name, width = max(widths, key=lambda one: one[1])
    if width == 1:
        return "every feature and cross has one: leave some out"
    return f"{name!r} has the most, {width:,}: hash it into fewer, or leave it out"


_LONGEST_SHOWN: Final = 64


class ContextEncoder:
    """Encodes contexts under one declaration, which is prepared once.

    While features change, clients send names of the declarations before and after. `lenient` are names that another
    declaration has, or has with another kind: here they are ignored. `aliases` are other names of features.

    >>> declared = Features.of_table({"context": {"age": "number", "device": ["mobile", "desktop"]}})
    >>> encoder = ContextEncoder(declared)
    >>> encoder.encode({"device": "desktop", "age": 31}), encoder.encode({"device": "watch"})
    ((31.0, 0.0, 1.0), (nan, 0.0, 0.0))
    >>> encoder.encode({"age": "31"})
    Traceback (most recent call last):
        ...
    worker.errors.InputError: context.age: a number is declared, not a text
    """

    def __init__(
        self, features: Features, lenient: Container[str] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        self._blank: list[float] = []
        self._places: dict[str, tuple[int, ColumnOf | None]] = {}
        self._lenient, self._aliases = lenient, aliases or {}
        for feature in features.context:
            first = len(self._blank)
            self._places[feature.name] = first, feature.column_of(first)
            self._blank += [MISSING if feature.kind == "number" else 0.0] * feature.width

    def __call__(self, time: int) -> ContextEncoder:
        """Return itself: one declaration holds at all times."""
        return self

    def encode(self, given: Mapping[str, Any], unlisted: list[tuple[str, str]] | None = None) -> tuple[float, ...]:
        """Return the numbers of a context object; raise `InputError` that names the field.

        Values that a category does not list are added to `unlisted`, with the name of the feature.
        """
        numbers, places = self._blank.copy(), self._places
        for name, value in given.items():
            place = places.get(name)
            if place is None and (known := self._aliases.get(name)) is not None and known not in given:
                place = places[known]
            if place is None:
                if name in self._lenient:
                    continue
                raise InputError(f"context.{_shown(name)} is not declared; declared are {listed(places)}")
            column, find = place
            if find is None:
                if type(value) is float:
                    numbers[column] = value
                elif type(value) is int or type(value) is bool:
                    numbers[column] = _as_float(name, value)
                elif name not in self._lenient:
                    raise InputError(f"context.{name}: a number is declared, not {kind_of(value)}")
            elif type(value) is str:
                if (found := find(value)) is not None:
                    numbers[found] = 1.0
                elif unlisted is not None:
                    unlisted.append((name, value))
            elif name not in self._lenient:
                raise InputError(f"context.{name}: a category is declared, a text, not {kind_of(value)}")
        return tuple(numbers)


@lru_cache(maxsize=64)
def context_encoder(features: Features | None) -> ContextEncoder | None:
    """Return the encoder of a declaration; None if no features of contexts are declared."""
    return ContextEncoder(features) if features is not None and features.context else None


def kind_of(value: Any) -> str:
    """Return what a JSON value is, for people, without the value."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"context.{name}: the number is too large") from None


def _shown(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= _LONGEST_SHOWN else repr(name[:_LONGEST_SHOWN])
