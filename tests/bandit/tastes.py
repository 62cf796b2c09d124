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
from worker.bandit.groups import Groups
from worker.bandit.hierarchy import Hierarchy
from worker.bandit.personal import PersonalModel

from .beliefs import displays, seeds, seen
from .reference import Wide, inverse

Floats = NDArray[np.float64]

#: Features per arm; 0 means none.
columns = st.integers(0, 3)


def grown(prior: Hierarchy, count: int, generator: np.random.Generator, *, arms: int | None = None) -> Hierarchy:
    """Return a hierarchy after `count` displays of its first `arms` arms."""
    contexts = inputs(generator.normal(size=(max(1, count), prior.size - 1)))
    sessions, shown = displays(contexts, arms or prior.arms, count, generator)
    positions = generator.integers(0, prior.positions + 1, count)
    seen = ByArm(contexts, sessions=sessions, arms=shown, positions=positions)
    return prior.plus(seen, generator.uniform(0.02, 0.25, count))


def taste(
    dim: int, arms: int, generator: np.random.Generator, *, features: int = 0, displayed: int = 60, horizon: int = 1
) -> PersonalModel:
    """Return a personal belief after `displayed` displays, most of them of the first arms; any features."""
    described = generator.normal(size=(arms, features)) if features else None
    prior = PersonalModel.prior(
        dim=dim,
        arms=arms,
        ridge=float(generator.choice([0.5, 1.0])),
        features=described,
        horizon=horizon,
        groups=declared(dim, generator),
        ad_groups=declared(features, generator),
    )
    precision = grown(prior.precision, displayed, generator, arms=max(1, arms - 1))
    believed = tuple(generator.normal(size=part.shape) / 2 for part in prior.coefficients)
    return prior.updated(believed, precision)


def declared(columns: int, generator: np.random.Generator) -> Groups:
    """Return features that share out some columns."""
    cuts = np.flatnonzero(generator.random(max(0, columns - 1)) < 0.5) + 1
    widths = np.diff([0, *cuts, columns]) if columns else np.zeros(0)
    return Groups(widths=widths, squares=generator.uniform(0.3, 2.0, len(widths)))


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
    horizon = draw(st.integers(1, 4))
    return Tastes(taste(dim, arms, generator, features=features, displayed=displayed, horizon=horizon), generator)


def answers_to(truth: PersonalModel, sessions: int, count: int, generator: np.random.Generator) -> Observations:
    """Return `count` displays answered by users who behave as `truth` says."""
    contexts = generator.normal(size=(sessions, truth.dim))
    rows, arms = displays(contexts, truth.arms, count, generator)
    effects = truth.position_effects
    positions = generator.integers(0, len(effects), count)
    chances = sigmoid(truth.log_odds(contexts)[rows, arms] + effects[positions])
    return seen(contexts, rows, arms, generator.random(count) < chances, positions)


# ── the whole matrix ─────────────────────────────────────────────────────────────────────────────────────────────────


def row_of(precision: Hierarchy, u: Floats, arm: int, position: int = 0) -> Floats:
    """Return z with log-odds z·θ, θ = [Γ by columns; b; v_1; …; v_K]."""
    own = np.zeros((precision.arms, precision.size))
    own[arm] = u
    effects = np.eye(precision.positions + 1)[min(position, precision.positions)][1:]
    return np.concatenate([np.kron(precision.features[arm], u), effects, own.ravel()])


def rows_of(precision: Hierarchy, data: Observations) -> Floats:
    u = inputs(data.contexts)
    shown = zip(data.sessions, data.arms, data.positions, strict=True)
    return np.array([row_of(precision, u[session], arm, position) for session, arm, position in shown])


def whole_matrix(precision: Hierarchy) -> Floats:
    """Return A from its definition: the prior, and every arm's information seen through z."""
    matrix = np.diag(prior_of(precision))
    count = shared_size(precision)
    if precision.inherited is not None:
        matrix[:count, :count] += precision.inherited
    effects = np.eye(len(matrix))[precision.prior.size : count]
    for arm, (information, crossing) in enumerate(zip(precision.information, precision.crossing, strict=True)):
        through = head_of(precision, arm)
        beside = through.T @ crossing @ effects
        matrix += through.T @ information @ through + beside + beside.T + effects.T @ np.diag(crossing[0]) @ effects
    return matrix


def prior_of(precision: Hierarchy) -> Floats:
    """Return the diagonal of A before any display."""
    own = np.tile(precision.own, precision.arms)
    return np.concatenate([precision.prior.T.ravel(), np.ones(precision.positions), own])


def shared_size(precision: Hierarchy) -> int:
    return precision.prior.size + precision.positions


def head_of(precision: Hierarchy, arm: int) -> Floats:
    """Return the matrix that takes θ to the arm's coefficients Γ a_k + v_k, (n, all)."""
    return np.array([row_of(precision, u, arm) for u in np.eye(precision.size)])


def vector(shared: Floats, positions: Floats, own: Floats) -> Floats:
    return np.concatenate([shared.T.ravel(), positions, own.ravel()])


def covariance_of(precision: Hierarchy) -> Wide:
    return inverse(whole_matrix(precision))


def marginal(precision: Hierarchy, arms: Sequence[int]) -> Wide:
    """Return the covariance of Γ, b and the own parts of some arms, in this order."""
    size, shared = precision.size, shared_size(precision)
    kept = [*range(shared), *(shared + arm * size + i for arm in arms for i in range(size))]
    return covariance_of(precision)[np.ix_(kept, kept)]
