"""The same mathematics again, dense, slow and obvious: the structured code is compared with it.

Algebra is done in extended precision where the machine has it, so that a difference is the tested code's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import Observations
from worker.bandit.precision import Precision

Floats = NDArray[np.float64]
Wide = NDArray[np.longdouble]


def dense_theta(model: AdditiveModel) -> Floats:
    """Return [θ_x; θ_k], (d+K,)."""
    return np.concatenate(model.coefficients)


def dense_matrix(precision: Precision) -> Floats:
    """Return the full matrix A, (d+K, d+K)."""
    return np.block([[precision.context, precision.cross.T], [precision.cross, np.diag(precision.arms)]])


# ── algebra ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def inverse(matrix: NDArray[np.floating]) -> Wide:
    """Invert by Gauss-Jordan elimination with row pivots, in extended precision."""
    size = len(matrix)
    table = np.hstack([matrix.astype(np.longdouble), np.eye(size, dtype=np.longdouble)])
    for column in range(size):
        pivot = column + int(np.abs(table[column:, column]).argmax())
        table[[column, pivot]] = table[[pivot, column]]
        table[column] /= table[column, column]
        others = np.arange(size) != column
        table[others] -= np.outer(table[others, column], table[column])
    return np.asarray(table[:, size:])


def features(contexts: Floats, sessions: Iterable[int], arms: Iterable[int], count: int) -> Floats:
    """Return z = [x; onehot(k)] of displays, a row each."""
    return np.array([[*contexts[session], *np.eye(count)[arm]] for session, arm in zip(sessions, arms, strict=True)])


def squared_widths(precision: Precision, contexts: Floats) -> Floats:
    """Return zᵀA⁻¹z of all contexts and arms, (n, K)."""
    inverted, count = inverse(dense_matrix(precision)), len(precision.arms)
    rows = []
    for row in range(len(contexts)):
        z = features(contexts, [row] * count, range(count), count).astype(np.longdouble)
        rows.append(((z @ inverted) * z).sum(axis=1))
    return np.array(rows, dtype=np.float64)


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def logistic(u: NDArray[np.floating]) -> Wide:
    return np.asarray(1 / (1 + np.exp(-np.asarray(u, dtype=np.longdouble))))


def all_features(data: Observations, count: int) -> Floats:
    return features(data.contexts, data.sessions, data.arms, count)


def dense_map(z: Floats, centre: Floats, matrix: Floats, clicked: Floats) -> tuple[Wide, Wide]:
    """Return the MAP of displays z (m, p) under N(centre, matrix⁻¹) and the precision there.

    By dense Newton in extended precision, to the last bit; a step moves the log-odds by at most 2.
    """
    theta = centre = centre.astype(np.longdouble)
    for _ in range(80):
        chances = logistic(z @ theta)
        gradient = z.T @ (clicked - chances) - matrix @ (theta - centre)
        step = inverse(matrix + (z.T * (chances * (1 - chances))) @ z) @ gradient
        step = step / max(1.0, float(np.abs(z @ step).max()) / 2)
        theta = theta + step
        if np.abs(step).max() <= 1e-16 * (1 + np.abs(theta).max()):
            break
    chances = logistic(z @ theta)
    return theta, matrix + (z.T * (chances * (1 - chances))) @ z


def map_estimate(prior: AdditiveModel, data: Observations) -> tuple[Wide, Wide]:
    return dense_map(all_features(data, prior.arms), dense_theta(prior), dense_matrix(prior.precision), data.clicked)


def curve(odds: Floats, widths: Floats, gains: Floats) -> Floats:
    """Return β·width·sqrt(f(1−f)·f⁺(1−f⁺))·max(e − V, 0), in extended precision; widths are β·width."""
    low, high = logistic(odds), logistic(odds + widths.astype(np.longdouble))
    against = logistic(-odds), logistic(-(odds + widths.astype(np.longdouble)))
    slope = np.sqrt(low * against[0] * high * against[1])
    return np.asarray(widths * slope * np.maximum(gains, 0), dtype=np.float64)


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def bonus_of(name: str, odds: Floats, widths: Floats, gains: Floats) -> Floats:
    """The bonus of this name (docs/math.md §3)."""
    if name == "paper":
        return widths
    if name == "curve":
        return curve(odds, widths, gains)
    f = np.asarray(logistic(odds), dtype=float)
    return widths * f * (1 - f) * np.maximum(gains, 0.0)


def slate_value(chances: Sequence[float] | Floats, rewards: Sequence[float] | Floats, slate: Iterable[int]) -> float:
    """Return Σ_h P(reached h) f e: what a slate earns, counted forwards."""
    value, reach = 0.0, 1.0
    for arm in slate:
        value += reach * float(chances[arm]) * float(rewards[arm])
        reach *= 1 - float(chances[arm])
    return value


def best_value(
    chances: Floats, rewards: Floats, horizon: int, eligible: Iterable[int], *, repeats: bool = False
) -> float:
    """Return the value of the best of all K^H slates, or of all ordered subsets of at most H arms."""
    arms = list(eligible)
    sizes = range(min(horizon, len(arms)) + 1)
    subsets = (slate for size in sizes for slate in permutations(arms, size))
    slates = product(arms, repeat=horizon) if repeats else subsets
    return max((slate_value(chances, rewards, slate) for slate in slates), default=0.0)
