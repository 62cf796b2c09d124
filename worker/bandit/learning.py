"""Learning from a window, and noticing that users or ads have changed (docs/math.md §13).

Before a fold, older displays may be forgotten: the belief keeps a share γ of what they have said. With `AUTO`, the
window itself decides: each γ is weighed by the Laplace evidence of the window's displays under the faded belief,

    ln p(y | θ̂) − ½ ‖θ̂ − θ̂_before‖²_A + ½ (ln det A_before − ln det A_after)

and anything but 1 must be better by `RELUCTANCE`. The values are tried in falling order as long as the evidence grows:
usually that is one more fit.
"""

from __future__ import annotations

from typing import Final, Protocol, Self, TypeVar

from worker.bandit.click_model import Observations
from worker.bandit.estimators import LinearModel, estimate, evidence

AUTO: Final = "auto"
#: Shares of the older displays that are weighed against each other.
SHARES: Final = (1.0, 0.7, 0.3, 0.1)
#: Nats by which the evidence must favour forgetting.
RELUCTANCE: Final = 3.0


class LearningModel(LinearModel, Protocol):
    """A click model that can forget, and learn how strong its features are."""

    def forget(self, keep: float) -> Self:
        """Keep the share `keep` of what displays have said."""

    def strengthened(self) -> Self:
        """Learn from the estimate how strong features are."""


Model = TypeVar("Model", bound=LearningModel)


def learn(
    model: Model, data: Observations, *, estimator: str, forgetting: float | str = 1.0
) -> tuple[Model, int, float]:
    """Fold displays into a belief; return it, the number of Newton steps, and the share of older displays kept."""
    shares = SHARES if forgetting == AUTO else (float(forgetting),)
    if not len(data):
        return *estimate(model, data, estimator=estimator), 1.0
    tried: list[tuple[float, Model, int, float]] = []
    for share in shares:
        before = model if share == 1 else model.forget(share)
        after, steps = estimate(before, data, estimator=estimator)
        if len(shares) == 1:
            return after.strengthened(), steps, share
        tried.append((evidence(before, after, data), after, steps, share))
        if len(tried) > 1 and tried[-1][0] <= tried[-2][0]:
            break
    _, after, steps, share = max(tried, key=lambda one: one[0] - (RELUCTANCE if one[3] < 1 else 0.0))
    return after.strengthened(), steps, share
