"""The planning kernel of models whose arms have coefficients of their own.

All that planning needs of an arm is its head: the coefficients m_k of u = [1; x] and their covariance W_k, with
log-odds u·m_k and width² = uᵀ W_k u. So a context costs a product of u with the coefficients of all arms, and one of
its n(n+1)/2 products u_i u_j with the packed covariances.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints
from worker.bandit.click_model import BLOCK, blocks_of, inputs
from worker.bandit.rows import product, room

#: Contexts × arms whose click probabilities a batch keeps between the greedy and the optimistic plan.
REMEMBERED = 1 << 24


def products(contexts: Array) -> Array:
    """Return the products u_i u_j, i ≤ j, of each row: (r, n) → (r, n(n+1)/2)."""
    rows, columns = triangle(contexts.shape[1])
    result: Array = contexts.take(rows, axis=1)
    result *= contexts.take(columns, axis=1)
    return result


def packed_covariances(covariances: Floats) -> Floats:
    """Return the upper triangles, off-diagonals doubled, so that uᵀWu is a product with `products`."""
    rows, columns = triangle(covariances.shape[1])
    packed: Floats = covariances[:, rows, columns]
    packed[:, rows != columns] *= 2
    return packed


@cache
def triangle(size: int) -> tuple[Ints, Ints]:
    """Return the indices of an upper triangle; a batch of few sessions would wait for them to be made."""
    return np.triu_indices(size)


class Spread(Protocol):
    """How certain the coefficients are."""

    @property
    def covariances(self) -> Floats:
        """The covariance of the coefficients of each arm, (K, n, n)."""


class PersonalHeads:
    """The kernel for the arms `shown`, of coefficients (K, n) and how certain they are."""

    def __init__(self, coefficients: Floats, precision: Spread, shown: Ints, dtype: DTypeLike) -> None:
        self.dtype, self.size = np.dtype(dtype), coefficients.shape[1]
        self.count = len(shown)
        # Beyond this, e^−u leaves the number range.
        self.steepest = 80.0 if self.dtype == np.float32 else 600.0
        self.opposed = np.zeros((room(self.count), self.size), dtype=self.dtype)
        self.opposed[: self.count] = -coefficients[shown]
        self._precision, self._shown = precision, shown

    @property
    def ranking(self) -> None:
        """Which arm is likelier depends on the user."""
        return

    @cached_property
    def spreads(self) -> Array:
        """The packed covariances, (room(columns), n(n+1)/2)."""
        covariances, shown = self._precision.covariances, self._shown
        packed = np.zeros((room(self.count), self.size * (self.size + 1) // 2), dtype=self.dtype)
        for first in range(0, self.count, BLOCK):  # what is gathered at once is small beside the covariances
            part = covariances[shown[first : first + BLOCK]]
            packed[first : first + len(part)] = packed_covariances(part)
        return packed

    def batch(self, contexts: Floats) -> _PersonalBatch:
        """Return the contexts (r, d) as the kernel needs them."""
        return _PersonalBatch(self, np.asarray(inputs(contexts), dtype=self.dtype))


class _PersonalBatch:
    def __init__(self, heads: PersonalHeads, contexts: Array) -> None:
        self._heads, self._contexts = heads, contexts

    def __len__(self) -> int:
        return len(self._contexts)

    def select(self, rows: Ints) -> _PersonalBatch:
        return _PersonalBatch(self._heads, self._contexts[rows])

    @cached_property
    def _products(self) -> Array:
        return products(self._contexts)

    def _products_of(self, left: Array, right: Array, columns: slice) -> Array:
        # Always by the same blocks of columns: in another product, the last bits of a column could differ.
        blocks = [product(left, right, block) for block in blocks_of(columns)]
        return blocks[0] if len(blocks) == 1 else np.hstack(blocks)

    def log_odds(self, start: int, stop: int, columns: slice) -> Array:
        odds = self._products_of(self._contexts[start:stop], self._heads.opposed, columns)
        return np.asarray(np.negative(odds, out=odds))

    @cached_property
    def _remembered(self) -> Array | None:
        """The click probabilities of the whole batch, for the greedy plan and the optimistic one; None if too many."""
        if len(self) * self._heads.count > REMEMBERED:
            return None
        return self._computed(0, len(self), slice(0, self._heads.count))

    def _computed(self, start: int, stop: int, columns: slice) -> Array:
        chances = np.empty((stop - start, columns.stop - columns.start), dtype=self._heads.dtype)
        for block in blocks_of(columns):
            part = chances[:, block.start - columns.start : block.stop - columns.start]
            odds = product(self._contexts[start:stop], self._heads.opposed, block)
            np.minimum(odds, self._heads.steepest, out=odds)
            np.exp(odds, out=odds)
            odds += 1
            np.reciprocal(odds, out=part)
        return chances

    def probabilities(self, start: int, stop: int, columns: slice | Ints) -> Array:
        if not isinstance(columns, slice):
            return self.probabilities(start, stop, slice(0, self._heads.count)).take(columns, axis=1)
        known = self._remembered
        return self._computed(start, stop, columns) if known is None else known[start:stop, columns]

    def widths(self, start: int, stop: int, columns: slice) -> Array:
        squares = self._products_of(self._products[start:stop], self._heads.spreads, columns)
        np.maximum(squares, 0, out=squares)
        return np.asarray(np.sqrt(squares, out=squares))
