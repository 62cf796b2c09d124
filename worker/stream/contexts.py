"""Contexts in bulk: packed in memory, one array for planning and folding, on any scale.

Ages, cents and seconds stand next to marks of 0 and 1. The first fold estimates the mean and the standard deviation of
every number from all sessions so far, at least `LEAST_SESSIONS` (docs/design.md §5). From then on the model works on

    clip((x − centre) / scale, ±8)          a missing number is 0, the mean

so that priors, β and gates mean the same everywhere. Columns of categories have centre 0 and scale 1, and a number that
was constant has scale 1.

Until enough sessions have come, the version itself carries those of the windows so far, as `ObservedSessions`. So
nothing is lost, and a learner that restarts has them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats, Ints
from worker.bandit.click_model import Observations
from worker.errors import InputError

#: A number of a context that is missing. One object, so that contexts with missing numbers are equal to themselves: a
#: tuple compares its items by identity first.
MISSING: Final = nan


@cache
def _layout(dim: int) -> Struct:
    return Struct(f"<{dim}d")


def pack_context(context: tuple[float, ...]) -> bytes:
    """Pack a context as little-endian float64, a third of the memory of the tuple."""
    return _layout(len(context)).pack(*context)


def stack_packed(packed: Sequence[bytes], dim: int) -> NDArray[np.float64]:
    """Stack n packed contexts of `dim` numbers into a read-only (n, d) array.

    Three times as fast as `numpy.array` on tuples, which inspects every number.

    >>> stack_packed([pack_context((1.0, 2.0)), pack_context((3.0, 4.0))], 2)
    array([[1., 2.],
           [3., 4.]])
    """
    return np.frombuffer(b"".join(packed), "<f8").reshape(len(packed), dim)


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


#: Names of the arrays in the record of a version.
ARRAYS: Final = ("contexts", "rows", "arms", "positions", "clicked")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSessions:
    """Sessions in the order of their keys, window by window, and their displays that count.

    Parameters
    ----------
    contexts : (n, d), as they came, one row per session; NaN where a number is missing
    rows, arms, positions : (m,), per display its session, the index of its arm, and its position from 1 on
    clicked : (m,), 1.0 or 0.0
    """

    contexts: Floats
    rows: Ints
    arms: Ints
    positions: Ints
    clicked: Floats

    def __len__(self) -> int:
        return len(self.contexts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObservedSessions):
            return NotImplemented
        mine, theirs = self.pack(), other.pack()
        return all(np.array_equal(mine[name], theirs[name], equal_nan=True) for name in ARRAYS)

    __hash__ = None  # type: ignore[assignment]

    def followed_by(self, later: ObservedSessions) -> ObservedSessions:
        """Return these sessions and later ones."""
        return ObservedSessions(
            contexts=np.concatenate([self.contexts, later.contexts]),
            rows=np.concatenate([self.rows, later.rows + len(self)]),
            arms=np.concatenate([self.arms, later.arms]),
            positions=np.concatenate([self.positions, later.positions]),
            clicked=np.concatenate([self.clicked, later.clicked]),
        )

    def observations(self, prepare: Callable[[Floats], Floats]) -> Observations:
        """Return the displays, without the sessions that have none; `prepare` is applied to the contexts."""
        rows, sessions = np.unique(self.rows, return_inverse=True)
        return Observations(
            contexts=prepare(self.contexts[rows]),
            sessions=sessions.astype(np.intp),
            arms=self.arms,
            positions=self.positions - 1,
            clicked=self.clicked,
        )

    def renamed(self, indices: Sequence[int]) -> ObservedSessions:
        """Return the same under other indices of arms, one per old index; displays of arms with −1 are left out."""
        arms = np.array(indices, dtype=np.intp)[self.arms]
        kept = arms >= 0
        return replace(
            self,
            rows=self.rows[kept],
            arms=arms[kept],
            positions=self.positions[kept],
            clicked=self.clicked[kept],
        )

    # ── in the record of a version ───────────────────────────────────────────────────────────────────────────────────

    def pack(self) -> dict[str, Floats]:
        """Return the arrays by name."""
        return {name: np.asarray(getattr(self, name), dtype=np.float64) for name in ARRAYS}

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, dim: int, arms: int) -> ObservedSessions:
        """Return what `pack` took apart; raise `InputError` if it is damaged."""
        contexts, rows, shown, positions, clicked = (arrays[name] for name in ARRAYS)
        if contexts.ndim != 2 or contexts.shape[1] != dim or np.isinf(contexts).any():
            raise InputError(f"pending: contexts must be rows of {dim} numbers")
        if any(one.shape != (len(rows),) for one in (rows, shown, positions, clicked)):
            raise InputError("pending: rows, arms, positions and clicked must be lists of the same length")
        for name, numbers, least, most in (
            ("rows", rows, 0, len(contexts) - 1),
            ("arms", shown, 0, arms - 1),
            ("positions", positions, 1, 2**53),
            ("clicked", clicked, 0, 1),
        ):
            if not ((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers))).all():
                raise InputError(f"pending: {name} must be whole numbers from {least} to {most}")
        return cls(
            contexts=contexts,
            rows=rows.astype(np.intp),
            arms=shown.astype(np.intp),
            positions=positions.astype(np.intp),
            clicked=clicked,
        )
