"""Crosses: declared features that matter together, as further columns of the model.

Rules that hold in this file:

- Two numbers give the column of their product, a number with itself its square. A number and a category give a column
  per value of the category: the number where the mark is set, else 0. Two categories give a column per pair of values
  while there are at most `MOST_PAIRS`; more pairs share `MOST_PAIRS` columns, by a stable hash.
- Crosses are computed from standardised columns, so arrivals, journal and `dim` keep the columns of the features. The
  model has theirs first, then those of each cross, in the order of the declaration.
- A row depends on itself alone, to the bit: every column is one product.
- Refused: a cross of a feature that is not declared, of a category with itself (it would be the category again), the
  same cross twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from worker.bandit.arrays import Floats, Ints
from worker.errors import InputError
from worker.stream.chance import hashed_column

if TYPE_CHECKING:  # a declaration has its crosses: it imports this file
    from worker.stream.features import Feature

#: Most columns of a cross of two categories.
MOST_PAIRS: Final = 64
#: The declaration of a cross of every two features.
EVERY: Final = "all"

_MIXING: Final = tuple(
    (np.uint64(shift), np.uint64(factor))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
)

#: The names of two features that are crossed.
Pair: TypeAlias = tuple[str, str]


def crosses_of(declared: Any, features: Sequence[Feature]) -> tuple[Pair, ...]:
    """Return the crosses that a declaration has; "all" is every two of the features.

    >>> crosses_of([["age", "device"]], ())
    (('age', 'device'),)
    """
    if declared == EVERY:
        return tuple(combinations([feature.name for feature in features], 2))
    is_list = isinstance(declared, list) and all(isinstance(one, list) and len(one) == 2 for one in declared)
    if not is_list or not all(isinstance(name, str) for one in declared for name in one):
        raise InputError(f'crosses must be "{EVERY}" or pairs of features, such as [["age", "device"]]')
    return tuple((left, right) for left, right in declared)


def check_crosses(features: Sequence[Feature], crosses: Sequence[Pair]) -> None:
    """Raise `InputError` for a cross that makes no sense."""
    kinds = {feature.name: feature.kind for feature in features}
    seen: set[frozenset[str]] = set()
    for left, right in crosses:
        shown = f"the cross of {left!r} and {right!r}"
        for name in (left, right):
            if name not in kinds:
                known = ", ".join(kinds) or "none"
                raise InputError(f"{shown}: {name!r} is no declared feature of contexts; declared are {known}")
        if left == right and kinds[left] != "number":
            raise InputError(f"{shown} says nothing: it is the category again; leave it out")
        if frozenset((left, right)) in seen:
            raise InputError(f"{shown} is declared twice")
        seen.add(frozenset((left, right)))


def width_of(left: Feature, right: Feature) -> int:
    """Return the number of columns of a cross."""
    width = left.width * right.width
    return width if "number" in (left.kind, right.kind) else min(width, MOST_PAIRS)


class _Hashed(NamedTuple):
    """A cross of two categories whose pairs share columns, with a key of every value."""

    names: Pair
    first: int
    left: slice
    right: slice
    left_keys: NDArray[np.uint64]
    right_keys: NDArray[np.uint64]

    def columns(self, left: Ints, right: Ints) -> Ints:
        """Return the columns that pairs of values mark, (n,), by SplitMix64 of the keys of both."""
        words = self.left_keys[left] ^ self.right_keys[right]
        for shift, factor in _MIXING:
            words = (words ^ (words >> shift)) * factor
        return self.first + (words % np.uint64(MOST_PAIRS)).astype(np.intp)


def spans_of(features: Sequence[Feature]) -> dict[str, range]:
    """Return the columns of each feature, one feature after the other."""
    ends = accumulate((feature.width for feature in features), initial=0)
    return {feature.name: range(*span) for feature, span in zip(features, pairwise(ends), strict=True)}


class Crossing:
    """Computes the columns of crosses.

    >>> from worker.stream.features import Features
    >>> declared = {"context": {"age": "number", "device": ["mobile", "desktop"]}, "crosses": [["age", "device"]]}
    >>> crossing = Features.of_table(declared).crossing
    >>> crossing.apply(np.array([[2.0, 0.0, 1.0]]))
    array([[2., 0., 1., 0., 2.]])
    >>> crossing.names(("age", "device=mobile", "device=desktop"))[3:]
    ('age × device=mobile', 'age × device=desktop')
    """

    def __init__(self, features: Sequence[Feature], crosses: Sequence[Pair]) -> None:
        by_name, spans = {feature.name: feature for feature in features}, spans_of(features)
        self.dim = first = sum(feature.width for feature in features)
        left_columns: list[int] = []
        right_columns: list[int] = []
        places: list[int] = []
        self._hashed: list[_Hashed] = []
        for names in crosses:
            left, right = (by_name[name] for name in names)
            a, b = (spans[name] for name in names)
            width = width_of(left, right)
            if width == left.width * right.width:
                left_columns += np.repeat(a, right.width).tolist()
                right_columns += list(b) * left.width
                places += range(first, first + width)
            else:
                columns = slice(a.start, a.stop), slice(b.start, b.stop)
                self._hashed.append(_Hashed(names, first, *columns, _keys(left), _keys(right)))
            first += width
        self.model_dim = first
        self._left, self._right = np.array(left_columns, dtype=np.intp), np.array(right_columns, dtype=np.intp)
        self._places = np.array(places, dtype=np.intp)

    def apply(self, standardised: Floats) -> Floats:
        """Return standardised columns (n, d) followed by those of crosses: (n, model_dim)."""
        if self.model_dim == self.dim:
            return standardised
        crossed = np.zeros((len(standardised), self.model_dim))
        crossed[:, : self.dim] = standardised
        crossed[:, self._places] = standardised[:, self._left] * standardised[:, self._right]
        rows = np.arange(len(standardised))
        for one in self._hashed:
            # A category marks one column at most; without a mark, the product is 0.
            left, right = standardised[:, one.left], standardised[:, one.right]
            i, j = left.argmax(axis=1), right.argmax(axis=1)
            crossed[rows, one.columns(i, j)] = left[rows, i] * right[rows, j]
        return crossed

    def numbers(self, are_numbers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which columns of the model are numbers or products of numbers, from those of the features, (d,)."""
        numbers = np.zeros(self.model_dim, dtype=bool)
        numbers[: self.dim] = are_numbers
        numbers[self._places] = are_numbers[self._left] & are_numbers[self._right]
        return numbers

    def keys(self, columns: Sequence[Hashable], names: Mapping[str, Hashable]) -> list[Hashable]:
        """Return what identifies all columns of the model, from that of the columns of the features, (d,).

        `names` has what identifies a feature with all its columns, for columns that pairs of values share.
        """
        keys = [*columns, *[None] * (self.model_dim - self.dim)]
        for place, left, right in zip(self._places.tolist(), self._left.tolist(), self._right.tolist(), strict=True):
            keys[place] = frozenset((columns[left], columns[right]))
        for one in self._hashed:
            pair = frozenset(names[name] for name in one.names)
            keys[one.first : one.first + MOST_PAIRS] = [(pair, number) for number in range(MOST_PAIRS)]
        return keys

    def names(self, columns: Sequence[str], values: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return the names of all columns of the model, from those of the features, (d,).

        With `values`, such as {"city": "city=Rome"}, columns that pairs share have the name of that pair.
        """
        values = values or {}
        names = [*columns, *[""] * (self.model_dim - self.dim)]
        for place, left, right in zip(self._places.tolist(), self._left.tolist(), self._right.tolist(), strict=True):
            names[place] = f"{columns[left]} × {columns[right]}"
        for one in self._hashed:
            pair, given = " × ".join(one.names), [values[name] for name in one.names if name in values]
            for number in range(MOST_PAIRS):
                names[one.first + number] = " × ".join(given) if len(given) == 2 else f"{pair}#{number + 1}"
        return tuple(names)


def _keys(feature: Feature) -> NDArray[np.uint64]:
    """Return a stable hash of every value of a category."""
    feature = structs.replace(feature, name=feature.hash_name)
    return np.array([hashed_column(feature.name, value, 1 << 64) for value in feature.column_names], dtype=np.uint64)
