"""The precision of a hierarchical parameter: a part Γ that all arms share, effects b of positions, and own parts v_k.

With u = [1; x] (n = d+1 numbers) and a_k = [1; features of arm k] (m numbers), the log-odds of a display at position h
are u·(Γ a_k + v_k) + b_h, with b = 0 at the first position and P effects after it. Every display of arm k adds w u uᵀ
to its information G_k, and w u to the column of its position in C_k. With the prior Λ_Γ of vec(Γ), variance 1 for every
b_h, the prior Λ of every v_k (both diagonal) and D_k = Λ + G_k, all operations use the Schur complement of the own
parts. For the shared parameter (vec(Γ); b) and A_k = [a_kᵀ ⊗ I, 0; 0, I], it is

    S   = diag(Λ_Γ, I) + Σ_k A_kᵀ [[Λ − Λ D_k⁻¹ Λ, Λ D_k⁻¹ C_k], [·, diag(1ᵀC_k) − C_kᵀ D_k⁻¹ C_k]] A_k
    W_k = D_k⁻¹ + T_k M_k T_kᵀ,   T_k = D_k⁻¹ [Λ, −C_k],   M_k = A_k S⁻¹ A_kᵀ

where 1ᵀC_k is the first row of C_k, as u begins with 1, and W_k (n, n) is the covariance of Γ a_k + v_k.

No (nm + P + Kn)² matrix is ever formed: memory is O(K n²), a factorisation O(K n³ + (nm)³). vec() stacks columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from worker.bandit.arrays import Floats, Ints, chosen
from worker.bandit.estimators import ByArm
from worker.errors import EstimationError

DRAWN_AT_ONCE = 8

Parts = tuple[Floats, Floats, Floats]  # Γ (n, m), b (P,), v (K, n)


@dataclass(frozen=True, kw_only=True, eq=False)
class Hierarchy:
    """The information about Γ, b and all v_k so far; a value, never changed in place.

    Parameters
    ----------
    features : (K, m), a_k; the first column is 1
    prior : (n, m), the diagonal of Λ_Γ
    own : (n,), the diagonal of Λ
    information : (K, n, n), G_k
    crossing : (K, n, P), C_k
    inherited : (nm+P, nm+P), what arms that were integrated out have said about (vec(Γ); b); None if none were

    Examples
    --------
    >>> prior = Hierarchy(features=np.ones((2, 1)), prior=np.ones((2, 1)), own=np.ones(2),
    ...                   information=np.zeros((2, 2, 2)), crossing=np.zeros((2, 2, 0)))
    >>> prior.covariances[0]
    array([[2., 0.],
           [0., 2.]])
    """

    features: Floats
    prior: Floats
    own: Floats
    information: Floats
    crossing: Floats
    inherited: Floats | None = None
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

    @property
    def positions(self) -> int:
        """The number P of positions after the first."""
        return int(self.crossing.shape[2])

    @property
    def _shape(self) -> tuple[int, int]:
        return self.size, self.features.shape[1]

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
    def pulls(self) -> Floats:
        """D_k⁻¹ [G_k, C_k], (K, n, n+P): how much an arm's own displays say, against its prior."""
        pulls = np.empty((self.arms, self.size, self.size + self.positions))
        np.multiply(self.inverses, -self.own, out=pulls[:, :, : self.size])  # D⁻¹ G = I − D⁻¹ Λ
        diagonal = np.arange(self.size)
        pulls[:, diagonal, diagonal] += 1
        np.matmul(self.inverses, self.crossing, out=pulls[:, :, self.size :])
        return pulls

    def _said_by_arms(self) -> Floats:
        """Return the sum over arms in S: what their displays say about (vec(Γ); b)."""
        (n, m), positions = self._shape, self.positions
        said = np.zeros((n * m + positions,) * 2)
        # Λ − Λ D⁻¹ Λ = Λ D⁻¹ G: the sum is over small numbers where little is known, so nothing cancels.
        own, crossing = self.pulls[:, :, :n].reshape(self.arms, n * n), self.pulls[:, :, n:]
        blocks = self.own[:, None] * (self._pairs.T @ own).reshape(m, m, n, n)
        said[: n * m, : n * m] = blocks.transpose(0, 2, 1, 3).reshape(n * m, n * m)
        if positions:
            beside = self.features.T @ crossing.reshape(self.arms, n * positions)
            said[: n * m, n * m :] = (self.own[:, None] * beside.reshape(m, n, positions)).reshape(n * m, positions)
            said[n * m :, : n * m] = said[: n * m, n * m :].T
            explained = self.crossing.reshape(-1, positions).T @ crossing.reshape(-1, positions)
            said[n * m :, n * m :] = np.diag(self.crossing[:, 0].sum(axis=0)) - explained
        return (said + said.T) / 2

    @cached_property
    def whitening(self) -> Floats:
        """L with LᵀL = S⁻¹, lower triangular, (nm+P, nm+P)."""
        schur = self._said_by_arms() if self.inherited is None else self._said_by_arms() + self.inherited
        schur += np.diag(np.concatenate([self.prior.T.ravel(), np.ones(self.positions)]))
        try:
            whitening = np.tril(np.linalg.inv(np.linalg.cholesky(schur)))
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
        """M_k, the covariance of (Γ a_k; b), (K, n+P, n+P); one for all arms, (1, …), if they have no features."""
        (n, m), positions = self._shape, self.positions
        covariance = self.whitening.T @ self.whitening
        if m == 1:
            return covariance[None]
        reach = np.empty((self.arms, n + positions, n + positions))
        blocks = covariance[: n * m, : n * m].reshape(m, n, m, n).transpose(0, 2, 1, 3).reshape(m * m, n * n)
        reach[:, :n, :n] = (self._pairs @ blocks).reshape(self.arms, n, n)
        beside = (self.features @ covariance[: n * m, n * m :].reshape(m, -1)).reshape(self.arms, n, positions)
        reach[:, :n, n:], reach[:, n:, :n] = beside, beside.transpose(0, 2, 1)
        reach[:, n:, n:] = covariance[n * m :, n * m :]
        return reach

    @cached_property
    def covariances(self) -> Floats:
        """W_k, the covariance of an arm's coefficients Γ a_k + v_k, (K, n, n)."""
        left = -self.pulls  # T_k: how much of the shared part an arm's own part leaves
        left[:, :, : self.size] = self.inverses * self.own
        sums = _times(left, self.reach) @ left.transpose(0, 2, 1)
        sums += self.inverses
        return _symmetric(sums)

    @property
    def new_covariances(self) -> Floats:
        """W_k of arms without information, (K, n, n); one for all arms, (1, …), if they have no features."""
        return self.reach[:, : self.size, : self.size] + np.diag(1 / self.own)

    @cached_property
    def own_variances(self) -> Floats:
        """The posterior variance of each coefficient of v_k, (K, n)."""
        spread = np.einsum("kij,kij->ki", _times(self.pulls, self.reach), self.pulls)
        return np.asarray(np.diagonal(self.inverses, axis1=1, axis2=2) + spread)

    @cached_property
    def shared_variances(self) -> Floats:
        """The posterior variances of Γ, (n, m)."""
        return self._split((self.whitening**2).sum(axis=0))[0]

    @cached_property
    def log_determinant(self) -> float:
        """The logarithm of the determinant of A."""
        own = np.linalg.slogdet(self.inverses)[1].sum()
        return -float(own + 2 * np.log(np.diagonal(self.whitening)).sum())

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

    def times(self, shared: Floats, positions: Floats, own: Floats) -> Parts:
        """Return A v for v = (Γ, b, v_k)."""
        heads = self.coefficients(shared, own)
        seen = _apply(self.information, heads) + self.crossing @ positions
        weights = self.crossing[:, 0].sum(axis=0)
        by_position = (1 + weights) * positions + np.tensordot(self.crossing, heads, axes=([0, 1], [0, 1]))
        by_context = self.prior * shared + seen.T @ self.features
        if self.inherited is not None:
            more = self._split(self.inherited @ _stacked(shared, positions))
            by_context, by_position = by_context + more[0], by_position + more[1]
        return by_context, by_position, self.own * own + seen

    def solve(self, shared: Floats, positions: Floats, own: Floats) -> Parts:
        """Return A⁻¹ r for r = (r_Γ, r_b, r_v), in the same three parts."""
        alone = _apply(self.inverses, own)
        reduced = shared - _apply(self.information, alone).T @ self.features
        beside = positions - np.tensordot(self.crossing, alone, axes=([0, 1], [0, 1]))
        gamma, b = self._split(self.whitening.T @ (self.whitening @ _stacked(reduced, beside)))
        rest = own - _apply(self.information, self.features @ gamma.T) - self.crossing @ b
        return gamma, b, _apply(self.inverses, rest)

    def _split(self, flat: Floats) -> tuple[Floats, Floats]:
        """Return (vec(Γ); b) as Γ and b."""
        n, m = self._shape
        return np.asarray(flat[: n * m].reshape(m, n).T), flat[n * m :]

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[Parts]:
        """Yield draws (Γ, b, v_k) from N(0, A⁻¹)."""
        roots = np.asarray(np.linalg.cholesky(self.inverses), dtype=np.float64)
        for first in range(0, count, DRAWN_AT_ONCE):
            # Several at once: a product with one vector takes most of its time to read the matrices.
            normals = [
                (generator.standard_normal(len(self.whitening)), generator.standard_normal((self.arms, self.size)))
                for _ in range(min(DRAWN_AT_ONCE, count - first))
            ]
            shared = [self._split(self.whitening.T @ normal) for normal, _ in normals]
            reached = [
                np.concatenate([self.features @ gamma.T, np.broadcast_to(b, (self.arms, len(b)))], axis=1)
                for gamma, b in shared
            ]
            own = roots @ np.stack([normal for _, normal in normals], axis=2)
            own -= self.pulls @ np.stack(reached, axis=2)
            for (gamma, b), v in zip(shared, np.ascontiguousarray(own.transpose(2, 0, 1)), strict=True):
                yield gamma, b, v

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def plus(self, displays: ByArm, weights: Floats) -> Hierarchy:
        """Add Σ w u uᵀ of displays, `weights` (m,) in their own order."""
        information, crossing = self.information.copy(), self.crossing
        for shown, sums in displays.squares(weights):
            information[shown] += sums
        if self.positions:
            crossing = crossing + displays.sums_by_position(weights, arms=self.arms, positions=self.positions)
        return replace(self, information=information, crossing=crossing, before=(self, displays.shown))

    def faded(self, keep: float) -> Hierarchy:
        """Forget: A ← Λ + γ (A − Λ)."""
        inherited = None if self.inherited is None else keep * self.inherited
        return replace(
            self,
            information=keep * self.information,
            crossing=keep * self.crossing,
            inherited=inherited,
            before=None,
        )

    def with_features(self, features: Floats) -> Hierarchy:
        """Return the same information about arms with other features, (K, m), or about more arms."""
        more = ((0, len(features) - self.arms), (0, 0), (0, 0))
        return replace(
            self,
            features=features,
            information=np.pad(self.information, more),
            crossing=np.pad(self.crossing, more),
            before=None,
        )

    def choose_columns(self, rows: Ints, ads: Ints, features: Floats, prior: Floats, own: Floats) -> Hierarchy:
        """Return the information about these rows of Γ and v_k, and columns of Γ; −1 for one without information.

        `features` (K, m), `prior` (n, m) and `own` (n,) are those of the result.
        """
        inherited = self.inherited
        if inherited is not None:
            gaps = (rows < 0) | (ads[:, None] < 0)
            places = np.where(gaps, -1, ads[:, None] * self.size + rows)  # vec() stacks columns
            places = np.append(places, self.prior.size + np.arange(self.positions))
            inherited = chosen(chosen(inherited, places, 0), places, 1)
        return Hierarchy(
            features=features,
            prior=prior,
            own=own,
            information=chosen(chosen(self.information, rows, 1), rows, 2),
            crossing=chosen(self.crossing, rows, 1),
            inherited=inherited,
        )

    def with_positions(self, positions: int) -> Hierarchy:
        """Return the same information with further positions, of which nothing is known."""
        more = max(0, positions - self.positions)
        inherited = None if self.inherited is None else np.pad(self.inherited, ((0, more), (0, more)))
        return replace(
            self, crossing=np.pad(self.crossing, ((0, 0), (0, 0), (0, more))), inherited=inherited, before=None
        )

    def choose_arms(self, arms: Sequence[int]) -> Hierarchy:
        """Return the information about Γ, b and these arms alone; the own parts of the others are integrated out."""
        chosen = list(arms)
        gone = sorted(set(range(self.arms)) - set(chosen))
        left = self._of(chosen)
        return replace(left, inherited=self._inherited_from(gone)) if gone else left

    def with_new(self, arms: Ints) -> Hierarchy:
        """Forget the own parts of arms: what their displays have said about Γ and b stays."""
        information, crossing = self.information.copy(), self.crossing.copy()
        information[arms], crossing[arms] = 0.0, 0.0
        inherited = self._inherited_from(arms.tolist())
        return replace(self, information=information, crossing=crossing, inherited=inherited, before=(self, arms))

    def _inherited_from(self, arms: Sequence[int]) -> Floats:
        said = self._of(arms)._said_by_arms()
        return said if self.inherited is None else self.inherited + said

    def _of(self, arms: Sequence[int]) -> Hierarchy:
        return replace(
            self,
            features=self.features[arms],
            information=self.information[arms],
            crossing=self.crossing[arms],
            before=None,
        )


def _stacked(shared: Floats, positions: Floats) -> Floats:
    """Return (vec(Γ); b)."""
    return np.concatenate([shared.T.ravel(), positions])


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
