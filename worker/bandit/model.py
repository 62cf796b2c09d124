"""The click model: P(click on arm k | x) = σ(x·θ_x + θ_k), and what is believed about θ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.bandit.precision import Floats, Ints, Precision, frozen_array
from worker.errors import InputError


def sigmoid(u: Floats) -> Floats:
    """Return 1 / (1 + e^−u) without overflow."""
    tail = np.exp(-np.abs(u))
    return np.asarray(np.where(u >= 0, 1.0, tail) / (1.0 + tail))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """The answered displays of some sessions.

    Parameters
    ----------
    contexts : (n, d), one row per session
    sessions : (m,), the row of `contexts` that saw each display
    arms : (m,), the index of the arm displayed
    clicked : (m,), 1.0 or 0.0
    """

    contexts: Floats
    sessions: Ints
    arms: Ints
    clicked: Floats

    def __len__(self) -> int:
        return len(self.arms)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """What is believed about θ: the Gaussian N([theta_context; theta_arms], A⁻¹).

    Examples
    --------
    >>> belief = Posterior.prior(dim=2, arms=3, ridge=1.0)
    >>> belief.probabilities(np.zeros((1, 2)))
    array([[0.5, 0.5, 0.5]])
    """

    theta_context: Floats
    theta_arms: Floats
    precision: Precision

    def __post_init__(self) -> None:
        for name, shape in (("theta_context", (self.precision.dim,)), ("theta_arms", self.precision.arms.shape)):
            try:
                object.__setattr__(self, name, frozen_array(getattr(self, name), shape))
            except InputError as error:
                raise InputError(f"{name}: {error}") from None

    @classmethod
    def prior(cls, *, dim: int, arms: int, ridge: float) -> Posterior:
        """Return N(0, I/λ)."""
        return cls(
            theta_context=np.zeros(dim),
            theta_arms=np.zeros(arms),
            precision=Precision.prior(dim=dim, arms=arms, ridge=ridge),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Posterior):
            return NotImplemented
        return (
            np.array_equal(self.theta_context, other.theta_context)
            and np.array_equal(self.theta_arms, other.theta_arms)
            and self.precision == other.precision
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def dim(self) -> int:
        """The number d of context features."""
        return len(self.theta_context)

    @property
    def arms(self) -> int:
        """The number K of arms, retired ones among them."""
        return len(self.theta_arms)

    @property
    def norm(self) -> float:
        """‖θ̂‖."""
        return float(np.hypot(np.linalg.norm(self.theta_context), np.linalg.norm(self.theta_arms)))

    def log_odds(self, contexts: Floats) -> Floats:
        """Return x·θ_x + θ_k: (n, d) → (n, K)."""
        return np.asarray((contexts @ self.theta_context)[:, None] + self.theta_arms)

    def probabilities(self, contexts: Floats) -> Floats:
        """Return the estimated click probabilities: (n, d) → (n, K)."""
        return sigmoid(self.log_odds(contexts))

    def draws(self, generator: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        """Draw `count` parameters: context part (count, d) and arm part (count, K)."""
        context, arms = self.precision.draw(
            generator.standard_normal((count, self.dim)), generator.standard_normal((count, self.arms))
        )
        return self.theta_context + context, self.theta_arms + arms

    def with_arms(self, count: int, *, ridge: float) -> Posterior:
        """Append arms of which nothing is known but the prior."""
        return Posterior(
            theta_context=self.theta_context,
            theta_arms=np.concatenate([self.theta_arms, np.zeros(count)]),
            precision=self.precision.with_arms(count, ridge=ridge),
        )


def check_rewards(rewards: object) -> NDArray[np.float64]:
    """Return the revenues e_k as an array; each has to be finite and above zero."""
    array = frozen_array(rewards)
    if array.ndim != 1 or not len(array):
        raise InputError("there must be at least one arm")
    if not (array > 0).all():
        raise InputError("every reward must be above zero")
    return array
