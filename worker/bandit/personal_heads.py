"""The planning kernel of the personal model."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints, row_products
from worker.bandit.click_model import inputs

if TYPE_CHECKING:  # the model makes its heads: it imports this file
    from worker.bandit.personal import PersonalModel


class PersonalHeads:
    """The kernel for the arms `shown`: log-odds are u·m_k, and width² is uᵀ W_k u.

    So a context costs a product of u with the coefficients m_k of all arms, and one of its n(n+1)/2 products u_i u_j
    with the packed covariances W_k.
    """

    def __init__(self, model: PersonalModel, shown: Ints, dtype: DTypeLike) -> None:
        self._model, self._shown, self._dtype = model, shown, np.dtype(dtype)
        # Beyond this, e^−u leaves the number range.
        self._steepest = 80.0 if self._dtype == np.float32 else 600.0
        self._opposed = np.ascontiguousarray(-model.heads_of_arms[shown].T, dtype=dtype)

    @property
    def coefficients(self) -> Array:
        return self._opposed

    @cached_property
    def _spreads(self) -> Array:
        """The packed covariances, (n(n+1)/2, columns)."""
        return np.ascontiguousarray(self._model.packed_covariances[self._shown].T, dtype=self._dtype)

    def _inputs(self, contexts: Floats) -> Array:
        return inputs(contexts).astype(self._dtype)

    def log_odds(self, contexts: Floats) -> Array:
        odds = row_products(self._inputs(contexts), self._opposed)
        return np.negative(odds, out=odds)

    def probabilities(self, contexts: Floats) -> Array:
        odds = row_products(self._inputs(contexts), self._opposed)
        np.minimum(odds, self._steepest, out=odds)
        np.exp(odds, out=odds)
        odds += 1
        return np.reciprocal(odds, out=odds)

    def widths(self, contexts: Floats) -> Array:
        squares = row_products(products(self._inputs(contexts)), self._spreads)
        np.maximum(squares, 0, out=squares)
        return np.sqrt(squares, out=squares)


def products(contexts: Array) -> Array:
    """Return the products u_i u_j, i ≤ j, of each row: (r, n) → (r, n(n+1)/2)."""
    rows, columns = triangle(contexts.shape[1])
    result: Array = contexts.take(rows, axis=1)
    result *= contexts.take(columns, axis=1)
    return result


@cache
def triangle(size: int) -> tuple[Ints, Ints]:
    """Return the indices of an upper triangle; a batch of few sessions would wait for them to be made."""
    return np.triu_indices(size)
