"""Matrix products in which a row depends on that row alone, to the bit.

BLAS sums in another order for another number of rows, and within one product for rows that fall into another of its
tiles. Two kinds of product do not show it:

- **In blocks** of exactly ROWS rows, padded with zeros: few enough for one tile on every kernel of OpenBLAS. Each block
  copies the whole right factor into the order of the kernel, which takes most of the time if that factor is large.
- **Tall**: all rows in one product, as columns of its transpose. There OpenBLAS's kernel for Haswell, which
  `worker.kernels` pins, adds up every element from the first to the last term in a single register, with three
  exceptions: the first and the last 8 rows of at most 320 that it takes at once, and columns beyond a multiple of 12.
  So rows stand between two blocks of zeros, at most TALLEST of them, and columns are filled up to a multiple of GROUP.
  ROWS rows or fewer need no zeros around them: a product that short has no first and last rows.

Whether that kernel is loaded, and sums like that, is tried once (`sums_alike`); if not, all products are made in
blocks.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import DTypeLike
from threadpoolctl import threadpool_info

from worker.bandit.arrays import Array

#: Rows of a block. A product with a single column takes another kernel, so there are always two columns or more.
ROWS = 8
#: Columns of `product` are made a multiple of it.
GROUP = 12
#: Most rows of a tall product, without the zeros around them.
TALLEST = 304


def room(columns: int) -> int:
    """Return how many rows a factor of so many columns must have for `product`; those at its end are zeros."""
    return columns + GROUP - 1


def product(left: Array, right: Array, columns: slice) -> Array:
    """Return the product with a factor given by columns, each row by itself: (r, p), (room(c), p) → (r, columns).

    >>> left, right = np.ones((3, 2), dtype=np.float32), np.zeros((room(2), 2), dtype=np.float32)
    >>> right[:2] = [[1, 3], [2, 4]]
    >>> product(left, right, slice(0, 2)).tolist()
    [[4.0, 6.0], [4.0, 6.0], [4.0, 6.0]]
    """
    width = columns.stop - columns.start
    chosen = right[columns.start : columns.start + -(-width // GROUP) * GROUP]
    if not sums_alike(right.dtype):
        return in_blocks(left, chosen.T)[:, :width]
    if len(left) <= TALLEST:
        return _tall(left, chosen, width)
    parts = [_tall(left[first : first + TALLEST], chosen, width) for first in range(0, len(left), TALLEST)]
    return np.concatenate(parts)


def in_blocks(left: Array, right: Array) -> Array:
    """Return the product in blocks of rows: (r, p), (p, c) → (r, c); c must be 2 or more."""
    blocks = _between_zeros(left, 0).reshape(-1, ROWS, left.shape[1])
    result: Array = np.matmul(blocks, right).reshape(-1, right.shape[1])
    return result[: len(left)]


def _tall(left: Array, right: Array, width: int) -> Array:
    around = ROWS if len(left) > ROWS else 0
    transposed = np.matmul(right, _between_zeros(left, around).T)
    return np.ascontiguousarray(transposed[:width, around : around + len(left)].T)


def _between_zeros(left: Array, around: int) -> Array:
    """Return rows padded to a multiple of ROWS, and with so many rows of zeros before and after them."""
    count, length = left.shape
    padded = np.zeros((-(-count // ROWS) * ROWS + 2 * around, length), dtype=left.dtype)
    padded[around : around + count] = left
    return padded


@cache
def sums_alike(dtype: DTypeLike) -> bool:
    """Return whether a row has the same bits in tall products of any height: by the kernel's name, and by a trial.

    Another kernel may pass the trial, and differ elsewhere.
    """
    if np.dtype(dtype) != np.float32:
        return False
    if {library.get("architecture") for library in threadpool_info() if library["user_api"] == "blas"} != {"Haswell"}:
        return False
    generator = np.random.default_rng(0)
    for length in (33, 700):
        left = generator.standard_normal((TALLEST, length)).astype(dtype)
        right = generator.standard_normal((2 * GROUP, length)).astype(dtype)
        few = np.concatenate([_tall(left[at : at + ROWS], right, 2 * GROUP) for at in range(0, TALLEST, ROWS)])
        for count in (TALLEST, 17):
            if _tall(left[:count], right, 2 * GROUP).tobytes() != few[:count].tobytes():
                return False
    return True
