"""From an episode's answered displays to the next estimate.

With p = σ(zᵀθ), w = p(1−p) and g = Σ z(y − p):

- `laplace` (default): the episode's MAP under the prior N(θ̂, A⁻¹), by Newton's method; then A ← A + Σ w(θ̂_new) z zᵀ.
- `newton`: one step, A ← A + Σ w z zᵀ, θ̂ ← θ̂ + A⁻¹ g. Sums can be made apart and added.
- `paper`: literally as printed, b ← b + g, θ̂ ← A⁻¹ b. Biased (math.md §2), kept to compare with. b is A θ̂.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.bandit.model import Observations, Posterior, sigmoid
from worker.bandit.precision import Floats, Precision
from worker.errors import EstimationError, InputError

ESTIMATORS = ("laplace", "newton", "paper")

# Of a Newton step, in posterior standard deviations: the unit that neither the scale of the contexts nor the condition
# of A can spoil. The step is still made, and since Newton's method squares the error, nothing visible is left.
TOLERANCE = 1e-7
MOST_STEPS = 50
LARGEST_STEP = 20.0  # per fold, in any one coordinate: log-odds that move further are not learned but broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A new belief and how it was reached."""

    posterior: Posterior
    steps: int


def update(posterior: Posterior, data: Observations, *, estimator: str = "laplace") -> Fit:
    """Fold observations into a belief; raise `EstimationError` rather than return one that cannot be used.

    Examples
    --------
    A hundred clicks in a hundred displays move the arm's log-odds up, but not to infinity.

    >>> prior = Posterior.prior(dim=1, arms=2, ridge=1.0)
    >>> shown = Observations(contexts=np.zeros((100, 1)), sessions=np.arange(100), arms=np.zeros(100, dtype=np.intp),
    ...                      clicked=np.ones(100))
    >>> update(prior, shown).posterior.theta_arms.round(2)
    array([3.36, 0.  ])
    """
    if estimator not in ESTIMATORS:
        raise InputError(f"unknown estimator {estimator!r}; one of {', '.join(ESTIMATORS)}")
    if not len(data):
        return Fit(posterior=posterior, steps=0)
    method = {"laplace": _laplace, "newton": _newton, "paper": _paper}[estimator]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _checked(method(posterior, data), posterior)


def _laplace(prior: Posterior, data: Observations) -> Fit:
    here = _Place(prior, data, (prior.theta_context, prior.theta_arms))
    for step in range(1, MOST_STEPS + 1):
        gradient = _gradient(prior, data, here.chances)
        slope = (gradient[0] - here.pull[0], gradient[1] - here.pull[1])
        move = _information(prior.precision, data, here.chances).solve(*slope)
        squared = float(slope[0] @ move[0] + slope[1] @ move[1])  # the step's length in standard deviations
        if not np.isfinite(squared):
            raise EstimationError("the Newton step is not finite")
        if squared <= TOLERANCE**2:
            here = here.after(move, 1.0)
            return _fitted(here.theta, _information(prior.precision, data, here.chances), step)
        here = _climb(here, move, squared)
    raise EstimationError(f"Newton's method did not converge in {MOST_STEPS} steps")


class _Place:
    """A point on the log posterior: its click probabilities, the prior's pull, and how high it is."""

    def __init__(self, prior: Posterior, data: Observations, theta: tuple[Floats, Floats]) -> None:
        self._prior, self._data, self.theta = prior, data, theta
        odds = (data.contexts @ theta[0])[data.sessions] + theta[1][data.arms]
        self.chances = sigmoid(odds)
        off = (theta[0] - prior.theta_context, theta[1] - prior.theta_arms)
        self.pull = prior.precision.times(*off)
        surprise = np.logaddexp(0, np.where(data.clicked > 0, -odds, odds)).sum()
        self.height = -float(surprise + (off[0] @ self.pull[0] + off[1] @ self.pull[1]) / 2)

    def after(self, move: tuple[Floats, Floats], scale: float) -> _Place:
        theta = (self.theta[0] + scale * move[0], self.theta[1] + scale * move[1])
        return _Place(self._prior, self._data, theta)


def _climb(here: _Place, move: tuple[Floats, Floats], promised: float) -> _Place:
    """Go along `move`, half as far each time the log posterior rises by less than a quarter of what its slope promises.

    It is concave, so this always arrives; near the top a full step gains half of the promise, beyond it too little.
    """
    rounding = 1e-9 * (1 + abs(here.height))
    scale = 1.0
    for _ in range(40):
        there = here.after(move, scale)
        if there.height >= here.height + scale * promised / 4 - rounding:
            return there
        scale /= 2
    raise EstimationError("Newton's method found no way up")


def _newton(prior: Posterior, data: Observations) -> Fit:
    theta = (prior.theta_context, prior.theta_arms)
    chances = _chances(theta, data)
    information = _information(prior.precision, data, chances)
    move = information.solve(*_gradient(prior, data, chances))
    return _fitted((theta[0] + move[0], theta[1] + move[1]), information, 1)


def _paper(prior: Posterior, data: Observations) -> Fit:
    theta = (prior.theta_context, prior.theta_arms)
    chances = _chances(theta, data)
    information = _information(prior.precision, data, chances)
    gradient = _gradient(prior, data, chances)
    b = prior.precision.times(*theta)
    return _fitted(information.solve(b[0] + gradient[0], b[1] + gradient[1]), information, 1)


def _chances(theta: tuple[Floats, Floats], data: Observations) -> Floats:
    return sigmoid((data.contexts @ theta[0])[data.sessions] + theta[1][data.arms])


def _information(precision: Precision, data: Observations, chances: Floats) -> Precision:
    weights = chances * (1 - chances)
    if not np.isfinite(weights).all():
        raise EstimationError("a predicted probability is not finite")
    try:
        return precision.plus(data.contexts, sessions=data.sessions, arms=data.arms, weights=weights)
    except InputError as error:
        raise EstimationError(f"the information is unusable: {error}") from None


def _gradient(prior: Posterior, data: Observations, chances: Floats) -> tuple[Floats, Floats]:
    surprise = data.clicked - chances
    per_session = np.bincount(data.sessions, weights=surprise, minlength=len(data.contexts))
    per_arm = np.bincount(data.arms, weights=surprise, minlength=prior.arms)
    return data.contexts.T @ per_session, np.asarray(per_arm, dtype=np.float64)


def _fitted(theta: tuple[Floats, Floats], information: Precision, steps: int) -> Fit:
    if not (np.isfinite(theta[0]).all() and np.isfinite(theta[1]).all()):
        raise EstimationError("the estimate is not finite")
    return Fit(posterior=Posterior(theta_context=theta[0], theta_arms=theta[1], precision=information), steps=steps)


def _checked(fit: Fit, before: Posterior) -> Fit:
    after = fit.posterior
    if not after.precision.is_positive_definite:
        raise EstimationError("the precision is not positive definite")
    moved = max(
        float(np.abs(after.theta_context - before.theta_context).max(initial=0)),
        float(np.abs(after.theta_arms - before.theta_arms).max(initial=0)),
    )
    if moved > LARGEST_STEP:
        raise EstimationError(f"the estimate moved by {moved:.3g} in one fold, more than {LARGEST_STEP:g}")
    return fit
