"""How much to explore: the bonus that optimistic planning adds to Q_h(k), the budget M_t and the radius β_t."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from worker.bandit.arrays import Array, Floats, sigmoid
from worker.errors import InputError

_STEEPEST = 40.0  # e^−40 squared is still a number in single precision


class Bonus(Protocol):
    """A rule for the bonus, from click probabilities f, widths, revenues e and continuation values V."""

    name: str

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        """Return the bonus of each arm; `widths` are β·width, `gains` are e − V."""

    def optimistic(self, log_odds: Array, widths: Array) -> Array:
        """Return the probabilities that an exploring session plans on without repeats; `widths` are β·width."""

    def scores(
        self, chances: Array, widths: Array, rewards: Array, continuations: Array, answers: Array | None = None
    ) -> Iterator[Array]:
        """Yield, per step h, what the optimistic arm is the argmax of, (n, columns), in a buffer that is used again.

        That is Q_h + bonus − V_{h+1}, or with answer rates (H, columns) Q_h + bonus, both parts times the rate.
        `widths` are β·width and may be overwritten; `continuations` are V_1 … V_{H+1}, (n, H+1).
        """


class SlopeBonus(ABC):
    """β·width·slope·max(e − V, 0) with a slope of the logistic curve: β standard deviations of Q_h(k) for fixed V."""

    name: str

    @abstractmethod
    def slopes(self, chances: Array, widths: Array) -> Array:
        """Return the slope for each f, an array of its own; `widths` are β·width."""

    def factors(self, chances: Array, widths: Array) -> Array:
        """Return f + β·width·slope, an array of its own: the score of an arm per unit of e − V > 0."""
        factors = self.slopes(chances, widths)
        factors *= widths
        factors += chances
        return factors

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        return np.asarray(widths * self.slopes(chances, widths) * np.maximum(gains, 0.0))

    def optimistic(self, log_odds: Array, widths: Array) -> Array:
        return np.minimum(self.factors(sigmoid(log_odds), widths), 1)

    def scores(
        self, chances: Array, widths: Array, rewards: Array, continuations: Array, answers: Array | None = None
    ) -> Iterator[Array]:
        factors, scores = self.factors(chances, widths), np.empty_like(chances)
        for h, ahead in enumerate(continuations.T[1:]):
            np.subtract(rewards, ahead[:, None], out=scores)
            if answers is None:
                # f(e−V) + bonus. Where e > V both terms share the factor e − V. An arm with e ≤ V has no bonus, and
                # scores at most 0 either way; some arm has e > V.
                scores *= factors
            else:
                # Where e ≤ V the product with the larger factor is the lower one.
                np.maximum(scores * factors, scores * chances, out=scores)
                scores += ahead[:, None]
                scores *= answers[h]
            yield scores


class ValueBonus(SlopeBonus):
    """The slope at the estimate, f(1−f): the delta method. An arm wrongly thought hopeless has no bonus."""

    name = "value"

    def slopes(self, chances: Array, widths: Array) -> Array:
        slopes = np.subtract(1, chances)
        slopes *= chances
        return slopes

    def optimistic(self, log_odds: Array, widths: Array) -> Array:
        return sigmoid(log_odds + widths)


class CurveBonus(SlopeBonus):
    """The slope midway, sqrt(f(1−f) · f⁺(1−f⁺)), between the estimate and its optimistic end f⁺ = σ(u + β·width).

    With q = e^{−β·width/2} it is (1−f)·q · f / (f + (1−f) q²), which needs one exponential.
    """

    name = "curve"

    def slopes(self, chances: Array, widths: Array) -> Array:
        shrunk = np.multiply(widths, -0.5)
        np.maximum(shrunk, -_STEEPEST, out=shrunk)
        np.exp(shrunk, out=shrunk)
        slopes = np.subtract(1, chances)
        slopes *= shrunk
        # The quotient is between 0 and 1, and 0 for f = 0: nothing overflows, and no small f is lost.
        shrunk *= slopes
        shrunk += chances
        np.divide(chances, shrunk, out=shrunk)
        slopes *= shrunk
        return slopes


class PaperBonus:
    """β·width, the same whatever an arm can earn: as printed in the paper."""

    name = "paper"

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        return widths

    def optimistic(self, log_odds: Array, widths: Array) -> Array:
        raise InputError("the bonus paper has no probabilities to plan on without repeats")

    def scores(
        self, chances: Array, widths: Array, rewards: Array, continuations: Array, answers: Array | None = None
    ) -> Iterator[Array]:
        scores = np.empty_like(chances)
        for h, ahead in enumerate(continuations.T[1:]):
            np.subtract(rewards, ahead[:, None], out=scores)
            scores *= chances
            scores += widths
            if answers is not None:
                scores += ahead[:, None]
                scores *= answers[h]
            yield scores


BONUSES: Mapping[str, Bonus] = {bonus.name: bonus for bonus in (CurveBonus(), ValueBonus(), PaperBonus())}


CURVE = BONUSES["curve"]
VALUE = BONUSES["value"]


def bonus_named(name: str) -> Bonus:
    """Return the bonus called `name`."""
    if name not in BONUSES:
        raise InputError(f"unknown bonus {name!r}; one of {', '.join(BONUSES)}")
    return BONUSES[name]


# ── how much to explore ───────────────────────────────────────────────────────────────────────────────────────────────


def explore_budget(users: int, t: int, episodes: int) -> int:
    """Return M_t = max(1, ⌊N e^{−t / ln T}⌋), the users that AUCBBP lets explore in episode t of T.

    >>> [explore_budget(50, t, 300) for t in (0, 1, 5, 30)]
    [50, 41, 20, 1]
    """
    if episodes < 2:
        raise InputError(f"the number of episodes must be at least 2 (ln T divides), not {episodes}")
    return max(1, math.floor(users * math.exp(-t / math.log(episodes))))


def theory_radius(
    *, dim: int, arms: int, largest_reward: float, largest_norm: float, ridge: float, displays: int, delta: float = 0.05
) -> float:
    """Return β_t = κ e_max c_z sqrt(2(d+K) ln t̃ · ln((d+K)/δ)), κ = sqrt(3 + 2 ln(1 + c_z²/(8λ))).

    Valid and far too wide in practice: it explores for ever.

    >>> round(theory_radius(dim=5, arms=10, largest_reward=1.0, largest_norm=4.0, ridge=1.0, displays=1000), 1)
    313.5
    """
    size = dim + arms
    kappa = math.sqrt(3 + 2 * math.log(1 + largest_norm**2 / (8 * ridge)))
    spread = 2 * size * math.log(max(2, displays)) * math.log(size / delta)
    return kappa * largest_reward * largest_norm * math.sqrt(spread)
