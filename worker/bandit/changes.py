"""Noticing that a single ad has changed (docs/math.md §12).

Rules that hold in this file:

- A window says something about an arm by the Laplace evidence of its own displays under a normal belief about its
  coefficients; what all arms share is taken as it is known.
- The doubt about an arm is ln(1 + R), where R is the Shiryaev–Roberts statistic: the sum, over all windows in which the
  arm may have changed, of the likelihood ratios since then. An arm that stays as it is reaches R = r in r windows on
  average, or later, so `CERTAIN` bounds the false alarms of all arms together.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.estimators import MOST_STEPS, ByArm
from worker.errors import EstimationError

#: Doubt, beyond the logarithm of the number of arms, from which on an arm has changed.
CERTAIN: Final = 6.0
#: Of a Newton step in posterior standard deviations, squared: what is left of the evidence is far below rounding.
TOLERANCE: Final = 1e-18
MOST_HALVINGS: Final = 40


def with_evidence(doubts: Floats, shown: Ints, evidence: Floats) -> Floats:
    """Return doubts (K,) after a window, with the evidence of each arm shown for being new against being as known.

    >>> with_evidence(np.array([0.0, 5.0, 5.0]), np.array([0, 1]), np.array([-5.0, 2.0])).round(3).tolist()
    [0.007, 7.001, 5.0]
    """
    after = doubts.copy()
    after[shown] = np.logaddexp(0, doubts[shown] + evidence)
    return after


def changed_arms(doubts: Floats, reluctance: float) -> Ints:
    """Return the arms that have changed: the indices of doubts (K,) that are certain; `reluctance` may ask for more."""
    return np.flatnonzero(doubts > max(CERTAIN, reluctance) + np.log(len(doubts)))


class _Point(NamedTuple):
    """Coefficients of the arms shown (J, n), chances of displays, the pull of the belief, log posterior (J,)."""

    coefficients: Floats
    chances: Floats
    pull: Floats
    height: Floats


class Windows:
    """The displays of a window, arm by arm, with their log-odds from all but the arm's coefficients, `offsets` (m,)."""

    def __init__(self, data: ByArm, clicked: Floats, offsets: Floats) -> None:
        self._data, self._clicked, self._offsets = data, clicked, offsets
        self._owners = np.searchsorted(data.shown, data.arms)

    def evidence(self, centres: Floats, covariances: Floats) -> Floats:
        """Return ln p(displays) of each arm shown if its coefficients are N(centre, covariance) before, (J,).

        `centres` is (J, n), `covariances` (J, n, n), or (1, n, n) for all arms.
        """
        precisions = np.asarray(np.linalg.inv(covariances), dtype=np.float64)
        here = self._at(centres, centres, precisions)
        for _ in range(MOST_STEPS):
            slope = self._sums(self._clicked - here.chances) - here.pull
            information = self._information(precisions, here.chances)
            move = np.asarray(np.linalg.solve(information, slope[:, :, None])[:, :, 0], dtype=np.float64)
            promised = (slope * move).sum(axis=1)
            if not np.isfinite(promised).all():
                raise EstimationError("the evidence of a change is not finite")
            if promised.max(initial=0.0) <= TOLERANCE:
                spread = np.linalg.slogdet(precisions)[1] - np.linalg.slogdet(information)[1]
                return here.height + np.asarray(spread / 2, dtype=np.float64)
            here = self._climb(here, move, promised, centres, precisions)
        raise EstimationError(f"the evidence of a change did not converge in {MOST_STEPS} steps")

    def _at(self, coefficients: Floats, centres: Floats, precisions: Floats) -> _Point:
        odds = self._data.products_of_shown(coefficients) + self._offsets
        surprise = np.logaddexp(0, np.where(self._clicked > 0, -odds, odds))
        off = coefficients - centres
        pull = np.matmul(precisions, off[:, :, None])[:, :, 0]
        likelihood = -np.bincount(self._owners, weights=surprise, minlength=len(centres))
        return _Point(coefficients, sigmoid(odds), pull, likelihood - (off * pull).sum(axis=1) / 2)

    def _climb(self, here: _Point, move: Floats, promised: Floats, centres: Floats, precisions: Floats) -> _Point:
        """Go along `move`, for each arm half as far until its log posterior rises by a quarter of what is promised."""
        scale = np.ones(len(move))
        for _ in range(MOST_HALVINGS):
            there = self._at(here.coefficients + scale[:, None] * move, centres, precisions)
            low = there.height < here.height + scale * promised / 4 - 1e-9 * (1 + np.abs(here.height))
            if not low.any():
                return there
            scale[low] /= 2
        raise EstimationError("the evidence of a change has no way up")

    def _sums(self, values: Floats) -> Floats:
        return self._data.sums(values, arms=1 + int(self._data.shown.max(initial=-1)))[self._data.shown]

    def _information(self, precisions: Floats, chances: Floats) -> Floats:
        total = np.repeat(precisions, len(self._data.shown) // len(precisions), axis=0)
        for some, sums in self._data.squares(chances * (1 - chances)):
            total[np.searchsorted(self._data.shown, some)] += sums
        return total
