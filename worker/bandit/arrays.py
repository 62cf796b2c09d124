"""Arrays of the core: their types, and what every value does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Array = NDArray[Any]  # of the planning kernel's dtype
Keys = NDArray[np.uint32]  # stable numbers of sessions or arms

#: Index of a position without an arm.
NO_ARM = -1
#: Columns that `row_products` computes for all rows before the next: few enough to stay in the cache of a core.
COLUMNS = 1024


def sigmoid(u: Array) -> Array:
    """Return 1 / (1 + e^−u) without overflow."""
    tail = np.exp(-np.abs(u))
    return np.asarray(np.where(u >= 0, 1.0, tail) / (1.0 + tail))


def row_products(left: Array, right: Array) -> Array:
    """Return the matrix product, each row by a product of its own: (n, p), (p, c) → (n, c).

    BLAS sums in another order for another number of rows, and of threads. Here every call has one row and the same
    shape, so a row's bits depend on that row and on `right` alone.

    >>> row_products(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 10.0, 0.0], [0.0, 1.0, 1.0]]))
    array([[ 1., 12.,  2.],
           [ 3., 34.,  4.]])
    """
    rows, columns = np.ascontiguousarray(left)[:, None, :], right.shape[1]
    result = np.empty((len(left), 1, columns), dtype=right.dtype)
    for first in range(0, columns, COLUMNS):
        block = slice(first, first + COLUMNS)
        np.matmul(rows, right[:, block], out=result[:, :, block])
    return result[:, 0]


def spread(count: int, most: int) -> Ints:
    """Return at most `most` of the numbers below `count`, evenly spread.

    >>> spread(10, 4).tolist()
    [0, 2, 5, 7]
    """
    most = min(count, most)
    return np.arange(most) * count // max(1, most)


def frozen_array(values: object, shape: tuple[int, ...] | None = None) -> Floats:
    """Return a read-only float64 copy of `values`; check shape and finiteness."""
    try:
        array = np.array(values, dtype=np.float64, order="C")
    except (TypeError, ValueError):
        raise InputError("not an array of numbers") from None
    if shape is not None and array.shape != shape:
        raise InputError(f"shape {array.shape} instead of {shape}")
    if not np.isfinite(array).all():
        raise InputError("has a number that is not finite")
    array.flags.writeable = False
    return array


class ArrayValue:
    """A frozen dataclass with arrays: two are equal if all their fields are, NaN to NaN; it has no hash."""

    __slots__: tuple[str, ...] = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in type(self).__slots__)
        return all(
            np.array_equal(one, another, equal_nan=True) if isinstance(one, np.ndarray) else one == another
            for one, another in pairs
        )


def freeze_fields(value: object, **shapes: tuple[int, ...]) -> None:
    """Make fields of a frozen dataclass read-only arrays of these shapes; an error has the name of the field."""
    for name, shape in shapes.items():
        try:
            object.__setattr__(value, name, frozen_array(getattr(value, name), shape))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None


def chosen(array: Floats, indices: Ints, axis: int) -> Floats:
    """Return the parts of an array with these indices along an axis, zeros for −1.

    >>> chosen(np.array([5.0, 6.0]), np.array([1, -1]), 0)
    array([6., 0.])
    """
    if not array.shape[axis]:
        return np.zeros([*array.shape[:axis], len(indices), *array.shape[axis + 1 :]])
    parts = array.take(indices, axis=axis, mode="clip")
    np.moveaxis(parts, axis, 0)[indices < 0] = 0.0
    return parts
