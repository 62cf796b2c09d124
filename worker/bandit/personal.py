"""The click model that learns tastes: P(click on arm k at position h | x) = σ(u·(Γ a_k + v_k) + b_h), u = [1; x].

Γ (n, m) is shared by all arms: its first column is the base rate and the common effect of the context, further columns
say how features of arms, a_k = [1; features of k], change both. v_k (n,) is the arm's own. A new arm has v = 0 and no
information: its coefficients are what arms like it have taught, and its width says how little that is (docs/math.md
§9). b_h is the effect of the position, 0 at the first one.

Priors: intercepts, shared and own, ~ N(0, 1/λ_b); b_h ~ N(0, 1). The columns of a declared feature g of contexts have
the precision λ_g in v_k, G q_g at first, and ρ G q_g in Γ, where G is the number of features and q_g = E‖x_g‖²: so the
variance of the log-odds that contexts explain is the same for any number of columns. The columns of a feature
of arms multiply these precisions by its own. How strong features are is learned by their evidence after each fold, and
is part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import ClassVar, Unpack

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints, chosen, freeze_fields, frozen_array, row_products
from worker.bandit.click_model import ClickModel, Described, Observations, arm_features, inputs
from worker.bandit.estimators import ByArm, Coefficients
from worker.bandit.groups import INTERCEPT_PRECISION, Groups, bounded_strengths, known_or, own_prior, shared_prior
from worker.bandit.hierarchy import Hierarchy
from worker.bandit.learning import CERTAIN, LinearModel, Windows
from worker.errors import InputError

EVIDENCE_STEPS = 2
#: Changes of single arms are noticed if what changed ones leave to Γ and b, in numbers, is at most as much: 3 MiB.
MOST_INHERITED = 400_000
AT_ONCE = 64  # contexts whose widths of chosen arms are computed at once


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonalModel(LinearModel):
    """The belief about Γ (n, m) and v_k (K, n); methods are documented in `ClickModel` and `LinearModel`.

    Examples
    --------
    One arm is for users with x > 0, the other for those with x < 0; nobody said so.

    >>> from worker.bandit.arrays import sigmoid
    >>> from worker.bandit.click_model import Observations
    >>> prior = PersonalModel.prior(dim=1, arms=2, ridge=1.0)
    >>> x = np.where(np.arange(400) % 2, 1.0, -1.0)
    >>> seen = Observations(contexts=x[:, None], sessions=np.arange(400), arms=np.arange(400) // 2 % 2,
    ...                     positions=np.zeros(400, dtype=np.intp), clicked=(x > 0) == (np.arange(400) // 2 % 2 == 0))
    >>> learned = prior.fold(seen, estimator="laplace").model
    >>> sigmoid(learned.log_odds(np.array([[1.0], [-1.0]]))).round(2)
    array([[0.99, 0.01],
           [0.01, 0.99]])
    """

    name: ClassVar[str] = "personal"

    shared: Floats
    positions: Floats
    own: Floats
    groups: Groups
    ad_groups: Groups
    precision: Hierarchy = field(repr=False)
    #: How much speaks for a change of each arm (`learning.py`), (K,).
    doubts: Floats
    #: A factorisation costs far more than a step with an old one.
    reuses_information: ClassVar[bool] = True

    def __post_init__(self) -> None:
        size, features = self.precision.size, self.precision.features
        shapes = {"shared": (size, features.shape[1]), "own": (len(features), size)}
        freeze_fields(self, **shapes, positions=(self.precision.positions,), doubts=(len(features),))

    @classmethod
    def prior(cls, *, dim: int, arms: int, ridge: float, **known: Unpack[Described]) -> PersonalModel:
        if not known.get("intercept", True):
            raise InputError("the model personal has an intercept; only additive runs without")
        described, effects = arm_features(arms, known.get("features")), known.get("horizon", 1) - 1
        groups = known.get("groups") or Groups.vector(dim)
        ad_groups = known.get("ad_groups") or Groups.alike([1] * (described.shape[1] - 1))
        base = np.concatenate([[INTERCEPT_PRECISION], ridge * groups.by_column(groups.first)])
        precision = Hierarchy(
            features=described,
            prior=shared_prior(base, ad_groups, ad_groups.first),
            own=own_prior(groups, groups.first),
            information=np.zeros((arms, dim + 1, dim + 1)),
            crossing=np.zeros((arms, dim + 1, effects)),
        )
        return cls(
            shared=np.zeros(precision.prior.shape),
            positions=np.zeros(effects),
            own=np.zeros((arms, dim + 1)),
            doubts=np.zeros(arms),
            groups=groups,
            ad_groups=ad_groups,
            precision=precision,
        )

    @classmethod
    def certain(cls, coefficients: Floats) -> PersonalModel:
        """Return given coefficients (K, n) of arms with the prior's precision: the truth of a simulated world."""
        arms, size = coefficients.shape
        return replace(cls.prior(dim=size - 1, arms=arms, ridge=1.0), own=coefficients)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = True) -> PersonalModel:
        own = frozen_array(arrays["own"])
        if own.ndim != 2 or own.shape[1] < 2:
            raise InputError("own must be a row of d+1 numbers per arm")
        arms, size = own.shape
        described = frozen_array(arrays["precision.features"])
        if described.ndim != 2 or len(described) != arms or not described.shape[1] or (described[:, 0] != 1).any():
            raise InputError("precision.features must be a row per arm that begins with 1")
        groups, strengths = _unpacked_groups(arrays, "context_groups", size - 1)
        ad_groups, ad_strengths = _unpacked_groups(arrays, "ad_groups", described.shape[1] - 1)
        positions = frozen_array(arrays["positions"], (len(arrays["positions"]),))
        base = frozen_array(arrays["precision.prior"], (size,))
        inherited, count = arrays["precision.inherited"], size * described.shape[1] + len(positions)
        precision = Hierarchy(
            features=described,
            prior=shared_prior(base, ad_groups, ad_strengths),
            own=own_prior(groups, strengths),
            information=_unpacked(frozen_array(arrays["precision.information"], (arms, size * (size + 1) // 2)), size),
            crossing=frozen_array(arrays["precision.crossing"], (arms, size * len(positions))).reshape(
                arms, size, len(positions)
            ),
            inherited=_unpacked(frozen_array(inherited, (count * (count + 1) // 2,))[None], count)[0]
            if len(inherited)
            else None,
        )
        model = cls(
            shared=arrays["shared"],
            positions=positions,
            own=own,
            doubts=arrays["doubts"],
            groups=groups,
            ad_groups=ad_groups,
            precision=precision,
        )
        if not ((precision.prior > 0).all() and model.precision.is_positive_definite):
            raise InputError("the precision is not positive definite")
        return model

    def pack(self) -> dict[str, Floats]:
        precision, inherited = self.precision, self.precision.inherited
        return {
            "shared": self.shared,
            "positions": self.positions,
            "own": self.own,
            "doubts": self.doubts,
            "context_groups.widths": self.groups.widths.astype(np.float64),
            "context_groups.squares": self.groups.squares,
            "context_groups.strengths": self.strengths,
            "ad_groups.widths": self.ad_groups.widths.astype(np.float64),
            "ad_groups.squares": self.ad_groups.squares,
            "ad_groups.strengths": self.ad_strengths,
            "precision.features": precision.features,
            "precision.prior": precision.prior[:, 0],
            "precision.information": precision.information[:, *triangle(precision.size)],
            "precision.crossing": precision.crossing.reshape(self.arms, precision.size * precision.positions),
            "precision.inherited": np.zeros(0) if inherited is None else inherited[triangle(len(inherited))],
        }

    @property
    def dim(self) -> int:
        return self.precision.size - 1

    @property
    def arms(self) -> int:
        return len(self.own)

    @property
    def most_inherited(self) -> int:
        count = self.precision.prior.size + self.precision.positions
        numbers = count * (count + 1) // 2
        return numbers if numbers <= MOST_INHERITED else 0

    @property
    def strengths(self) -> Floats:
        """λ_g, the precision of tastes by feature of contexts, (G,): the higher, the less the feature matters."""
        return np.asarray(self.precision.own[1 + self.groups.firsts])

    @property
    def ad_strengths(self) -> Floats:
        """The factor on the precisions of Γ for each feature of arms, (A,): the higher, the less the feature says."""
        prior = self.precision.prior[0]
        return np.asarray(prior[1 + self.ad_groups.firsts] / prior[0])

    @property
    def position_effects(self) -> Floats:
        return np.concatenate([[0.0], self.positions])

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
        for drawn in self.precision.draws(generator, count):
            yield self.updated(tuple(map(np.add, self.coefficients, drawn)), self.precision)

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def strengthened(self) -> PersonalModel:
        model = self
        for _ in range(EVIDENCE_STEPS):
            model = model._with_strengths(model._evident(), model._evident_of_ads())
        return model

    def _evident(self) -> Floats:
        """Return λ_g by one fixed-point step on its evidence, (γ_g + 1) / (Σ_k ‖v_k[g]‖² + 1/(G q_g)), (G,)."""
        known = self.groups.sums((1 - self.precision.own[1:] * self.precision.own_variances[:, 1:]).sum(axis=0))
        return bounded_strengths(known, self.groups.sums((self.own[:, 1:] ** 2).sum(axis=0)), self.groups)

    def _evident_of_ads(self) -> Floats:
        """Return the same for features of arms, of which all coefficients are in Γ, (A,)."""
        prior = self.precision.prior[:, 1:]
        known = self.ad_groups.sums((1 - prior * self.precision.shared_variances[:, 1:]).sum(axis=0))
        base = self.precision.prior[:, :1]
        return bounded_strengths(
            known, self.ad_groups.sums((base * self.shared[:, 1:] ** 2).sum(axis=0)), self.ad_groups
        )

    def _with_strengths(self, strengths: Floats, ad_strengths: Floats) -> PersonalModel:
        """Return the belief under another prior: what displays have said stays, the mean is solved again."""
        prior = shared_prior(self.precision.prior[:, 0], self.ad_groups, ad_strengths)
        precision = replace(self.precision, prior=prior, own=own_prior(self.groups, strengths), before=None)
        return self.updated(precision.solve(*self.said()), precision)

    @property
    def coefficients(self) -> Coefficients:
        return self.shared, self.positions, self.own

    def by_arm(self, data: Observations) -> ByArm:
        positions = np.minimum(data.positions, len(self.positions))
        return ByArm(inputs(data.contexts), sessions=data.sessions, arms=data.arms, positions=positions)

    def predict(self, coefficients: Coefficients, data: ByArm) -> Floats:
        shared, positions, own = coefficients
        effects = np.concatenate([[0.0], positions])
        heads = self.precision.coefficients(shared, own)
        return np.asarray(data.products(heads[data.shown]) + effects[data.positions])

    def gradient(self, data: ByArm, slopes: Floats) -> Coefficients:
        own = data.sums(slopes, arms=self.arms)
        by_position = np.bincount(data.positions, weights=slopes, minlength=len(self.positions) + 1)
        return own.T @ self.precision.features, np.asarray(by_position[1:], dtype=np.float64), own

    def updated(self, coefficients: Coefficients, precision: Hierarchy) -> PersonalModel:
        shared, positions, own = coefficients
        return replace(self, shared=shared, positions=positions, own=own, precision=precision)

    def forget(self, keep: float) -> PersonalModel:
        faded = self.precision.faded(keep)
        model = self.updated(faded.solve(*[keep * part for part in self.said()]), faded)
        return replace(model, doubts=np.zeros(self.arms))

    def without_changed(self, data: Observations, reluctance: float) -> tuple[PersonalModel, tuple[int, ...]]:
        if not self.most_inherited:
            return self, ()
        seen, precision = self.by_arm(data), self.precision
        shown, window = seen.shown, Windows(seen, data.clicked, self.position_effects[seen.positions])
        centres, covariances = precision.coefficients(self.shared, np.zeros(self.own.shape)), precision.new_covariances
        as_new = window.evidence(centres[shown], covariances[shown] if len(covariances) > 1 else covariances)
        as_known = window.evidence(self.heads_of_arms[shown], precision.covariances[shown])
        doubts = self.doubts.copy()
        doubts[shown] = np.logaddexp(0, doubts[shown] + (as_new - as_known))
        changed = np.flatnonzero(doubts > max(CERTAIN, reluctance) + np.log(len(doubts)))
        if not len(changed):
            return replace(self, doubts=doubts), ()
        own = self.own.copy()
        doubts[changed], own[changed] = 0.0, 0.0
        return replace(self, doubts=doubts, own=own, precision=precision.with_new(changed)), tuple(changed.tolist())

    def with_arms(self, count: int, *, features: Floats | None = None) -> PersonalModel:
        added = arm_features(count, features)
        described = np.concatenate([self.precision.features, added])
        own = np.concatenate([self.own, np.zeros((count, self.precision.size))])
        doubts = np.append(self.doubts, np.zeros(count))
        return replace(self, own=own, doubts=doubts, precision=self.precision.with_features(described))

    def with_features(self, features: Floats) -> PersonalModel:
        described = arm_features(self.arms, features)
        if np.array_equal(described, self.precision.features):
            return self
        precision = self.precision.with_features(described)
        own = self.heads_of_arms - precision.coefficients(self.shared, np.zeros(self.own.shape))
        return replace(self, own=own, precision=precision)

    def with_horizon(self, horizon: int) -> PersonalModel:
        more = max(0, horizon - 1 - len(self.positions))
        if not more:
            return self
        positions = np.concatenate([self.positions, np.zeros(more)])
        return replace(self, positions=positions, precision=self.precision.with_positions(len(positions)))

    def with_columns(self, fresh: ClickModel, columns: Ints, ad_columns: Ints) -> PersonalModel:
        assert isinstance(fresh, PersonalModel)
        ads, rows = (np.concatenate([[0], np.where(one < 0, -1, one + 1)]) for one in (ad_columns, columns))
        model = self._with_ad_columns(fresh, ad_columns, ads)
        groups, origins = fresh.groups.continuing(model.groups, columns)
        firsts, base = model.groups.firsts, model.precision.prior[:, 0]
        fresh_base = fresh.precision.prior[1 + fresh.groups.firsts, 0]
        kept = groups.by_column(known_or(base[1:][firsts], fresh_base, origins))
        precision = model.precision.choose_columns(
            rows,
            np.arange(len(ads)),
            model.precision.features,
            shared_prior(np.append(base[:1], kept), model.ad_groups, model.ad_strengths),
            own_prior(groups, known_or(model.strengths, fresh.strengths, origins)),
        )
        shared, own = chosen(model.shared, rows, 0), chosen(model.own, rows, 1)
        coefficients = shared, model.positions, own
        if not np.isin(np.arange(model.precision.size), rows).all():
            # What displays have said of the columns that are left stays: the belief of a model without the others.
            said = model.said()
            coefficients = precision.solve(chosen(said[0], rows, 0), said[1], chosen(said[2], rows, 1))
        return replace(model.updated(coefficients, precision), groups=groups)

    def _with_ad_columns(self, fresh: PersonalModel, ad_columns: Ints, ads: Ints) -> PersonalModel:
        """Return the belief with the features of arms that `fresh` has; the coefficients of every arm stay."""
        before, features = self.precision, fresh.precision.features
        groups, origins = fresh.ad_groups.continuing(self.ad_groups, ad_columns)
        strengths = known_or(self.ad_strengths, fresh.ad_strengths, origins)
        prior, rows = shared_prior(before.prior[:, 0], groups, strengths), np.arange(before.size)
        precision = before.choose_columns(rows, ads, features, prior, before.own)
        shared, own = chosen(self.shared, ads, 1), self.own
        if not np.array_equal(features, before.features):
            own = self.heads_of_arms - precision.coefficients(shared, np.zeros(own.shape))
        return replace(self.updated((shared, self.positions, own), precision), ad_groups=groups)

    def shifted(self, arm: int, log_odds: float) -> PersonalModel:
        own = self.own.copy()
        own[arm, 0] += log_odds
        return replace(self, own=own)

    def choose_arms(self, arms: Sequence[int]) -> PersonalModel:
        chosen = list(arms)
        precision = self.precision.choose_arms(arms)
        return replace(self, own=self.own[chosen], doubts=self.doubts[chosen], precision=precision)

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, arm: int) -> tuple[Floats, Floats]:
        return self.heads_of_arms[arm], self.precision.covariances[arm]

    @property
    def biases(self) -> Floats:
        return self.heads_of_arms[:, 0]

    @property
    def effects(self) -> Floats:
        return self.shared[1:, 0]


def _unpacked_groups(arrays: Mapping[str, Floats], part: str, columns: int) -> tuple[Groups, Floats]:
    widths, squares = (frozen_array(arrays[f"{part}.{name}"]) for name in ("widths", "squares"))
    strengths = frozen_array(arrays[f"{part}.strengths"], squares.shape)
    if widths.sum() != columns or (widths % 1).any() or (strengths <= 0).any():
        raise InputError(f"{part}: the features must have {columns} columns, and strengths above zero")
    return Groups(widths=widths.astype(np.intp), squares=squares), strengths


def _unpacked(packed: Floats, size: int) -> Floats:
    """Return symmetric matrices from their upper triangles: (K, n(n+1)/2) → (K, n, n)."""
    rows, columns = triangle(size)
    matrices = np.zeros((len(packed), size, size))
    matrices[:, rows, columns] = packed
    matrices[:, columns, rows] = packed
    return matrices


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
