"""Learning from a window, and noticing that users or ads have changed (docs/math.md §12).

Before a fold, older displays may be forgotten: the belief keeps a share γ of what they have said. With `AUTO`, the
window itself decides: each γ is weighed by the Laplace evidence of the window's displays under the faded belief,

    ln p(y | θ̂) − ½ ‖θ̂ − θ̂_before‖²_A + ½ (ln det A_before − ln det A_after)

and anything but 1 must be better by `RELUCTANCE`. The values are tried in falling order as long as the evidence grows:
usually that is one more fit.

A change is mostly noticed in two or three windows close to each other. Where the model is wrong, as where tastes are a
step, windows may look like a change again and again: what is forgotten is missed in the next ones. So each further
change that is noticed within about a hundred folds must be better by `RELUCTANCE` more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

import numpy as np

from worker.bandit.arrays import Floats
from worker.bandit.click_model import Fit, Observations
from worker.bandit.estimators import ByArm, Coefficients, estimate, evidence

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


class LinearModel(ABC):
    """A click model that is linear in its coefficients θ, with the belief N(θ̂, A⁻¹): how it learns (see `ClickModel`).

    A display is z, so that its log-odds are zᵀθ.
    """

    #: Whether short Newton steps use the information of the step before.
    reuses_information: ClassVar[bool] = False
    #: The precision A, an `Information`.
    precision: Any

    @property
    @abstractmethod
    def dim(self) -> int:
        """The number d of context features."""

    @abstractmethod
    def pack(self) -> Mapping[str, Floats]:
        """Return all that the model consists of."""

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

    @abstractmethod
    def forget(self, keep: float) -> Self:
        """Keep the share `keep` of what displays have said."""

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
            model, steps = estimate(self, data, estimator=estimator)
            return Fit(model=model, steps=steps, kept=1.0)
        shares = SHARES if forgetting == AUTO else (float(forgetting),)
        reluctance = RELUCTANCE * max(1.0, changes - 1)
        known, changed = self.without_changed(data, reluctance) if forgetting == AUTO else (self, ())
        tried: list[tuple[float, Self, int, float]] = []
        for share in shares:
            before = known if share == 1 else known.forget(share)
            after, steps = estimate(before, data, estimator=estimator)
            # One share is not weighed against others.
            worth = evidence(before, after, data) if len(shares) > 1 else 0.0
            tried.append((worth, after, steps, share))
            if len(tried) > 1 and tried[-1][0] <= tried[-2][0]:
                break
        _, after, steps, share = max(tried, key=lambda one: one[0] - (reluctance if one[3] < 1 else 0.0))
        return Fit(model=after.strengthened(), steps=steps, kept=share, changed=changed)
