"""How much to explore: the bonus that optimistic planning adds to Q_h(k), the budget M_t and the radius β_t."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Keys, sigmoid
from worker.errors import InputError

_ODD = tuple(np.uint32(number) for number in (0x9E3779B1, 0x85EBCA77, 0x85EBCA6B, 0xC2B2AE35))
_SHIFTS = (np.uint32(16), np.uint32(13))
#: Largest share of new ads by which they set the clock of M_t back. Many new ads get displays without exploring, too:
#: what is known of ads like them is a good guess.
NEWCOMERS = 0.1
_STEEPEST = 40.0  # e^−40 squared is still a number in single precision


class Bonus(ABC):
    """A rule for the bonus, from click probabilities f, widths, revenues e and continuation values V.

    `widths` are β·width everywhere. `factors` (n, columns), if there are any, multiply the bonus of session and arm.
    """

    name: str

    @abstractmethod
    def optimistic(self, log_odds: Array, widths: Array, factors: Array | None = None) -> Array:
        """Return the probabilities that an exploring session plans on without repeats."""

    def prepared(self, widths: Array) -> Array:
        """Return what `raised` needs of the widths, which is the same at all positions."""
        return widths

    @abstractmethod
    def raised(self, chances: Array, widths: Array, factors: Array | None, prepared: Array | None = None) -> Array:
        """Return the part of `scores` that all positions with the same click probabilities share."""

    @abstractmethod
    def scores(self, gains: Array, chances: Array, raised: Array, *, leaving: bool) -> Array:
        """Return f(e − sV) + bonus of each arm, (n, columns), but for a constant of each session if nobody leaves.

        `gains` are e − sV, s being the share of the users without a click who go on, and may be overwritten.
        """


class SlopeBonus(Bonus):
    """β·width·slope·max(e − V, 0) with a slope of the logistic curve: β standard deviations of Q_h(k) for fixed V."""

    @abstractmethod
    def slopes(self, chances: Array, prepared: Array) -> Array:
        """Return the slope for each f, an array of its own; `prepared` are the widths, prepared."""

    def raised(self, chances: Array, widths: Array, factors: Array | None, prepared: Array | None = None) -> Array:
        """Return f + β·width·slope, an array of its own: the score of an arm per unit of e − sV > 0."""
        raised = self.slopes(chances, self.prepared(widths) if prepared is None else prepared)
        raised *= widths
        if factors is not None:
            raised *= factors
        raised += chances
        return raised

    def optimistic(self, log_odds: Array, widths: Array, factors: Array | None = None) -> Array:
        return np.minimum(self.raised(sigmoid(log_odds), widths, factors), 1)

    def scores(self, gains: Array, chances: Array, raised: Array, *, leaving: bool) -> Array:
        if leaving:  # where e ≤ sV the product with the larger factor is the lower one
            np.maximum(gains * raised, gains * chances, out=gains)
            return gains
        # Where e > V both terms share the factor e − V. An arm with e ≤ V has no bonus, and scores at most 0 either
        # way; some arm has e > V.
        gains *= raised
        return gains


class ValueBonus(SlopeBonus):
    """The slope at the estimate, f(1−f): the delta method. An arm wrongly thought hopeless has no bonus."""

    name = "value"

    def slopes(self, chances: Array, prepared: Array) -> Array:
        slopes = np.subtract(1, chances)
        slopes *= chances
        return slopes

    def optimistic(self, log_odds: Array, widths: Array, factors: Array | None = None) -> Array:
        return sigmoid(log_odds + (widths if factors is None else widths * factors))


class CurveBonus(SlopeBonus):
    """The slope midway, sqrt(f(1−f) · f⁺(1−f⁺)), between the estimate and its optimistic end f⁺ = σ(u + β·width).

    With q = e^{−β·width/2} it is (1−f)·q · f / (f + (1−f) q²), which needs one exponential.
    """

    name = "curve"

    def prepared(self, widths: Array) -> Array:
        """Return q."""
        shrunk = np.multiply(widths, -0.5)
        np.maximum(shrunk, -_STEEPEST, out=shrunk)
        return np.exp(shrunk, out=shrunk)

    def slopes(self, chances: Array, prepared: Array) -> Array:
        slopes = np.subtract(1, chances)
        slopes *= prepared
        # The quotient is between 0 and 1, and 0 for f = 0: nothing overflows, and no small f is lost.
        quotients = np.multiply(prepared, slopes)
        quotients += chances
        np.divide(chances, quotients, out=quotients)
        slopes *= quotients
        return slopes


class PaperBonus(Bonus):
    """β·width, the same for any revenue of an arm: as printed in the paper."""

    name = "paper"

    def optimistic(self, log_odds: Array, widths: Array, factors: Array | None = None) -> Array:
        raise InputError("the bonus paper has no probabilities to plan on without repeats")

    def raised(self, chances: Array, widths: Array, factors: Array | None, prepared: Array | None = None) -> Array:
        return widths if factors is None else widths * factors

    def scores(self, gains: Array, chances: Array, raised: Array, *, leaving: bool) -> Array:
        gains *= chances
        gains += raised
        return gains


BONUSES: Mapping[str, Bonus] = {bonus.name: bonus for bonus in (CurveBonus(), ValueBonus(), PaperBonus())}
CURVE = BONUSES["curve"]


# ── sharing out optimism ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Factors on the bonus, 1 ± share/2, by a stable hash of session and arm.

    Sessions that are planned under the same version would all try the same arm first; with factors of their own they
    share out the arms of which equally little is known. With repeats every position has factors of its own, else a
    session would try its arm at all of them: a step of the golden ratio further through [0, 1), around its end.

    share : 0 (none) to 1
    keys : (n,), a stable number for each session

    >>> spread = Spread(share=1.0, keys=np.array([7, 8], dtype=np.uint32))
    >>> arm_keys = np.array([1, 2], dtype=np.uint32)
    >>> [spread.factors(slice(0, 2), arm_keys, np.float64, position).round(2).tolist() for position in (0, 1)]
    [[[0.99, 0.77], [0.62, 1.2]], [[0.61, 1.38], [1.24, 0.81]]]
    """

    share: float
    keys: Keys

    def factors(self, rows: slice, arm_keys: Keys, dtype: DTypeLike, position: int = 0) -> Array:
        """Return the factors of some rows at a position, from 0, for arms with these keys: (n, columns)."""
        return self.factors_at(position, self.hashes(rows, arm_keys), dtype)

    def hashes(self, rows: slice, arm_keys: Keys) -> Keys:
        """Return what `factors_at` needs of some rows and arms, the same at all positions: (n, columns)."""
        mixed: Keys = np.bitwise_xor.outer(self.keys[rows] * _ODD[0], arm_keys * _ODD[1])
        for shift, odd in zip(_SHIFTS, _ODD[2:], strict=True):  # the finaliser of MurmurHash3
            mixed ^= mixed >> shift
            mixed *= odd
        mixed ^= mixed >> _SHIFTS[1]
        return mixed

    def factors_at(self, position: int, hashes: Keys, dtype: DTypeLike) -> Array:
        """Return the factors at a position."""
        factors: Array = (hashes + np.uint32(position * int(_ODD[0]) % 2**32)).astype(dtype)
        factors *= self.share * 2.0**-32
        factors += 1 - self.share / 2
        return factors


# ── how much to explore ───────────────────────────────────────────────────────────────────────────────────────────────


def explore_budget(users: int, t: float, episodes: int) -> int:
    """Return M_t = max(1, ⌊N e^{−t / ln T}⌋), the users that AUCBBP lets explore in episode t of T.

    >>> [explore_budget(50, t, 300) for t in (0, 1, 5, 30)]
    [50, 41, 20, 1]
    """
    return max(1, math.floor(users * math.exp(-t / math.log(episodes))))


def restarted(t: float, share: float, episodes: int) -> float:
    """Return the clock t of M_t after a share of the ads, or of what was known, is new: M_t is N·share or more.

    >>> explore_budget(50, restarted(100, 0.5, 300), 300), restarted(1.0, 0.5, 300)
    (25, 1.0)
    """
    return min(t, -math.log(share) * math.log(episodes)) if share > 0 else t


def joined(t: float, share: float, episodes: int) -> float:
    """Return the clock t after ads have joined that are this share of all; beyond `NEWCOMERS` it changes no more."""
    return restarted(t, min(share, NEWCOMERS), episodes)


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
