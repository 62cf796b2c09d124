"""Contexts in bulk: as tuples in events, packed in memory, stacked into one array for planning and folding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray


@cache
def _layout(dim: int) -> Struct:
    return Struct(f"<{dim}d")


def stack_contexts(contexts: Sequence[tuple[float, ...]], dim: int) -> NDArray[np.float64]:
    """Stack n contexts of `dim` numbers into an (n, d) array, which cannot be written to.

    Three times as fast as `numpy.array`, which looks at every number as an object of unknown kind.

    >>> stack_contexts([(1.0, 2.0), (3.0, 4.0)], 2)
    array([[1., 2.],
           [3., 4.]])
    """
    pack = _layout(dim).pack
    return stack_packed([pack(*context) for context in contexts], dim)


def pack_context(context: tuple[float, ...]) -> bytes:
    """Return a context as little-endian float64, a third of the memory of the tuple: the form for keeping many."""
    return _layout(len(context)).pack(*context)


def unpack_context(packed: bytes) -> tuple[float, ...]:
    """Return the context that was packed.

    >>> unpack_context(pack_context((0.1, -0.0)))
    (0.1, -0.0)
    """
    return _layout(len(packed) // 8).unpack(packed)


def stack_packed(packed: Sequence[bytes], dim: int) -> NDArray[np.float64]:
    """Stack n packed contexts of `dim` numbers into an (n, d) array, which cannot be written to."""
    return np.frombuffer(b"".join(packed), "<f8").reshape(len(packed), dim)
