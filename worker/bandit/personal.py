"""The click model that learns tastes: P(click on arm k | x) = σ(u·(Γ a_k + v_k)), u = [1; x], a_k = [1; features of k].

Γ (n, m) is shared by all arms: its first column is the base rate and the common effect of the context, further columns
say how features of arms change both. v_k (n,) is the arm's own. A new arm has v = 0 and no information: its
coefficients are what arms like it have taught, and its width says how little that is (docs/math.md §9).

Priors: intercepts, shared and own, ~ N(0, 1/λ_b); context coefficients of Γ ~ N(0, 1/(ρ d)); own tastes v_k[1:] ~
N(0, 1/λ_t). The d keeps the variance of the log-odds that contexts explain the same whatever d is. How strong tastes
are, λ_t, is learned by its evidence after each fold, and is part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.additive import INTERCEPT_PRECISION
from worker.bandit.arrays import Array, Floats, Ints, freeze_fields, frozen_array, row_products
from worker.bandit.click_model import Displays, Fit, Observations, arm_features, inputs
from worker.bandit.estimators import ByArm, Coefficients, estimate, inner
from worker.bandit.hierarchy import Hierarchy
from worker.errors import EstimationError, InputError

#: Bounds of λ_t, in multiples of d. Without the lower one, few sessions and many features make the data separable, λ_t
#: collapses, every probability goes to 0 or 1, and exploration ends for ever.
WEAKEST, STRONGEST = 0.25, 1000.0
EVIDENCE_STEPS = 2
AT_ONCE = 64  # contexts whose widths of chosen arms are computed at once


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonalModel:
    """The belief about Γ (n, m) and v_k (K, n); methods are documented in `ClickModel` and `LinearModel`.

    Examples
    --------
    One arm is for users with x > 0, the other for those with x < 0; nobody said so.

    >>> from worker.bandit.arrays import sigmoid
    >>> prior = PersonalModel.prior(dim=1, arms=2, ridge=1.0)
    >>> x = np.where(np.arange(400) % 2, 1.0, -1.0)
    >>> seen = Observations(contexts=x[:, None], sessions=np.arange(400), arms=np.arange(400) // 2 % 2,
    ...                     clicked=(x > 0) == (np.arange(400) // 2 % 2 == 0))
    >>> learned = prior.fold(seen, estimator="laplace").model
    >>> sigmoid(learned.log_odds(np.array([[1.0], [-1.0]]))).round(2)
    array([[0.99, 0.01],
           [0.01, 0.99]])
    """

    name: ClassVar[str] = "personal"
    fields: ClassVar[tuple[str, ...]] = (
        "shared",
        "own",
        "tastes",
        "precision.features",
        "precision.shared",
        "precision.information",
    )

    shared: Floats
    own: Floats
    precision: Hierarchy = field(repr=False)
    #: A factorisation costs far more than a step with an old one.
    reuses_information: ClassVar[bool] = True

    def __post_init__(self) -> None:
        size, features = self.precision.size, self.precision.features
        freeze_fields(self, shared=(size, features.shape[1]), own=(len(features), size))

    @classmethod
    def prior(
        cls, *, dim: int, arms: int, ridge: float, features: Floats | None = None, intercept: bool = True
    ) -> PersonalModel:
        if not intercept:
            raise InputError("the model personal has an intercept; only additive runs without")
        described = arm_features(arms, features)
        size, columns = dim + 1, described.shape[1]
        shared = np.full((size, columns), ridge * dim)
        shared[0] = INTERCEPT_PRECISION
        # Features share the variance that one would have, for the reason that contexts do.
        shared[:, 1:] *= max(1, columns - 1)
        precision = Hierarchy(
            features=described,
            shared=np.diag(shared.T.ravel()),
            own=_own_precision(dim, float(dim)),
            information=np.zeros((arms, size, size)),
        )
        return cls(shared=np.zeros((size, columns)), own=np.zeros((arms, size)), precision=precision)

    @classmethod
    def certain(cls, coefficients: Floats) -> PersonalModel:
        """Return given coefficients (K, n) of arms with the prior's precision: the truth of a simulated world."""
        arms, size = coefficients.shape
        return replace(cls.prior(dim=size - 1, arms=arms, ridge=1.0), own=coefficients)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = True) -> PersonalModel:
        own, tastes = frozen_array(arrays["own"]), frozen_array(arrays["tastes"], (1,))
        if own.ndim != 2 or own.shape[1] < 2:
            raise InputError("own must be a row of d+1 numbers per arm")
        arms, size = own.shape
        if tastes[0] <= 0:
            raise InputError(f"tastes must be above zero, not {tastes[0]}")
        described = frozen_array(arrays["precision.features"])
        if described.ndim != 2 or len(described) != arms or not described.shape[1] or (described[:, 0] != 1).any():
            raise InputError("precision.features must be a row per arm that begins with 1")
        columns = described.shape[1]
        shared = frozen_array(arrays["precision.shared"], (size * columns,) * 2)
        packed = frozen_array(arrays["precision.information"], (arms, size * (size + 1) // 2))
        precision = Hierarchy(
            features=described,
            shared=shared / 2 + shared.T / 2,
            own=_own_precision(size - 1, float(tastes[0])),
            information=_unpacked(packed, size),
        )
        model = cls(shared=arrays["shared"], own=own, precision=precision)
        if not model.precision.is_positive_definite:
            raise InputError("the precision is not positive definite")
        return model

    def pack(self) -> dict[str, Floats]:
        precision = self.precision
        rows, columns = triangle(precision.size)
        parts = (
            self.shared,
            self.own,
            np.array([self.tastes]),
            precision.features,
            precision.shared,
            precision.information[:, rows, columns],
        )
        return dict(zip(self.fields, parts, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PersonalModel):
            return NotImplemented
        return all(map(np.array_equal, self.pack().values(), other.pack().values()))

    __hash__ = None  # type: ignore[assignment]

    @property
    def dim(self) -> int:
        return self.precision.size - 1

    @property
    def arms(self) -> int:
        return len(self.own)

    @property
    def tastes(self) -> float:
        """λ_t, the precision of own tastes: the higher, the less users differ in what they like."""
        return float(self.precision.own[1])

    @cached_property
    def heads_of_arms(self) -> Floats:
        """Γ a_k + v_k, the coefficients of every arm, (K, n)."""
        return self.precision.coefficients(self.shared, self.own)

    # ── predicting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def log_odds(self, contexts: Floats) -> Floats:
        return np.asarray(inputs(contexts) @ self.heads_of_arms.T)

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        chosen = self.heads_of_arms.take(arms, axis=0, mode="clip")
        odds = (inputs(contexts)[:, None, :] * chosen).sum(axis=2)
        return np.where((arms >= 0) & (arms < self.arms), odds, -np.inf)

    def widths(self, contexts: Floats) -> Floats:
        squares = products(inputs(contexts)) @ self.packed_covariances.T
        return np.asarray(np.sqrt(np.maximum(squares, 0.0)))

    @cached_property
    def packed_covariances(self) -> Floats:
        """The upper triangle of each W_k, off-diagonals doubled, so that uᵀWu is a product with `products`, (K, p)."""
        rows, columns = triangle(self.precision.size)
        packed = self.precision.covariances[:, rows, columns]
        packed[:, rows != columns] *= 2
        # Row by row in memory: `take` would first copy the whole of any other array.
        return np.ascontiguousarray(packed)

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        squares = np.empty(arms.shape)
        for first in range(0, len(arms), AT_ONCE):  # what is gathered at once stays in the cache
            rows = slice(first, first + AT_ONCE)
            chosen = self.packed_covariances.take(arms[rows], axis=0, mode="clip")
            chosen *= products(inputs(contexts[rows]))[:, None, :]
            chosen.sum(axis=2, out=squares[rows])
        return np.maximum(squares, 0.0, out=squares)

    def heads(self, shown: Ints, dtype: DTypeLike) -> PersonalHeads:
        return PersonalHeads(self, shown, dtype)

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[PersonalModel]:
        for shared, own in self.precision.draws(generator, count):
            yield PersonalModel(shared=self.shared + shared, own=self.own + own, precision=self.precision)

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fold(self, data: Observations, *, estimator: str) -> Fit[PersonalModel]:
        """Learn from answered displays by the estimator called `estimator`, then how strong tastes are."""
        model, steps = estimate(self, data, estimator=estimator)
        if len(data):
            for _ in range(EVIDENCE_STEPS):
                model = model._with_tastes(model._evident_tastes())
        return Fit(model=model, steps=steps)

    def _evident_tastes(self) -> float:
        """Return λ_t by one fixed-point step on its evidence: (γ_t + 1) / (Σ‖v_k[1:]‖² + 1/d)."""
        known = float((1 - self.tastes * self.precision.own_variances[:, 1:]).sum())
        length = float((self.own[:, 1:] ** 2).sum())
        tastes = (known + 1) / (length + 1 / self.dim)
        if not np.isfinite(tastes):
            raise EstimationError("the strength of tastes is not finite")
        return min(max(tastes, WEAKEST * self.dim), STRONGEST * self.dim)

    def _with_tastes(self, tastes: float) -> PersonalModel:
        """Return the belief under another prior of tastes: what displays have said stays, the mean is solved again."""
        if tastes == self.tastes:
            return self
        natural = self.precision.times(self.shared, self.own)
        precision = self.precision.with_own(_own_precision(self.dim, tastes))
        shared, own = precision.solve(*natural)
        return PersonalModel(shared=shared, own=own, precision=precision)

    @property
    def coefficients(self) -> Coefficients:
        return self.shared, self.own

    def by_arm(self, data: Displays) -> ByArm:
        return ByArm(inputs(data.contexts), sessions=data.sessions, arms=data.arms)

    def predict(self, coefficients: Coefficients, data: ByArm) -> Floats:
        return data.products(self.precision.coefficients(*coefficients))

    def gradient(self, data: ByArm, slopes: Floats) -> Coefficients:
        own = data.sums(slopes, arms=self.arms)
        return own.T @ self.precision.features, own

    def information(self, data: ByArm, weights: Floats) -> Hierarchy:
        return self.precision.plus(data, weights)

    def updated(self, coefficients: Coefficients, precision: Hierarchy) -> PersonalModel:
        return PersonalModel(shared=coefficients[0], own=coefficients[1], precision=precision)

    def leverage(self, shown: Displays, slopes: Floats, seen: Displays) -> tuple[float, Floats]:
        gradient = self.gradient(self.by_arm(shown), slopes)
        direction = self.precision.solve(*gradient)
        return inner(gradient, direction), self.predict(direction, self.by_arm(seen))

    def forget(self, keep: float, *, ridge: float) -> PersonalModel:
        return replace(self, precision=self.precision.faded(keep))

    def with_arms(self, count: int, *, ridge: float, features: Floats | None = None) -> PersonalModel:
        added = arm_features(count, features)
        described = np.concatenate([self.precision.features, added])
        own = np.concatenate([self.own, np.zeros((count, self.precision.size))])
        return PersonalModel(shared=self.shared, own=own, precision=self.precision.with_features(described))

    def with_features(self, features: Floats) -> PersonalModel:
        described = arm_features(self.arms, features)
        if np.array_equal(described, self.precision.features):
            return self
        precision = self.precision.with_features(described)
        own = self.heads_of_arms - precision.coefficients(self.shared, np.zeros(self.own.shape))
        return PersonalModel(shared=self.shared, own=own, precision=precision)

    def choose_arms(self, arms: Sequence[int]) -> PersonalModel:
        return PersonalModel(shared=self.shared, own=self.own[list(arms)], precision=self.precision.choose_arms(arms))

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, arm: int) -> tuple[Floats, Floats]:
        return self.heads_of_arms[arm], self.precision.covariances[arm]

    @property
    def biases(self) -> Floats:
        return self.heads_of_arms[:, 0]

    @property
    def bias_deviations(self) -> Floats:
        return np.asarray(np.sqrt(self.precision.covariances[:, 0, 0]))

    @property
    def effects(self) -> Floats:
        return self.shared[1:, 0]

    @property
    def effect_deviations(self) -> Floats:
        variances = (self.precision.whitening**2).sum(axis=0)
        return np.asarray(np.sqrt(variances[1 : self.precision.size]))

    @property
    def norm(self) -> float:
        return float(np.hypot(np.linalg.norm(self.shared), np.linalg.norm(self.own)))

    @property
    def smallest_eigenvalue(self) -> float:
        return self.precision.smallest_eigenvalue


# ── the planning kernel ──────────────────────────────────────────────────────────────────────────────────────────────


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


def _own_precision(dim: int, tastes: float) -> Floats:
    own = np.full(dim + 1, tastes)
    own[0] = INTERCEPT_PRECISION
    return own


def _unpacked(packed: Floats, size: int) -> Floats:
    """Return symmetric matrices from their upper triangles: (K, n(n+1)/2) → (K, n, n)."""
    rows, columns = triangle(size)
    matrices = np.zeros((len(packed), size, size))
    matrices[:, rows, columns] = packed
    matrices[:, columns, rows] = packed
    return matrices
