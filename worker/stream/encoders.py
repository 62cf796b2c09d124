"""Context objects to numbers, as declared: numbers as they are, categories as marks in columns.

Rules that hold in this file:

- A number that is missing is `MISSING`, which the version replaces by the mean. A category that is missing, or that has
  a value which is not listed, has no mark.
- A name that is not declared, or a value of another type, is an error that names the field, never the value.
- A hashed category marks one column, by the stable hash of `worker.stream.hashing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from worker.errors import InputError
from worker.stream.contexts import MISSING
from worker.stream.features import ColumnOf, Features, listed

_LONGEST_SHOWN: Final = 64


class ContextEncoder:
    """Encodes contexts under one declaration, which is prepared once.

    >>> declared = Features.of_table({"context": {"age": "number", "device": ["mobile", "desktop"]}})
    >>> encoder = ContextEncoder(declared)
    >>> encoder.encode({"device": "desktop", "age": 31}), encoder.encode({"device": "watch"})
    ((31.0, 0.0, 1.0), (nan, 0.0, 0.0))
    >>> encoder.encode({"age": "31"})
    Traceback (most recent call last):
        ...
    worker.errors.InputError: context.age: a number is declared, not a text
    """

    def __init__(self, features: Features) -> None:
        self._blank: list[float] = []
        self._places: dict[str, tuple[int, ColumnOf | None]] = {}
        for feature in features.context:
            first = len(self._blank)
            self._places[feature.name] = first, feature.column_of(first)
            self._blank += [MISSING if feature.kind == "number" else 0.0] * feature.width

    def encode(self, given: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers of a context object; raise `InputError` that names the field."""
        numbers, places = self._blank.copy(), self._places
        for name, value in given.items():
            place = places.get(name)
            if place is None:
                raise InputError(f"context.{_shown(name)} is not declared; declared are {listed(places)}")
            column, find = place
            if find is None:
                if type(value) is float:
                    numbers[column] = value
                elif type(value) is int:
                    numbers[column] = _as_float(name, value)
                else:
                    raise InputError(f"context.{name}: a number is declared, not {kind_of(value)}")
            elif type(value) is str:
                if (found := find(value)) is not None:
                    numbers[found] = 1.0
            else:
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
