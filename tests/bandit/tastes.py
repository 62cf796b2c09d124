"""Random personal beliefs, and the same mathematics on the whole matrix: slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.arrays import sigmoid
from worker.bandit.click_model import Observations, inputs
from worker.bandit.estimators import ByArm
from worker.bandit.hierarchy import Hierarchy
from worker.bandit.personal import PersonalModel

from .beliefs import displays, seeds
from .reference import Wide, inverse

Floats = NDArray[np.float64]

#: Features per arm; 0 means none.
columns = st.integers(0, 3)


def grown(prior: Hierarchy, count: int, generator: np.random.Generator, *, arms: int | None = None) -> Hierarchy:
    """Return a hierarchy after `count` displays of its first `arms` arms."""
    contexts = inputs(generator.normal(size=(max(1, count), prior.size - 1)))
    sessions, shown = displays(contexts, arms or prior.arms, count, generator)
    return prior.plus(ByArm(contexts, sessions=sessions, arms=shown), generator.uniform(0.02, 0.25, count))


def taste(
    dim: int, arms: int, generator: np.random.Generator, *, features: int = 0, displayed: int = 60
) -> PersonalModel:
    """Return a personal belief after `displayed` displays, most of them of the first arms."""
    described = generator.normal(size=(arms, features)) if features else None
    prior = PersonalModel.prior(dim=dim, arms=arms, ridge=1.0, features=described)
    precision = grown(prior.precision, displayed, generator, arms=max(1, arms - 1))
    return PersonalModel(
        shared=generator.normal(size=prior.shared.shape) / 2,
        own=generator.normal(size=prior.own.shape) / 2,
        precision=precision,
    )


@dataclass(frozen=True)
class Tastes:
    model: PersonalModel
    generator: np.random.Generator

    @property
    def precision(self) -> Hierarchy:
        return self.model.precision


@st.composite
def tastes(draw: st.DrawFn) -> Tastes:
    generator = np.random.default_rng(draw(seeds))
    dim, arms, features = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(columns)
    displayed = draw(st.sampled_from([0, 3, 40, 400]))
    return Tastes(taste(dim, arms, generator, features=features, displayed=displayed), generator)


def answers_to(truth: PersonalModel, sessions: int, count: int, generator: np.random.Generator) -> Observations:
    """Return `count` displays answered by users who behave as `truth` says."""
    contexts = generator.normal(size=(sessions, truth.dim))
    rows, arms = displays(contexts, truth.arms, count, generator)
    chances = sigmoid(truth.log_odds(contexts)[rows, arms])
    clicked = (generator.random(count) < chances).astype(float)
    return Observations(contexts=contexts, sessions=rows, arms=arms, clicked=clicked)


# ── the whole matrix ─────────────────────────────────────────────────────────────────────────────────────────────────


def row_of(precision: Hierarchy, u: Floats, arm: int) -> Floats:
    """Return z with log-odds z·θ, θ = [Γ by columns; v_1; …; v_K]."""
    own = np.zeros((precision.arms, precision.size))
    own[arm] = u
    return np.concatenate([np.kron(precision.features[arm], u), own.ravel()])


def rows_of(precision: Hierarchy, data: Observations) -> Floats:
    u = inputs(data.contexts)
    return np.array([row_of(precision, u[s], k) for s, k in zip(data.sessions, data.arms, strict=True)])


def whole_matrix(precision: Hierarchy) -> Floats:
    """Return A from its definition: the prior, and every arm's information seen through z."""
    own = np.tile(precision.own, precision.arms)
    matrix = np.zeros((len(precision.shared) + len(own),) * 2)
    matrix[: len(precision.shared), : len(precision.shared)] = precision.shared
    matrix[len(precision.shared) :, len(precision.shared) :] = np.diag(own)
    for arm, information in enumerate(precision.information):
        through = head_of(precision, arm)
        matrix += through.T @ information @ through
    return matrix


def head_of(precision: Hierarchy, arm: int) -> Floats:
    """Return the matrix that takes θ to the arm's coefficients Γ a_k + v_k, (n, all)."""
    return np.array([row_of(precision, u, arm) for u in np.eye(precision.size)])


def vector(shared: Floats, own: Floats) -> Floats:
    return np.concatenate([shared.T.ravel(), own.ravel()])


def parts(precision: Hierarchy, theta: NDArray[np.floating]) -> tuple[Floats, Floats]:
    size, count = precision.size, precision.features.shape[1]
    values = np.asarray(theta, dtype=np.float64)
    return values[: size * count].reshape(count, size).T.copy(), values[size * count :].reshape(-1, size).copy()


def covariance_of(precision: Hierarchy) -> Wide:
    return inverse(whole_matrix(precision))


def marginal(precision: Hierarchy, arms: Sequence[int]) -> Wide:
    """Return the covariance of Γ and the own parts of some arms, in this order."""
    size, shared = precision.size, len(precision.shared)
    kept = [*range(shared), *(shared + arm * size + i for arm in arms for i in range(size))]
    return covariance_of(precision)[np.ix_(kept, kept)]
