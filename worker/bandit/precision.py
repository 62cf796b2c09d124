"""The precision matrix A of the joint parameter [θ_x; θ_1 … θ_K], in block form.

Every observation is z = [x; onehot(k)], so A = λI + Σ w z zᵀ has a diagonal arm block:

    A = [[C, Bᵀ],      C  (d, d)  context
         [B, D]]       B  (K, d)  cross, a row per arm
                       D  (K,)    arms, the diagonal

and all operations use the Schur complement of D (docs/math.md §4), with U = B / D:

    S = (C − Uᵀ B)⁻¹ = LᵀL        zᵀA⁻¹z = ‖L(x − U_k)‖² + 1/D_k

No (d+K)² matrix is ever formed: memory is O(dK), a factorisation O(d²K + d³).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from worker.bandit.arrays import Floats, Ints, chosen, freeze_fields, frozen_array
from worker.bandit.estimators import ByArm
from worker.errors import EstimationError, InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Precision:
    """The information about all parameters so far; a value, never changed in place.

    Parameters
    ----------
    context : (d, d)
    cross : (K, d)
    arms : (K,)

    Examples
    --------
    >>> prior = Precision.diagonal(np.full(2, 2.0), np.full(3, 2.0))
    >>> prior.squared_widths(np.array([[0.0, 0.0]]))
    array([[0.5, 0.5, 0.5]])
    >>> shown = ByArm(np.array([[1.0, 0.0]]), sessions=np.array([0]), arms=np.array([1]))
    >>> once = prior.plus(shown, np.array([0.25]))
    >>> once.squared_widths(np.array([[1.0, 0.0]])).round(2)
    array([[0.95, 0.8 , 0.95]])
    """

    context: Floats
    cross: Floats
    arms: Floats = field(repr=False)

    def __post_init__(self) -> None:
        if np.ndim(self.context) != 2 or np.ndim(self.arms) != 1:
            raise InputError("precision.context must be d×d and precision.arms a list")
        dim, arms = len(self.context), len(self.arms)
        freeze_fields(self, context=(dim, dim), cross=(arms, dim), arms=(arms,))
        if not np.allclose(self.context, self.context.T, rtol=1e-9, atol=1e-12 * np.abs(self.context).max(initial=0)):
            raise InputError("precision.context must be symmetric")
        object.__setattr__(self, "context", _symmetric(self.context))

    @classmethod
    def diagonal(cls, context: Floats, arms: Floats) -> Precision:
        """Return the precision of independent parameters: (d,), (K,)."""
        return cls(context=np.diag(context), cross=np.zeros((len(arms), len(context))), arms=arms)

    @property
    def dim(self) -> int:
        """The number d of context features."""
        return len(self.context)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def centres(self) -> Floats:
        """U = B / D: the average context each arm was shown to, shrunk by the ridge, (K, d)."""
        centres = self.cross / self.arms[:, None]
        centres.flags.writeable = False
        return centres

    @cached_property
    def whitening(self) -> Floats:
        """L with LᵀL = (C − Uᵀ B)⁻¹, lower triangular, (d, d)."""
        if not (self.arms > 0).all():
            raise EstimationError("the precision is not positive definite: an arm has none")
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                schur = self.context - self.centres.T @ self.cross
                whitening = np.tril(np.linalg.inv(np.linalg.cholesky((schur + schur.T) / 2)))
        except np.linalg.LinAlgError:
            raise EstimationError("the precision is not positive definite in the context block") from None
        if not np.isfinite(whitening).all():
            raise EstimationError("the precision has numbers too large or too small to work with")
        whitening.flags.writeable = False
        return whitening

    def squared_widths(self, contexts: Floats) -> Floats:
        """Return zᵀA⁻¹z for every context and arm: (n, d) → (n, K)."""
        # Centring both sides keeps the expanded square from cancelling when contexts lie far from the origin.
        middle = self.centres.mean(axis=0)
        here = (contexts - middle) @ self.whitening.T
        there = (self.centres - middle) @ self.whitening.T
        squares = (here**2).sum(axis=1)[:, None] - 2 * here @ there.T + (there**2).sum(axis=1)
        return np.asarray(np.maximum(squares, 0.0) + 1 / self.arms)

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return zᵀA⁻¹z of chosen pairs only: contexts (n, d), arms (n, h) → (n, h)."""
        offsets = np.ascontiguousarray(contexts[:, None, :] - self.centres[arms]) @ self.whitening.T
        return np.asarray((offsets**2).sum(axis=2) + 1 / self.arms[arms])

    def times(self, context: Floats, arms: Floats) -> tuple[Floats, Floats]:
        """Return A v for v = [context; arms]."""
        return self.context @ context + self.cross.T @ arms, self.cross @ context + self.arms * arms

    def solve(self, context: Floats, arms: Floats) -> tuple[Floats, Floats]:
        """Return A⁻¹ r for r = [context; arms], in the same two parts."""
        reduced = context - self.centres.T @ arms
        solution = self.whitening.T @ (self.whitening @ reduced)
        return solution, arms / self.arms - self.centres @ solution

    def draw(self, normals_context: Floats, normals_arms: Floats) -> tuple[Floats, Floats]:
        """Turn standard normals (m, d) and (m, K) into m draws from N(0, A⁻¹)."""
        context = normals_context @ self.whitening
        return context, normals_arms / np.sqrt(self.arms) - context @ self.centres.T

    @cached_property
    def log_determinant(self) -> float:
        """The logarithm of the determinant of A."""
        return float(np.log(self.arms).sum() - 2 * np.log(np.diagonal(self.whitening)).sum())

    @property
    def is_positive_definite(self) -> bool:
        """Whether every direction carries information; false instead of an error."""
        try:
            return self.whitening is not None
        except EstimationError:
            return False

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def plus(self, displays: ByArm, weights: Floats) -> Precision:
        """Add Σ w z zᵀ of displays, `weights` (m,) in their own order; in the same order, the same bits."""
        contexts, sessions, arms = displays.inputs, displays.sessions, displays.arms
        per_session = np.bincount(sessions, weights=weights, minlength=len(contexts))
        grown = self.context + contexts.T @ (contexts * per_session[:, None])
        return Precision(
            context=(grown + grown.T) / 2,
            cross=self.cross + displays.sums(weights, arms=len(self.arms)),
            arms=self.arms + np.bincount(arms, weights=weights, minlength=len(self.arms)),
        )

    def with_arms(self, count: int, *, ridge: float) -> Precision:
        """Append `count` arms of which nothing is known but the prior."""
        return Precision(
            context=self.context,
            cross=np.vstack([self.cross, np.zeros((count, self.dim))]),
            arms=np.concatenate([self.arms, np.full(count, float(ridge))]),
        )

    def choose_columns(self, columns: Ints, prior: Floats) -> Precision:
        """Return the information about these columns of the context block, −1 for one with its `prior` alone."""
        context = chosen(chosen(self.context, columns, 0), columns, 1)
        context[columns < 0, columns < 0] = prior[columns < 0]
        return Precision(context=context, cross=chosen(self.cross, columns, 1), arms=self.arms)

    def choose_arms(self, arms: Sequence[int]) -> Precision:
        """Return the information about the context and these arms alone; the other arms are integrated out."""
        chosen = list(arms)
        gone = sorted(set(range(len(self.arms))) - set(chosen))
        lost = self.centres[gone].T @ self.cross[gone]
        return Precision(
            context=self.context - (lost + lost.T) / 2 if gone else self.context,
            cross=self.cross[chosen],
            arms=self.arms[chosen],
        )

    def forget(self, keep: float, *, context: Floats, arms: float) -> Precision:
        """Fade towards a prior with this diagonal: A ← γA + (1−γ)Λ."""
        return Precision(
            context=keep * self.context + np.diag((1 - keep) * context),
            cross=keep * self.cross,
            arms=keep * self.arms + (1 - keep) * arms,
        )


def _symmetric(matrix: Floats) -> Floats:
    """Return a matrix that is symmetric up to rounding as one that is exactly so, read-only."""
    if np.array_equal(matrix, matrix.T):
        return matrix
    return frozen_array(matrix / 2 + matrix.T / 2)
