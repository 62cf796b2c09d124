"""The plain implementation of the paper: the whole (d+K)² matrix, one session and one arm after another.

The benchmark measures the fast implementation against it, and tests check that both agree.
"""

from __future__ import annotations

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.click_model import Observations, Truth
from worker.bandit.precision import Precision

STEPS = 50


def dense_theta(model: AdditiveModel) -> Floats:
    """Return [θ_x; θ_k], (d+K,)."""
    return np.concatenate(model.coefficients)


def dense_matrix(precision: Precision) -> Floats:
    """Return the full matrix A, (d+K, d+K)."""
    return np.block([[precision.context, precision.cross.T], [precision.cross, np.diag(precision.arms)]])


def around(model: AdditiveModel, truth: Truth) -> AdditiveModel:
    """Return the certainty of a model around the estimate of another."""
    return model.updated((truth.effects, truth.biases), model.precision)


class DensePlanner:
    """UCBBP with the `curve` bonus, on a dense inverse that is computed once.

    Its rows z = [x or u; onehot(k)] are those of the additive model.
    """

    def __init__(self, model: AdditiveModel, rewards: Floats, *, horizon: int, beta: float) -> None:
        self.theta = dense_theta(model)
        self.inverse = np.linalg.inv(dense_matrix(model.precision))
        self.rewards, self.horizon, self.beta = rewards, horizon, beta
        self.intercept = model.intercept

    def slate(self, context: Floats) -> Ints:
        """Plan one session: (d,) → (H,)."""
        arms = len(self.rewards)
        chances, widths = np.empty(arms), np.empty(arms)
        shared = len(self.theta) - arms
        z = np.ones(len(self.theta))
        z[int(self.intercept) : shared] = context
        z[shared:] = 0.0
        for k in range(arms):
            z[shared + k] = 1.0
            chances[k] = 1 / (1 + np.exp(-(z @ self.theta)))
            widths[k] = np.sqrt(z @ self.inverse @ z)
            z[shared + k] = 0.0
        hopeful = sigmoid(np.log(chances / (1 - chances)) + self.beta * widths)
        slopes = np.sqrt(chances * (1 - chances) * hopeful * (1 - hopeful))
        slate = np.empty(self.horizon, dtype=np.intp)
        ahead = 0.0
        for h in range(self.horizon - 1, -1, -1):
            q = chances * self.rewards + (1 - chances) * ahead
            bonus = self.beta * widths * slopes * np.maximum(self.rewards - ahead, 0)
            slate[h] = (q + bonus).argmax()
            ahead = float(q.max())
        return slate


def dense_laplace(theta: Floats, matrix: Floats, data: Observations) -> tuple[Floats, Floats]:
    """Fold an episode: θ̂ (d+K,) and A (d+K, d+K) before → after."""
    dim = data.contexts.shape[1]
    z = np.zeros((len(data), len(theta)))
    z[:, :dim] = data.contexts[data.sessions]
    z[np.arange(len(data)), dim + data.arms] = 1.0
    now = theta
    for _ in range(STEPS):
        chances = sigmoid(z @ now)
        information = matrix + z.T @ (z * (chances * (1 - chances))[:, None])
        step = np.linalg.solve(information, z.T @ (data.clicked - chances) - matrix @ (now - theta))
        if np.abs(step).max() <= 1e-10 * (1 + np.abs(now).max()):
            break
        now = now + step
    return now, information
