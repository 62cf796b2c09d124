"""The precision of a hierarchical parameter: a part Γ that all arms share, and a part v_k of each arm's own.

With u = [1; x] (n = d+1 numbers) and a_k = [1; features of arm k] (m numbers), the log-odds of a display are
u·(Γ a_k + v_k). Every display of arm k adds w u uᵀ to its information G_k. With the prior Λ_Γ of vec(Γ), the prior
Λ = diag(λ_b, λ_t, …, λ_t) of every v_k, and D_k = Λ + G_k, all operations use the Schur complement of the own parts:

    S   = Λ_Γ + Σ_k (a_k a_kᵀ) ⊗ (Λ − Λ D_k⁻¹ Λ)                          (nm, nm)
    W_k = D_k⁻¹ + D_k⁻¹ Λ · M_k · Λ D_k⁻¹,  M_k = (a_kᵀ ⊗ I) S⁻¹ (a_k ⊗ I)  the covariance of Γ a_k + v_k, (n, n)

No (nm + Kn)² matrix is ever formed: memory is O(K n²), a factorisation O(K n³ + (nm)³). vec() stacks columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.bandit.estimators import ByArm, smallest_eigenvalue
from worker.errors import EstimationError

DRAWN_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Hierarchy:
    """The information about Γ and all v_k so far; a value, never changed in place.

    Parameters
    ----------
    features : (K, m), a_k; the first column is 1
    shared : (nm, nm), Λ_Γ, and what arms that were integrated out have said about Γ
    own : (n,), the diagonal of Λ
    information : (K, n, n), G_k

    Examples
    --------
    >>> prior = Hierarchy(features=np.ones((2, 1)), shared=np.eye(2), own=np.ones(2), information=np.zeros((2, 2, 2)))
    >>> prior.covariances[0]
    array([[2., 0.],
           [0., 2.]])
    """

    features: Floats
    shared: Floats
    own: Floats
    information: Floats
    #: The hierarchy that this one was made from, and the arms whose information differs: saves factorising the others.
    before: tuple[Hierarchy, Ints] | None = None

    @property
    def arms(self) -> int:
        """The number K of arms."""
        return len(self.features)

    @property
    def size(self) -> int:
        """The number n = d+1 of coefficients of an arm."""
        return len(self.own)

    # ── factorising ──────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def inverses(self) -> Floats:
        """D_k⁻¹, (K, n, n)."""
        if self.before is None or len(self.before[1]) == self.arms:
            inverses = _inverses(self.information, self.own)
        else:
            parent, touched = self.before
            inverses = parent.inverses.copy()
            inverses[touched] = _inverses(self.information[touched], self.own)
        object.__setattr__(self, "before", None)  # no longer needed, and large
        return inverses

    @cached_property
    def kept(self) -> Floats:
        """D_k⁻¹ G_k = I − D_k⁻¹ Λ, (K, n, n): how much an arm's own displays say, against its prior."""
        kept = self.inverses * -self.own
        diagonal = np.arange(self.size)
        kept[:, diagonal, diagonal] += 1
        return kept

    @cached_property
    def whitening(self) -> Floats:
        """L with LᵀL = S⁻¹, lower triangular, (nm, nm)."""
        n, m = self.size, self.features.shape[1]
        # Λ − Λ D⁻¹ Λ = Λ D⁻¹ G: the sum is over small numbers where little is known, so nothing cancels.
        sums = self._pairs.T @ self.kept.reshape(self.arms, n * n)
        blocks = self.own[:, None] * sums.reshape(m, m, n, n)
        schur = self.shared + blocks.transpose(0, 2, 1, 3).reshape(n * m, n * m)
        try:
            whitening = np.tril(np.linalg.inv(np.linalg.cholesky((schur + schur.T) / 2)))
        except np.linalg.LinAlgError:
            raise EstimationError("the precision is not positive definite in the shared part") from None
        if not np.isfinite(whitening).all():
            raise EstimationError("the precision has numbers too large or too small to work with")
        return whitening

    @property
    def _pairs(self) -> Floats:
        """a_k a_kᵀ, (K, m²)."""
        columns = self.features.shape[1]
        return (self.features[:, :, None] * self.features[:, None, :]).reshape(self.arms, columns * columns)

    @cached_property
    def reach(self) -> Floats:
        """M_k, the covariance of Γ a_k, (K, n, n); one for all arms, (1, n, n), if they have no features."""
        n, m = self.size, self.features.shape[1]
        covariance = self.whitening.T @ self.whitening
        if m == 1:
            return covariance[None]
        blocks = covariance.reshape(m, n, m, n).transpose(0, 2, 1, 3).reshape(m * m, n * n)
        return np.asarray((self._pairs @ blocks).reshape(self.arms, n, n))

    @cached_property
    def covariances(self) -> Floats:
        """W_k, the covariance of an arm's coefficients Γ a_k + v_k, (K, n, n)."""
        shrinkage = self.inverses * self.own  # D⁻¹ Λ: how much of the shared part an arm's own part leaves
        sums = _times(shrinkage, self.reach) @ shrinkage.transpose(0, 2, 1)
        sums += self.inverses
        return _symmetric(sums)

    @cached_property
    def own_variances(self) -> Floats:
        """The posterior variance of each coefficient of v_k, (K, n)."""
        spread = np.einsum("kij,kij->ki", _times(self.kept, self.reach), self.kept)
        return np.asarray(np.diagonal(self.inverses, axis1=1, axis2=2) + spread)

    @property
    def is_positive_definite(self) -> bool:
        """Whether every direction carries information; false instead of an error."""
        try:
            with np.errstate(all="ignore"):
                np.linalg.cholesky(self.information + np.diag(self.own))
                return bool(np.isfinite(self.whitening).all() and np.isfinite(self.inverses).all())
        except (EstimationError, np.linalg.LinAlgError):
            return False

    # ── algebra ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def coefficients(self, shared: Floats, own: Floats) -> Floats:
        """Return Γ a_k + v_k: (n, m), (K, n) → (K, n)."""
        return np.asarray(self.features @ shared.T + own)

    def times(self, shared: Floats, own: Floats) -> tuple[Floats, Floats]:
        """Return A v for v = (Γ, v_k)."""
        seen = _apply(self.information, self.coefficients(shared, own))
        prior = _columns(self.shared @ shared.T.ravel(), shared.shape)
        return prior + seen.T @ self.features, self.own * own + seen

    def solve(self, shared: Floats, own: Floats) -> tuple[Floats, Floats]:
        """Return A⁻¹ r for r = (r_Γ, r_v), in the same two parts."""
        alone = _apply(self.inverses, own)
        reduced = shared - _apply(self.information, alone).T @ self.features
        solution = _columns(self.whitening.T @ (self.whitening @ reduced.T.ravel()), shared.shape)
        rest = own - _apply(self.information, self.features @ solution.T)
        return solution, _apply(self.inverses, rest)

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield draws (Γ, v_k) from N(0, A⁻¹)."""
        n, m = self.size, self.features.shape[1]
        roots = np.asarray(np.linalg.cholesky(self.inverses), dtype=np.float64)
        for first in range(0, count, DRAWN_AT_ONCE):
            # Several at once: a product with one vector takes most of its time to read the matrices.
            normals = [
                (generator.standard_normal(n * m), generator.standard_normal((self.arms, n)))
                for _ in range(min(DRAWN_AT_ONCE, count - first))
            ]
            shared = [_columns(self.whitening.T @ normal, (n, m)) for normal, _ in normals]
            own = roots @ np.stack([normal for _, normal in normals], axis=2)
            own -= self.kept @ np.stack([self.features @ one.T for one in shared], axis=2)
            yield from zip(shared, np.ascontiguousarray(own.transpose(2, 0, 1)), strict=True)

    @property
    def smallest_eigenvalue(self) -> float:
        """The smallest eigenvalue of A."""
        shape, count = (self.size, self.features.shape[1]), len(self.shared)

        def solve(vector: Floats) -> Floats:
            shared, own = self._solve_briefly(_columns(vector[:count], shape), vector[count:].reshape(-1, self.size))
            return np.concatenate([shared.T.ravel(), own.ravel()])

        return smallest_eigenvalue(solve, count + self.arms * self.size)

    def _solve_briefly(self, shared: Floats, own: Floats) -> tuple[Floats, Floats]:
        """Return `solve` with half of its products, because G_k = D_k − Λ; the last bits differ."""
        alone = _apply(self.inverses, own)
        reduced = shared - (own - self.own * alone).T @ self.features
        solution = _columns(self.whitening.T @ (self.whitening @ reduced.T.ravel()), shared.shape)
        pull = self.features @ solution.T
        return solution, _apply(self.inverses, own + self.own * pull) - pull

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def plus(self, displays: ByArm, weights: Floats) -> Hierarchy:
        """Add Σ w u uᵀ of displays, `weights` (m,) in their own order."""
        information = self.information.copy()
        for shown, sums in displays.squares(weights):
            information[shown] += sums
        return replace(self, information=information, before=(self, displays.shown))

    def faded(self, keep: float) -> Hierarchy:
        """Forget: G_k ← γ G_k."""
        return replace(self, information=keep * self.information, before=None)

    def with_own(self, own: Floats) -> Hierarchy:
        """Return the same information under another prior of the own parts."""
        return replace(self, own=own, before=None)

    def with_features(self, features: Floats) -> Hierarchy:
        """Return the same information about arms with other features, (K, m), or about more arms."""
        more = len(features) - self.arms
        added = np.zeros((more, self.size, self.size))
        information = np.concatenate([self.information, added]) if more else self.information
        return replace(self, features=features, information=information, before=None)

    def choose_arms(self, arms: Sequence[int]) -> Hierarchy:
        """Return the information about Γ and these arms alone; the own parts of the others are integrated out."""
        chosen = list(arms)
        gone = sorted(set(range(self.arms)) - set(chosen))
        shared = self.shared
        if gone:
            left = replace(self, features=self.features[gone], information=self.information[gone], before=None)
            inverse = np.linalg.inv(left.whitening)
            shared = inverse @ inverse.T  # S of these arms: Λ_Γ and their pull on Γ
            shared = (shared + shared.T) / 2
        return replace(
            self, features=self.features[chosen], shared=shared, information=self.information[chosen], before=None
        )


def _columns(flat: Floats, shape: tuple[int, ...]) -> Floats:
    """Return vec⁻¹: stacked columns as an array of this shape."""
    return np.asarray(flat.reshape(shape[1], shape[0]).T)


def _apply(matrices: Floats, vectors: Floats) -> Floats:
    """Multiply each matrix by its vector: (K, n, n), (K, n) → (K, n)."""
    return np.asarray(np.matmul(matrices, vectors[:, :, None])[:, :, 0])


def _inverses(information: Floats, own: Floats) -> Floats:
    try:
        inverses = np.linalg.inv(information + np.diag(own))
    except np.linalg.LinAlgError:
        raise EstimationError("the precision is not positive definite: an arm has none") from None
    return _symmetric(np.asarray(inverses, dtype=np.float64))


def _symmetric(matrices: Floats) -> Floats:
    """Return matrices that are symmetric up to rounding as ones that are exactly so."""
    sums = matrices + matrices.transpose(0, 2, 1)
    sums *= 0.5
    return sums


def _times(matrices: Floats, right: Floats) -> Floats:
    """Multiply each matrix by its own on the right, or all by the only one: (K, n, n), (K or 1, n, n) → (K, n, n)."""
    if len(right) == 1:  # one large product instead of many small ones
        return np.asarray((matrices.reshape(-1, matrices.shape[2]) @ right[0]).reshape(matrices.shape))
    return np.asarray(matrices @ right)
