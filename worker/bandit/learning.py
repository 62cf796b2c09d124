"""Learning from a window, and noticing that users or ads have changed (docs/math.md §10).

Before a fold, older displays may be forgotten: the belief keeps a share γ of what they have said. With `AUTO`, the
window itself decides: each γ is weighed by the Laplace evidence of the window's displays under the faded belief,

    ln p(y | θ̂) − ½ ‖θ̂ − θ̂_before‖²_A + ½ (ln det A_before − ln det A_after)

and anything but 1 must be better by `RELUCTANCE`. The values are tried in falling order as long as the evidence grows:
usually that is one more fit.
"""

from __future__ import annotations

from typing import Final

from worker.bandit.click_model import ClickModel, Fit, Observations
from worker.bandit.estimators import estimate, evidence

AUTO: Final = "auto"
#: Shares of the older displays that are weighed against each other.
SHARES: Final = (1.0, 0.7, 0.3, 0.1)
#: Nats by which the evidence must favour forgetting.
RELUCTANCE: Final = 3.0


def learn(model: ClickModel, data: Observations, *, estimator: str, forgetting: float | str) -> tuple[Fit, float]:
    """Fold displays into a belief; return the fit, and the share of older displays that it has kept."""
    if forgetting != AUTO:
        kept = float(forgetting)
        return (model if kept == 1 else model.forget(kept)).fold(data, estimator=estimator), kept
    best: tuple[float, ClickModel, int, float] | None = None
    for share in SHARES:
        before = model if share == 1 else model.forget(share)
        after, steps = estimate(before, data, estimator=estimator)
        if not len(data):
            return Fit(model=after, steps=steps), 1.0
        weight = evidence(before, after, data) - (RELUCTANCE if share < 1 else 0.0)
        if best is not None and weight <= best[0]:
            break
        best = weight, after, steps, share
    assert best is not None
    _, after, steps, kept = best
    return Fit(model=after.strengthened(), steps=steps), kept
