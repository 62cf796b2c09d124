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
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.additive import INTERCEPT_PRECISION
from worker.bandit.arrays import Array, Floats, Ints, frozen_array
from worker.bandit.click_model import ROWS, Displays, Fit, Observations, arm_features, inputs
from worker.bandit.estimators import Coefficients, estimate, inner
from worker.bandit.hierarchy import Hierarchy
from worker.errors import EstimationError, InputError

#: Bounds of λ_t, in multiples of d. Without the lower one, few sessions and many features make the data separable, λ_t
#: collapses, every probability goes to 0 or 1, and exploration ends for ever.
WEAKEST, STRONGEST = 0.25, 1000.0
EVIDENCE_STEPS = 2
#: Contexts × arms whose click probabilities a batch keeps between the greedy and the optimistic plan.
REMEMBERED = 1 << 24


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

    def __post_init__(self) -> None:
        size, features = self.precision.size, self.precision.features
        for name, shape in (("shared", (size, features.shape[1])), ("own", (len(features), size))):
            try:
                object.__setattr__(self, name, frozen_array(getattr(self, name), shape))
            except InputError as error:
                raise InputError(f"{name}: {error}") from None

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
        if described.ndim != 2 or described.shape[0] != arms or not (described[:, :1] == 1).all():
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
        rows, columns = np.triu_indices(precision.size)
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
        squares = products(inputs(contexts)) @ packed_covariances(self.precision.covariances).T
        return np.asarray(np.sqrt(np.maximum(squares, 0.0)))

    @cached_property
    def _packed_covariances(self) -> Floats:
        return packed_covariances(self.precision.covariances)

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        chosen = self._packed_covariances.take(arms, axis=0, mode="clip")
        chosen *= products(inputs(contexts))[:, None, :]
        return np.asarray(np.maximum(chosen.sum(axis=2), 0.0))

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

    def predict(self, coefficients: Coefficients, data: Displays) -> Floats:
        heads = self.precision.coefficients(*coefficients)
        return np.asarray((inputs(data.contexts)[data.sessions] * heads[data.arms]).sum(axis=1))

    def gradient(self, data: Displays, slopes: Floats) -> Coefficients:
        order = np.argsort(data.arms, kind="stable")
        own = np.zeros(self.own.shape)
        if len(order):
            shown, firsts = np.unique(data.arms[order], return_index=True)
            pulls = inputs(data.contexts)[data.sessions[order]] * slopes[order, None]
            own[shown] = np.add.reduceat(pulls, firsts, axis=0)
        return own.T @ self.precision.features, own

    def information(self, data: Displays, weights: Floats) -> Hierarchy:
        contexts = inputs(data.contexts)
        return self.precision.plus(contexts, sessions=data.sessions, arms=data.arms, weights=weights)

    def updated(self, coefficients: Coefficients, precision: Hierarchy) -> PersonalModel:
        return PersonalModel(shared=coefficients[0], own=coefficients[1], precision=replace(precision, before=None))

    def leverage(self, shown: Displays, slopes: Floats, seen: Displays) -> tuple[float, Floats]:
        gradient = self.gradient(shown, slopes)
        direction = self.precision.solve(*gradient)
        return inner(gradient, direction), self.predict(direction, seen)

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


def _own_precision(dim: int, tastes: float) -> Floats:
    own = np.full(dim + 1, tastes)
    own[0] = INTERCEPT_PRECISION
    return own


def _unpacked(packed: Floats, size: int) -> Floats:
    """Return symmetric matrices from their upper triangles: (K, n(n+1)/2) → (K, n, n)."""
    rows, columns = np.triu_indices(size)
    matrices = np.zeros((len(packed), size, size))
    matrices[:, rows, columns] = packed
    matrices[:, columns, rows] = packed
    return matrices


def products(contexts: Floats) -> Floats:
    """Return the products u_i u_j, i ≤ j, of each row: (r, n) → (r, n(n+1)/2)."""
    rows, columns = np.triu_indices(contexts.shape[1])
    return contexts[:, rows] * contexts[:, columns]


def packed_covariances(covariances: Floats) -> Floats:
    """Return the upper triangles, off-diagonals doubled, so that uᵀWu is a product with `products`."""
    rows, columns = np.triu_indices(covariances.shape[1])
    return np.asarray(covariances[:, rows, columns] * np.where(rows == columns, 1.0, 2.0))


# ── the planning kernel ──────────────────────────────────────────────────────────────────────────────────────────────


class PersonalHeads:
    """The kernel for the arms `shown`: products of u with the coefficients, and of all u_i u_j with the covariances."""

    def __init__(self, model: PersonalModel, shown: Ints, dtype: DTypeLike) -> None:
        self.dtype, self.size = np.dtype(dtype), model.precision.size
        self.count = len(shown)
        # A column more than there are arms: a product with a single column takes another kernel.
        self.means = np.zeros((self.size, self.count + 1), dtype=self.dtype)
        self.means[:, :-1] = model.heads_of_arms[shown].T
        self._covariances = model.precision.covariances, shown

    @property
    def ranking(self) -> None:
        """Which arm is likelier depends on the user."""
        return

    @cached_property
    def spreads(self) -> Array:
        """The packed covariances, (n(n+1)/2, columns + 1)."""
        covariances, shown = self._covariances
        packed = np.zeros((self.size * (self.size + 1) // 2, self.count + 1), dtype=self.dtype)
        packed[:, :-1] = packed_covariances(covariances[shown]).T
        return packed

    def batch(self, contexts: Floats) -> _PersonalBatch:
        return _PersonalBatch(self, np.asarray(inputs(contexts), dtype=self.dtype))


class _PersonalBatch:
    def __init__(self, heads: PersonalHeads, contexts: Array) -> None:
        self._heads, self._contexts = heads, contexts

    def __len__(self) -> int:
        return len(self._contexts)

    def select(self, rows: Ints) -> _PersonalBatch:
        return _PersonalBatch(self._heads, self._contexts[rows])

    @cached_property
    def _blocks(self) -> Array:
        """The contexts in blocks of rows, padded with zeros: (b, ROWS, n)."""
        count, size = self._contexts.shape
        padded = np.zeros((-(-count // ROWS) * ROWS, size), dtype=self._heads.dtype)
        padded[:count] = self._contexts
        return padded.reshape(-1, ROWS, size)

    @cached_property
    def _products(self) -> Array:
        blocks = self._blocks
        flat = products(blocks.reshape(-1, blocks.shape[2]))
        return flat.reshape(len(blocks), ROWS, flat.shape[1])

    def _product(self, left: Array, right: Array, start: int, stop: int, columns: slice) -> Array:
        first, last, _ = columns.indices(self._heads.count)
        chosen = right[:, first : max(last, first + 2)]
        blocks = left[start // ROWS : -(-stop // ROWS)]
        result: Array = np.matmul(blocks, chosen).reshape(len(blocks) * ROWS, chosen.shape[1])
        return result[: stop - start, : last - first]

    def log_odds(self, start: int, stop: int, columns: slice) -> Array:
        return self._product(self._blocks, self._heads.means, start, stop, columns)

    @cached_property
    def _all_probabilities(self) -> Array | None:
        if len(self) * self._heads.count > REMEMBERED:
            return None
        return self._computed(0, len(self), slice(0, self._heads.count))

    def _computed(self, start: int, stop: int, columns: slice) -> Array:
        odds = self.log_odds(start, stop, columns)
        steepest = 80.0 if self._heads.dtype == np.float32 else 600.0
        np.clip(odds, -steepest, steepest, out=odds)
        np.negative(odds, out=odds)
        np.exp(odds, out=odds)
        odds += 1
        return np.asarray(np.reciprocal(odds, out=odds))

    def probabilities(self, start: int, stop: int, columns: slice | Ints) -> Array:
        if not isinstance(columns, slice):
            return self.probabilities(start, stop, slice(0, self._heads.count))[:, columns]
        known = self._all_probabilities
        return self._computed(start, stop, columns) if known is None else known[start:stop, columns]

    def widths(self, start: int, stop: int, columns: slice) -> Array:
        squares = self._product(self._products, self._heads.spreads, start, stop, columns)
        np.maximum(squares, 0, out=squares)
        return np.asarray(np.sqrt(squares, out=squares))
