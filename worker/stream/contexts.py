"""Contexts in bulk: tuples in events, packed bytes in memory, one array for planning and folding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import nan
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: A number of a context that is missing. One object, so that contexts with missing numbers are equal to themselves: a
#: tuple compares its items by identity first.
MISSING: Final = nan


@cache
def _layout(dim: int) -> Struct:
    return Struct(f"<{dim}d")


@cache
def _packer(dim: int) -> Callable[..., bytes]:
    return _layout(dim).pack


def pack_context(context: tuple[float, ...]) -> bytes:
    """Pack a context as little-endian float64, a third of the memory of the tuple."""
    return _packer(len(context))(*context)


def unpack_context(packed: bytes) -> tuple[float, ...]:
    """Return a packed context as a tuple.

    >>> unpack_context(pack_context((0.1, -0.0)))
    (0.1, -0.0)
    """
    return _layout(len(packed) // 8).unpack(packed)


def stack_packed(packed: Sequence[bytes], dim: int) -> NDArray[np.float64]:
    """Stack n packed contexts of `dim` numbers into a read-only (n, d) array.

    Three times as fast as `numpy.array` on tuples, which inspects every number.

    >>> stack_packed([pack_context((1.0, 2.0)), pack_context((3.0, 4.0))], 2)
    array([[1., 2.],
           [3., 4.]])
    """
    return np.frombuffer(b"".join(packed), "<f8").reshape(len(packed), dim)
