"""Columns of contexts, or of features of arms, grouped by the feature that was declared.

A category of 50 values has 50 columns, of which one is 1; a number has one column. Prior precisions belong to features,
not to columns: a feature g with q_g = E‖x_g‖² has the precision G q_g at first, G being the number of features, so that
each explains the same share of the log-odds for any number of columns (docs/math.md §9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.bandit.arrays import ArrayValue, Floats, Ints, chosen
from worker.errors import EstimationError, InputError

#: λ_b, the precision of intercepts.
INTERCEPT_PRECISION = 0.5
#: Bounds of λ_g, in multiples of q_g and of G q_g. Without the lower one, few sessions and many features make the data
#: separable, λ_g collapses, every probability goes to 0 or 1, and exploration ends for ever.
LEAST, MOST = 0.25, 1000.0
#: Least q_g: a feature that hardly any session has must not get a prior that allows anything.
LEAST_SQUARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups(ArrayValue):
    """Number of columns of each feature, (G,), and q_g, its mean squared length, (G,).

    Examples
    --------
    A number and a category of three values that everybody has:

    >>> groups = Groups(widths=np.array([1, 3]), squares=np.array([1.0, 1.0]))
    >>> groups.first, groups.by_column(groups.first)
    (array([2., 2.]), array([2., 2., 2., 2.]))
    """

    widths: Ints
    squares: Floats

    def __post_init__(self) -> None:
        for name, kind in (("widths", np.intp), ("squares", np.float64)):
            object.__setattr__(self, name, np.array(getattr(self, name), dtype=kind))
        if self.widths.ndim != 1 or self.widths.shape != self.squares.shape or (self.widths < 1).any():
            raise InputError("features must have a number of columns each, and a mean square")
        if not (np.isfinite(self.squares).all() and (self.squares > 0).all()):
            raise InputError("the mean square of a feature must be above zero")

    @classmethod
    def vector(cls, columns: int) -> Groups:
        """Return a plain vector of standardised numbers: one feature."""
        return cls(widths=np.array([columns]), squares=np.array([float(columns)]))

    @classmethod
    def alike(cls, widths: Sequence[int]) -> Groups:
        """Return features of these widths with q_g = 1: standardised numbers, and categories that everybody has."""
        return cls(widths=np.array(widths, dtype=np.intp), squares=np.ones(len(widths)))

    @classmethod
    def measured(cls, widths: Sequence[int], columns: Floats) -> Groups:
        """Return features of these widths with q_g as in some sessions: (n, columns)."""
        squares = np.add.reduceat((columns**2).mean(axis=0), np.cumsum([0, *widths[:-1]]))
        return cls(widths=np.array(widths), squares=np.maximum(squares, LEAST_SQUARE))

    @property
    def first(self) -> Floats:
        """The precision of each feature before any data, G q_g, (G,)."""
        return len(self.widths) * self.squares

    @property
    def firsts(self) -> Ints:
        """The first column of each feature, (G,)."""
        return np.cumsum(self.widths) - self.widths

    def by_column(self, values: Floats) -> Floats:
        """Return a value per feature as one per column: (G,) → (columns,)."""
        return np.repeat(values, self.widths)

    def continuing(self, before: Groups, columns: Ints) -> tuple[Groups, Ints]:
        """Return the features with q_g of those that they continue, and which these are, −1 for none, (G,).

        `columns`, (columns,), has the earlier column of each column, −1 for a new one.

        >>> Groups.alike([1, 3]).continuing(Groups.alike([2, 1]), np.array([-1, 0, 1, -1]))[1]
        array([-1,  0])
        """
        of_columns = np.append(np.repeat(np.arange(len(before.widths)), before.widths), -1)
        origins = np.full(len(self.widths), -1)
        np.maximum.at(origins, np.repeat(np.arange(len(self.widths)), self.widths), of_columns[columns])
        return Groups(widths=self.widths, squares=known_or(before.squares, self.squares, origins)), origins

    def sums(self, values: Floats) -> Floats:
        """Return the sums over the columns of each feature: (columns,) → (G,)."""
        return np.asarray(np.add.reduceat(values, self.firsts)) if len(values) else np.zeros(0)


def known_or(known: Floats, fresh: Floats, origins: Ints) -> Floats:
    """Return for each feature the known value of the one that it continues, else the fresh one, (G,)."""
    return np.where(origins < 0, fresh, chosen(known, origins, 0))


# ── priors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def own_prior(groups: Groups, strengths: Floats) -> Floats:
    """Return the diagonal of Λ, (n,)."""
    return np.concatenate([[INTERCEPT_PRECISION], groups.by_column(strengths)])


def shared_prior(base: Floats, ad_groups: Groups, strengths: Floats) -> Floats:
    """Return the diagonal of Λ_Γ, (n, m), from its first column."""
    return np.asarray(np.multiply.outer(base, np.concatenate([[1.0], ad_groups.by_column(strengths)])))


def bounded_strengths(known: Floats, lengths: Floats, groups: Groups) -> Floats:
    """Return λ_g within its bounds, from γ_g and the squared lengths of the coefficients, (G,)."""
    strengths = (known + 1) / (lengths + 1 / groups.first)
    if not np.isfinite(strengths).all():
        raise EstimationError("the strength of a feature is not finite")
    return np.asarray(np.clip(strengths, LEAST * groups.squares, MOST * groups.first))
