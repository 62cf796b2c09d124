"""Contexts on any scale: centre and scale of every number, estimated once and kept (docs/design.md §5).

Ages, cents and seconds stand beside marks of 0 and 1. The first fold estimates the mean and the standard deviation of
every number from all sessions so far, at least `LEAST_SESSIONS`. From then on the model works on

    clip((x − centre) / scale, ±8)          a missing number is 0, the mean

so that priors, β and gates mean the same everywhere. Columns of categories have centre 0 and scale 1, and a number that
was constant has scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats
from worker.errors import InputError

#: Fewest sessions that centre and scale are estimated from; with fewer, their observations wait.
LEAST_SESSIONS: Final = 100
#: Largest absolute value of a standardised number.
LARGEST_STANDARD: Final = 8.0
#: A number whose values differ by less than this share of the largest was constant, up to rounding.
_CONSTANT: Final = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standardisation:
    """Centre (d,) and scale (d,) of contexts."""

    centre: Floats
    scale: Floats

    def __post_init__(self) -> None:
        if self.centre.ndim != 1 or self.centre.shape != self.scale.shape:
            raise InputError("standardisation: centre and scale must be lists of the same length")
        if not (np.isfinite(self.centre).all() and np.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise InputError("standardisation: centre and scale must be finite, and scale above zero")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Standardisation):
            return NotImplemented
        return np.array_equal(self.centre, other.centre) and np.array_equal(self.scale, other.scale)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def estimate(cls, contexts: Floats, numbers: NDArray[np.bool_] | None = None) -> Standardisation:
        """Return mean and standard deviation of contexts (n, d); only of the columns `numbers`, (d,), if given.

        Missing values count for nothing. Values are divided by the largest before they are squared, so that none of
        them overflows.

        >>> Standardisation.estimate(np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]]))
        Standardisation(centre=array([2., 5.]), scale=array([1., 1.]))
        """
        there = np.isfinite(contexts)
        known = np.where(there, contexts, 0.0)
        count = np.maximum(there.sum(axis=0), 1)
        largest = np.abs(known).max(axis=0, initial=0.0)
        unit = np.where(largest > 0, largest, 1.0)
        with np.errstate(under="ignore"):
            parts = known / unit
            mean = parts.sum(axis=0) / count
            squares = np.where(there, parts - mean, 0.0) ** 2
            deviation = np.sqrt(squares.sum(axis=0) / count)
            centre, scale = mean * unit, deviation * unit
        varies = (deviation > _CONSTANT) & (scale > 0)
        if numbers is not None:
            centre, varies = np.where(numbers, centre, 0.0), varies & numbers
        return cls(centre=centre, scale=np.where(varies, scale, 1.0))

    def apply(self, contexts: Floats) -> Floats:
        """Return contexts (n, d) standardised; every number depends on itself alone."""
        with np.errstate(over="ignore"):
            standard = (contexts - self.centre) / self.scale
        np.maximum(standard, -LARGEST_STANDARD, out=standard)  # two calls in place of `clip`, which is slow for few
        np.minimum(standard, LARGEST_STANDARD, out=standard)
        return without_gaps(standard)


def without_gaps(contexts: Floats) -> Floats:
    """Return contexts with 0 in place of missing numbers.

    >>> without_gaps(np.array([[1.0, np.nan]]))
    array([[1., 0.]])
    """
    gaps = np.isnan(contexts)
    return np.where(gaps, 0.0, contexts) if gaps.any() else contexts
