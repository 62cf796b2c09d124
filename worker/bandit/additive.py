"""The paper's click model: P(click on arm k | x) = σ(x·θ_x + θ_k), with a Gaussian belief N([θ_x; θ_k], A⁻¹).

With an intercept, u = [1; x] takes the place of x: the shared intercept is the base rate, from which a new arm starts.
Positions after the first have effects as well, as further columns of u. Priors are then as in `personal.py`, without
tastes, and precisions of features stay as they begin. Without it this is the paper's model to the letter, under λI.

The context moves all arms up or down together and enters through one number, s = x·θ_x. So arms are ordered by θ_k for
every context, and a context costs one product with θ_x and, for the widths, one with the whitening matrix of A. Costs
are O(K d) where tastes cost O(K d²): this is the model for very many arms. Features of arms are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Unpack

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints, chosen, freeze_fields, row_products, sigmoid
from worker.bandit.click_model import ClickModel, Described, Observations, inputs
from worker.bandit.estimators import ByArm, Coefficients
from worker.bandit.groups import INTERCEPT_PRECISION, Groups, known_or
from worker.bandit.learning import LinearModel
from worker.bandit.precision import Precision
from worker.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class AdditiveModel(LinearModel):
    """The belief about θ_x (d,), or with an intercept (1+d+P,), and θ_k (K,); see `ClickModel` and `LinearModel`.

    Examples
    --------
    >>> belief = AdditiveModel.prior(dim=2, arms=3, ridge=1.0)
    >>> sigmoid(belief.log_odds(np.zeros((1, 2))))
    array([[0.5, 0.5, 0.5]])

    A hundred clicks in a hundred displays move an arm's log-odds up, but not to infinity.

    >>> from worker.bandit.click_model import Observations
    >>> zeros = np.zeros(100, dtype=np.intp)
    >>> shown = Observations(contexts=np.zeros((100, 2)), sessions=np.arange(100), arms=zeros, positions=zeros,
    ...                      clicked=np.ones(100))
    >>> belief.fold(shown, estimator="laplace").model.theta_arms.round(2)
    array([3.36, 0.  , 0.  ])
    """

    name: ClassVar[str] = "additive"

    theta_context: Floats
    theta_arms: Floats
    precision: Precision
    #: The precision of θ_x before any data, (d,) or (1+d,); the rest of θ_x are effects of positions.
    prior_precision: Floats = field(repr=False)
    intercept: bool = False

    def __post_init__(self) -> None:
        shapes = {"theta_context": (self.precision.dim,), "theta_arms": self.precision.arms.shape}
        freeze_fields(self, **shapes, prior_precision=(len(self.prior_precision),))
        if self.precision.dim < len(self.prior_precision) or (self.prior_precision <= 0).any():
            raise InputError("precision.prior must be above zero, and at most as long as theta_context")

    @classmethod
    def prior(cls, *, dim: int, arms: int, ridge: float, **known: Unpack[Described]) -> AdditiveModel:
        if not known.get("intercept"):
            return cls.certain(np.zeros(dim), np.zeros(arms), ridge=ridge)
        groups = known.get("groups") or Groups.vector(dim)
        prior = np.concatenate([[INTERCEPT_PRECISION], ridge * groups.by_column(groups.first)])
        effects = np.ones(known.get("horizon", 1) - 1)
        precision = Precision.diagonal(np.concatenate([prior, effects]), np.full(arms, INTERCEPT_PRECISION))
        return cls(
            theta_context=np.zeros(precision.dim),
            theta_arms=np.zeros(arms),
            precision=precision,
            prior_precision=prior,
            intercept=True,
        )

    @classmethod
    def certain(cls, theta_context: Floats, theta_arms: Floats, *, ridge: float = 1.0) -> AdditiveModel:
        """Return a given θ with the prior's precision: the truth of a simulated world."""
        prior = np.full(len(theta_context), float(ridge))
        precision = Precision.diagonal(prior, np.full(len(theta_arms), float(ridge)))
        return cls(theta_context=theta_context, theta_arms=theta_arms, precision=precision, prior_precision=prior)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = False) -> AdditiveModel:
        theta_context, theta_arms = arrays["theta_context"], arrays["theta_arms"]
        context, cross, arms = (arrays[f"precision.{part}"] for part in ("context", "cross", "arms"))
        if cross.size == 0:
            cross = cross.reshape(len(arms), len(context))
        model = cls(
            theta_context=theta_context,
            theta_arms=theta_arms,
            precision=Precision(context=context, cross=cross, arms=arms),
            prior_precision=arrays["precision.prior"],
            intercept=intercept,
        )
        if not model.precision.is_positive_definite:
            raise InputError("the precision is not positive definite")
        return model

    def pack(self) -> dict[str, Floats]:
        return {
            "theta_context": self.theta_context,
            "theta_arms": self.theta_arms,
            "precision.context": self.precision.context,
            "precision.cross": self.precision.cross,
            "precision.arms": self.precision.arms,
            "precision.prior": self.prior_precision,
        }

    @property
    def dim(self) -> int:
        return len(self.prior_precision) - self.intercept

    @property
    def position_effects(self) -> Floats:
        return np.concatenate([[0.0], self.theta_context[len(self.prior_precision) :]])

    def inputs_of(self, contexts: Floats) -> Floats:
        """Return what θ_x is multiplied by at the first position: x, or u = [1; x; 0 …]."""
        if not self.intercept:
            return contexts
        rows = np.zeros((len(contexts), self.precision.dim))
        rows[:, : self.dim + 1] = inputs(contexts)
        return rows

    @property
    def arms(self) -> int:
        return len(self.theta_arms)

    # ── predicting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def log_odds(self, contexts: Floats) -> Floats:
        return np.asarray((self.inputs_of(contexts) @ self.theta_context)[:, None] + self.theta_arms)

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        odds = _offsets(self.inputs_of(contexts), self.theta_context)[:, None] + self.theta_arms.take(arms, mode="clip")
        return np.where((arms >= 0) & (arms < self.arms), odds, -np.inf)

    def widths(self, contexts: Floats) -> Floats:
        return np.sqrt(self.precision.squared_widths(self.inputs_of(contexts)))

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        return self.precision.squared_widths_of(self.inputs_of(contexts), arms)

    def heads(self, shown: Ints, dtype: DTypeLike) -> AdditiveHeads:
        return AdditiveHeads(self, shown, dtype)

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[AdditiveModel]:
        context, arms = self.precision.draw(
            generator.standard_normal((count, len(self.theta_context))), generator.standard_normal((count, self.arms))
        )
        for theta in zip(self.theta_context + context, self.theta_arms + arms, strict=True):
            yield replace(self, theta_context=theta[0], theta_arms=theta[1])

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def coefficients(self) -> Coefficients:
        return self.theta_context, self.theta_arms

    def by_arm(self, data: Observations) -> ByArm:
        rows, effects = self.inputs_of(data.contexts), self.precision.dim - len(self.prior_precision)
        if not effects:
            return ByArm(rows, sessions=data.sessions, arms=data.arms)
        displays = np.arange(len(data))
        rows = rows[data.sessions]
        late = np.flatnonzero(data.positions)
        rows[late, self.dim + np.minimum(data.positions[late], effects)] = 1.0
        return ByArm(rows, sessions=displays, arms=data.arms)

    def predict(self, coefficients: Coefficients, data: ByArm) -> Floats:
        offsets = data.inputs @ coefficients[0]
        return np.asarray(offsets[data.sessions] + coefficients[1][data.arms])

    def gradient(self, data: ByArm, slopes: Floats) -> Coefficients:
        per_session = np.bincount(data.sessions, weights=slopes, minlength=len(data.inputs))
        per_arm = np.bincount(data.arms, weights=slopes, minlength=self.arms)
        return data.inputs.T @ per_session, np.asarray(per_arm, dtype=np.float64)

    def updated(self, coefficients: Coefficients, precision: Precision) -> AdditiveModel:
        return replace(self, theta_context=coefficients[0], theta_arms=coefficients[1], precision=precision)

    def forget(self, keep: float) -> AdditiveModel:
        prior = np.concatenate([self.prior_precision, np.ones(self.precision.dim - len(self.prior_precision))])
        faded = self.precision.forget(keep, context=prior, arms=self._arm_precision)
        return self.updated(faded.solve(*[keep * part for part in self.said()]), faded)

    def with_arms(self, count: int, *, features: Floats | None = None) -> AdditiveModel:
        return replace(
            self,
            theta_arms=np.concatenate([self.theta_arms, np.zeros(count)]),
            precision=self.precision.with_arms(count, ridge=self._arm_precision),
        )

    @property
    def _arm_precision(self) -> float:
        return INTERCEPT_PRECISION if self.intercept else float(self.prior_precision[0])

    def with_features(self, features: Floats) -> AdditiveModel:
        return self

    def with_horizon(self, horizon: int) -> AdditiveModel:
        effects = self.precision.dim - len(self.prior_precision)
        more = max(0, horizon - 1 - effects) if self.intercept else 0
        if not more:
            return self
        rows = np.append(np.arange(self.precision.dim), np.full(more, -1))
        precision = self.precision.choose_columns(rows, np.ones(len(rows)))
        return replace(self, theta_context=chosen(self.theta_context, rows, 0), precision=precision)

    def with_columns(self, fresh: ClickModel, columns: Ints, ad_columns: Ints) -> AdditiveModel:
        assert isinstance(fresh, AdditiveModel)
        first = int(self.intercept)
        effects = np.arange(len(self.prior_precision), self.precision.dim)
        rows = np.concatenate([np.arange(first), np.where(columns < 0, -1, columns + first), effects])
        known = rows[: fresh.dim + first]
        prior = known_or(self.prior_precision, fresh.prior_precision, known)
        precision = self.precision.choose_columns(rows, np.append(prior, np.ones(len(effects))))
        theta = chosen(self.theta_context, rows, 0), self.theta_arms
        if not np.isin(np.arange(self.precision.dim), rows).all():
            context, arms = self.said()
            theta = precision.solve(chosen(context, rows, 0), arms)
        return replace(self, theta_context=theta[0], theta_arms=theta[1], precision=precision, prior_precision=prior)

    def shifted(self, arm: int, log_odds: float) -> AdditiveModel:
        return replace(self, theta_arms=self.theta_arms + log_odds * (np.arange(self.arms) == arm))

    def choose_arms(self, arms: Sequence[int]) -> AdditiveModel:
        return replace(self, theta_arms=self.theta_arms[list(arms)], precision=self.precision.choose_arms(arms))

    @property
    def most_inherited(self) -> int:
        return 0

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, arm: int) -> tuple[Floats, Floats]:
        shared = self.precision.whitening.T @ self.precision.whitening
        centre, known = self.precision.centres[arm], len(self.prior_precision)
        # [1; x] ↦ (x or u, onehot(k)): the covariance of [θ_k (+ the intercept); θ_x].
        cross = -shared @ centre
        variance = centre @ shared @ centre + 1 / self.precision.arms[arm]
        shared, cross = shared[:known, :known], cross[:known]  # without the effects of positions
        if self.intercept:
            covariance = shared.copy()
            covariance[0] += cross
            covariance[:, 0] += cross
            covariance[0, 0] += variance
        else:
            covariance = np.block([[np.array([[variance]]), cross[None]], [cross[:, None], shared]])
        return np.concatenate([self.biases[arm : arm + 1], self.effects]), covariance

    @property
    def biases(self) -> Floats:
        """The log-odds of each arm at x = 0, (K,): θ_k, and the intercept if there is one."""
        return self.theta_arms + self.theta_context[0] if self.intercept else self.theta_arms

    @property
    def effects(self) -> Floats:
        """θ_x: the effect of each context feature on the log-odds of every arm, (d,)."""
        return self.theta_context[int(self.intercept) : len(self.prior_precision)]


def _offsets(contexts: Floats, theta_context: Floats) -> Floats:
    """Return s = x·θ_x, each row by itself: (n, d) → (n,)."""
    # A sum along the rows takes another order if the memory lies along the columns.
    return np.asarray((np.ascontiguousarray(contexts) * theta_context).sum(axis=1))


# ── the planning kernel ──────────────────────────────────────────────────────────────────────────────────────────────


class AdditiveHeads:
    """The kernel for the arms `shown`.

    e^{−(s+θ)} = e^{−s} e^{−θ} saves an exponential per arm. Squared widths are one product,
    [−2 L(x − ū); 1; ‖L(x − ū)‖²] · [L(U_k − ū); ‖L(U_k − ū)‖² + 1/D_k; 1], where ū is the mean of the centres: close to
    all contexts, so that the expanded square does not cancel.
    """

    def __init__(self, model: AdditiveModel, shown: Ints, dtype: DTypeLike) -> None:
        self._model, self._shown, self._dtype = model, shown, np.dtype(dtype)
        self._theta = model.theta_arms[shown]
        # Beyond this the factors of the exponential leave the number range.
        self._steepest = 80.0 if self._dtype == np.float32 else 600.0
        self._largest = float(np.abs(self._theta).max(initial=0.0))
        self._decay = np.exp(-np.clip(self._theta, -self._steepest, self._steepest)).astype(self._dtype)

    @property
    def coefficients(self) -> Array:
        return self._theta[None]

    def _offsets(self, contexts: Floats) -> Floats:
        return _offsets(self._model.inputs_of(contexts), self._model.theta_context)

    def log_odds(self, contexts: Floats) -> Array:
        return np.asarray((self._offsets(contexts)[:, None] + self._theta).astype(self._dtype))

    def probabilities(self, contexts: Floats) -> Array:
        offsets = self._offsets(contexts)
        decay = np.exp(-np.clip(offsets, -self._steepest, self._steepest)).astype(self._dtype)
        with np.errstate(over="ignore", divide="ignore"):
            result: Array = np.multiply.outer(decay, self._decay)
            result += 1
            np.reciprocal(result, out=result)
        for row in np.flatnonzero(np.abs(offsets) + self._largest > self._steepest):
            result[row] = sigmoid(offsets[row] + self._theta)
        return result

    @cached_property
    def _middle(self) -> Floats:
        return np.asarray(self._model.precision.centres.mean(axis=0))

    @cached_property
    def _narrowest(self) -> Array:
        """1 / D_k: no squared width is below, so rounding must not take one there."""
        return np.asarray(1 / self._model.precision.arms[self._shown]).astype(self._dtype)

    @cached_property
    def _whitened_arms(self) -> Array:
        """The right factor of the squared widths, (d+2, columns)."""
        precision = self._model.precision
        there = (precision.centres[self._shown] - self._middle) @ precision.whitening.T
        right = np.ones((precision.dim + 2, len(self._shown)), dtype=self._dtype)
        right[:-2] = there.T
        right[-2] = (there**2).sum(axis=1) + 1 / precision.arms[self._shown]
        return right

    def widths(self, contexts: Floats) -> Array:
        rows = self._model.inputs_of(contexts)
        here = row_products(rows - self._middle, self._model.precision.whitening.T)
        left = np.ones((len(rows), rows.shape[1] + 2), dtype=self._dtype)
        left[:, :-2] = -2 * here
        left[:, -1] = (here**2).sum(axis=1)
        squares = row_products(left, self._whitened_arms)
        np.maximum(squares, self._narrowest, out=squares)
        return np.sqrt(squares, out=squares)
