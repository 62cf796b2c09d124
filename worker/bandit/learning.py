"""Learning from a window, and noticing that users or ads have changed (docs/math.md §12).

Before a fold, older displays may be forgotten: the belief keeps a share γ of what they have said. With `AUTO`, the
window itself decides: each γ is weighed by the Laplace evidence of the window's displays under the faded belief,

    ln p(y | θ̂) − ½ ‖θ̂ − θ̂_before‖²_A + ½ (ln det A_before − ln det A_after)

and anything but 1 must be better by `RELUCTANCE`. The values are tried in falling order as long as the evidence grows:
usually that is one more fit.

A change is mostly noticed in two or three windows close to each other. Where the model is wrong, as where tastes are a
step, windows may look like a change again and again: what is forgotten is missed in the next ones. So each further
change that is noticed within about a hundred folds must be better by `RELUCTANCE` more.

Single arms that have changed are noticed by `Windows`:

- A window says something about an arm by the Laplace evidence of its own displays under a normal belief about its
  coefficients; what all arms share is taken as it is known.
- The doubt about an arm is ln(1 + R), where R is the Shiryaev–Roberts statistic: the sum, over all windows in which the
  arm may have changed, of the likelihood ratios since then. An arm that stays as it is reaches R = r in r windows on
  average, or later, so `CERTAIN` bounds the false alarms of all arms together.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np

from worker.bandit.arrays import Floats, sigmoid
from worker.bandit.click_model import ClickModel, Fit, Observations
from worker.bandit.estimators import MOST_STEPS, ByArm, Coefficients, estimate, evidence
from worker.errors import EstimationError

AUTO: Final = "auto"
#: Shares of the older displays that are weighed against each other.
SHARES: Final = (1.0, 0.7, 0.3, 0.1)
#: Nats by which the evidence must favour forgetting.
RELUCTANCE: Final = 3.0
#: Share of a change that still counts one fold later.
REMEMBERED: Final = 0.99
#: Changes that count before any fold: what a young model takes for a change is mostly its own ignorance.
AT_FIRST: Final = 4.0


def changes_after(changes: float, forgotten: float) -> float:
    """Return the number of changes noticed lately after a fold that forgot a share of what was known; a third is one.

    >>> changes_after(0.0, 0.9), changes_after(0.0, 0.1), changes_after(1.0, 0.0)
    (1.0, 0.30000000000000004, 0.99)
    """
    return REMEMBERED * changes + min(1.0, 3 * forgotten)


class LinearModel(ClickModel):
    """A click model that is linear in its coefficients θ, with the belief N(θ̂, A⁻¹): how it learns.

    A display is z, so that its log-odds are zᵀθ.
    """

    #: Whether short Newton steps use the information of the step before.
    reuses_information: ClassVar[bool] = False
    #: The precision A, an `Information`.
    precision: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.dim == other.dim and all(map(np.array_equal, self.pack().values(), other.pack().values()))

    @property
    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The estimate θ̂."""

    @abstractmethod
    def by_arm(self, data: Observations) -> ByArm:
        """Prepare displays for the methods below."""

    @abstractmethod
    def predict(self, coefficients: Coefficients, data: ByArm) -> Floats:
        """Return zᵀθ of displays, (m,)."""

    @abstractmethod
    def gradient(self, data: ByArm, slopes: Floats) -> Coefficients:
        """Return Σ slopes·z over displays."""

    @abstractmethod
    def updated(self, coefficients: Coefficients, precision: Any) -> Self:
        """Return the model with another estimate and precision."""

    def without_changed(self, data: Observations, reluctance: float) -> tuple[Self, tuple[int, ...]]:
        """Forget what was known of single arms that have changed, if the model can; return them, too."""
        return self, ()

    def said(self) -> Coefficients:
        """Return what displays alone have said: A θ̂, as the mean of the prior is 0."""
        return tuple(self.precision.times(*self.coefficients))

    def strengthened(self) -> Self:
        """Learn from the estimate how strong features are, if the model does."""
        return self

    def fold(
        self, data: Observations, *, estimator: str, forgetting: float | str = 1.0, changes: float = 0.0
    ) -> Fit[Self]:
        """Learn from displays by the estimator called `estimator`; `changes` is the number noticed lately."""
        if not len(data):
            return Fit(model=estimate(self, data, estimator=estimator), kept=1.0)
        shares = SHARES if forgetting == AUTO else (float(forgetting),)
        reluctance = RELUCTANCE * max(1.0, changes - 1)
        known, changed = self.without_changed(data, reluctance) if forgetting == AUTO else (self, ())
        tried: list[tuple[float, Self, float]] = []
        for share in shares:
            before = known if share == 1 else known.forget(share)
            after = estimate(before, data, estimator=estimator)
            # One share is not weighed against others.
            worth = evidence(before, after, data) if len(shares) > 1 else 0.0
            tried.append((worth, after, share))
            if len(tried) > 1 and tried[-1][0] <= tried[-2][0]:
                break
        _, after, share = max(tried, key=lambda one: one[0] - (reluctance if one[2] < 1 else 0.0))
        return Fit(model=after.strengthened(), kept=share, changed=changed)


# ── single arms that have changed ─────────────────────────────────────────────────────────────────────────────────────

#: Doubt, beyond the logarithm of the number of arms, from which on an arm has changed.
CERTAIN: Final = 8.0
#: Of a Newton step in posterior standard deviations, squared: what is left of the evidence is far below rounding.
TOLERANCE: Final = 1e-18
MOST_HALVINGS: Final = 40


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
        odds = self._data.products(coefficients) + self._offsets
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
