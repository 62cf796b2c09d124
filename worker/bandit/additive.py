"""The paper's click model: P(click on arm k | x) = σ(x·θ_x + θ_k), with a Gaussian belief N([θ_x; θ_k], A⁻¹).

With an intercept, u = [1; x] takes the place of x: the shared intercept is the base rate, from which a new arm starts.
Priors are then as in `personal.py`, without tastes. Without it this is the paper's model to the letter, under λI.

The context moves all arms up or down together and enters through one number, s = x·θ_x. So arms are ordered by θ_k for
every context, and a context costs one product with θ_x and, for the widths, one with the whitening matrix of A. Costs
are O(K d) where tastes cost O(K d²): this is the model for very many arms. Features of arms are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints, freeze_fields, row_products, sigmoid
from worker.bandit.click_model import Displays, Fit, Observations, inputs
from worker.bandit.estimators import ByArm, Coefficients, estimate, inner
from worker.bandit.precision import Precision
from worker.errors import InputError

#: λ_b, the precision of intercepts.
INTERCEPT_PRECISION = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class AdditiveModel:
    """The belief about θ_x (d,), or with an intercept (d+1,), and θ_k (K,); see `ClickModel` and `LinearModel`.

    Examples
    --------
    >>> belief = AdditiveModel.prior(dim=2, arms=3, ridge=1.0)
    >>> sigmoid(belief.log_odds(np.zeros((1, 2))))
    array([[0.5, 0.5, 0.5]])
    """

    name: ClassVar[str] = "additive"
    fields: ClassVar[tuple[str, ...]] = (
        "theta_context",
        "theta_arms",
        "precision.context",
        "precision.cross",
        "precision.arms",
    )

    theta_context: Floats
    theta_arms: Floats
    precision: Precision
    intercept: bool = False
    reuses_information: ClassVar[bool] = False

    def __post_init__(self) -> None:
        freeze_fields(self, theta_context=(self.precision.dim,), theta_arms=self.precision.arms.shape)

    @classmethod
    def prior(
        cls, *, dim: int, arms: int, ridge: float, features: Floats | None = None, intercept: bool = False
    ) -> AdditiveModel:
        if not intercept:
            return cls.certain(np.zeros(dim), np.zeros(arms), ridge=ridge)
        precision = Precision.diagonal(_prior(dim, ridge), np.full(arms, INTERCEPT_PRECISION))
        return cls(theta_context=np.zeros(dim + 1), theta_arms=np.zeros(arms), precision=precision, intercept=True)

    @classmethod
    def certain(cls, theta_context: Floats, theta_arms: Floats, *, ridge: float = 1.0) -> AdditiveModel:
        """Return a given θ with the prior's precision: the truth of a simulated world."""
        precision = Precision.prior(dim=len(theta_context), arms=len(theta_arms), ridge=ridge)
        return cls(theta_context=theta_context, theta_arms=theta_arms, precision=precision)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = False) -> AdditiveModel:
        context, cross, arms = (arrays[f"precision.{part}"] for part in ("context", "cross", "arms"))
        if cross.size == 0:
            cross = cross.reshape(len(arms), len(context))
        model = cls(
            theta_context=arrays["theta_context"],
            theta_arms=arrays["theta_arms"],
            precision=Precision(context=context, cross=cross, arms=arms),
            intercept=intercept,
        )
        if not model.precision.is_positive_definite:
            raise InputError("the precision is not positive definite")
        return model

    def pack(self) -> dict[str, Floats]:
        precision = self.precision
        parts = (self.theta_context, self.theta_arms, precision.context, precision.cross, precision.arms)
        return dict(zip(self.fields, parts, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdditiveModel):
            return NotImplemented
        same = map(np.array_equal, self.pack().values(), other.pack().values())
        return self.intercept == other.intercept and all(same)

    __hash__ = None  # type: ignore[assignment]

    @property
    def dim(self) -> int:
        return len(self.theta_context) - self.intercept

    def _inputs(self, contexts: Floats) -> Floats:
        """Return what θ_x is multiplied by: x, or u = [1; x]."""
        return inputs(contexts) if self.intercept else contexts

    @property
    def arms(self) -> int:
        return len(self.theta_arms)

    # ── predicting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def log_odds(self, contexts: Floats) -> Floats:
        return np.asarray((self._inputs(contexts) @ self.theta_context)[:, None] + self.theta_arms)

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        odds = _offsets(self._inputs(contexts), self.theta_context)[:, None] + self.theta_arms.take(arms, mode="clip")
        return np.where((arms >= 0) & (arms < self.arms), odds, -np.inf)

    def widths(self, contexts: Floats) -> Floats:
        return self.precision.widths(self._inputs(contexts))

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        return self.precision.squared_widths_of(self._inputs(contexts), arms)

    def heads(self, shown: Ints, dtype: DTypeLike) -> AdditiveHeads:
        return AdditiveHeads(self, shown, dtype)

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[AdditiveModel]:
        context, arms = self.precision.draw(
            generator.standard_normal((count, len(self.theta_context))), generator.standard_normal((count, self.arms))
        )
        for theta in zip(self.theta_context + context, self.theta_arms + arms, strict=True):
            yield replace(self, theta_context=theta[0], theta_arms=theta[1])

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fold(self, data: Observations, *, estimator: str) -> Fit[AdditiveModel]:
        """Learn from answered displays by the estimator called `estimator`.

        A hundred clicks in a hundred displays move an arm's log-odds up, but not to infinity.

        >>> prior = AdditiveModel.prior(dim=1, arms=2, ridge=1.0)
        >>> shown = Observations(contexts=np.zeros((100, 1)), sessions=np.arange(100),
        ...                      arms=np.zeros(100, dtype=np.intp), clicked=np.ones(100))
        >>> prior.fold(shown, estimator="laplace").model.theta_arms.round(2)
        array([3.36, 0.  ])
        """
        model, steps = estimate(self, data, estimator=estimator)
        return Fit(model=model, steps=steps)

    @property
    def coefficients(self) -> Coefficients:
        return self.theta_context, self.theta_arms

    def by_arm(self, data: Displays) -> ByArm:
        return ByArm(self._inputs(data.contexts), sessions=data.sessions, arms=data.arms)

    def predict(self, coefficients: Coefficients, data: ByArm) -> Floats:
        offsets = data.inputs @ coefficients[0]
        return np.asarray(offsets[data.sessions] + coefficients[1][data.arms])

    def gradient(self, data: ByArm, slopes: Floats) -> Coefficients:
        per_session = np.bincount(data.sessions, weights=slopes, minlength=len(data.inputs))
        per_arm = np.bincount(data.arms, weights=slopes, minlength=self.arms)
        return data.inputs.T @ per_session, np.asarray(per_arm, dtype=np.float64)

    def information(self, data: ByArm, weights: Floats) -> Precision:
        return self.precision.plus(data, weights)

    def updated(self, coefficients: Coefficients, precision: Precision) -> AdditiveModel:
        return replace(self, theta_context=coefficients[0], theta_arms=coefficients[1], precision=precision)

    def leverage(self, shown: Displays, slopes: Floats, seen: Displays) -> tuple[float, Floats]:
        gradient = self.gradient(self.by_arm(shown), slopes)
        direction = self.precision.solve(*gradient)
        return inner(gradient, direction), self.predict(direction, self.by_arm(seen))

    def forget(self, keep: float, *, ridge: float) -> AdditiveModel:
        prior = _prior(self.dim, ridge) if self.intercept else np.full(self.dim, ridge)
        faded = self.precision.forget(keep, context=prior, arms=self._arm_precision(ridge))
        return replace(self, precision=faded)

    def with_arms(self, count: int, *, ridge: float, features: Floats | None = None) -> AdditiveModel:
        return replace(
            self,
            theta_arms=np.concatenate([self.theta_arms, np.zeros(count)]),
            precision=self.precision.with_arms(count, ridge=self._arm_precision(ridge)),
        )

    def _arm_precision(self, ridge: float) -> float:
        return INTERCEPT_PRECISION if self.intercept else ridge

    def with_features(self, features: Floats) -> AdditiveModel:
        return self

    def choose_arms(self, arms: Sequence[int]) -> AdditiveModel:
        return replace(self, theta_arms=self.theta_arms[list(arms)], precision=self.precision.choose_arms(arms))

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, arm: int) -> tuple[Floats, Floats]:
        shared = self.precision.whitening.T @ self.precision.whitening
        centre = self.precision.centres[arm]
        # [1; x] ↦ (x or u, onehot(k)): the covariance of [θ_k (+ the intercept); θ_x].
        cross = -shared @ centre
        variance = centre @ shared @ centre + 1 / self.precision.arms[arm]
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
    def bias_deviations(self) -> Floats:
        """The posterior standard deviation of θ_k, (K,)."""
        return np.asarray(self.widths(np.zeros((1, self.dim)))[0])

    @property
    def effects(self) -> Floats:
        """θ_x: the effect of each context feature on the log-odds of every arm, (d,)."""
        return self.theta_context[int(self.intercept) :]

    @property
    def effect_deviations(self) -> Floats:
        """The posterior standard deviation of θ_x, the square root of the diagonal of LᵀL, (d,)."""
        return np.asarray(np.sqrt((self.precision.whitening**2).sum(axis=0)))[int(self.intercept) :]

    @property
    def norm(self) -> float:
        return float(np.hypot(np.linalg.norm(self.theta_context), np.linalg.norm(self.theta_arms)))

    @property
    def smallest_eigenvalue(self) -> float:
        return self.precision.smallest_eigenvalue


def _prior(dim: int, ridge: float) -> Floats:
    """Return the precision of the intercept and of each context coefficient."""
    return np.concatenate([[INTERCEPT_PRECISION], np.full(dim, ridge * dim)])


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

    def _offsets(self, contexts: Floats) -> Floats:
        return _offsets(self._model._inputs(contexts), self._model.theta_context)

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
        rows = self._model._inputs(contexts)
        here = row_products(rows - self._middle, self._model.precision.whitening.T)
        left = np.ones((len(rows), rows.shape[1] + 2), dtype=self._dtype)
        left[:, :-2] = -2 * here
        left[:, -1] = (here**2).sum(axis=1)
        squares = row_products(left, self._whitened_arms)
        np.maximum(squares, self._narrowest, out=squares)
        return np.sqrt(squares, out=squares)
