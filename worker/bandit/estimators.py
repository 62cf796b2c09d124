"""From an episode's answered displays to the next estimate, for models that are linear in their coefficients.

With p = σ(zᵀθ), w = p(1−p) and g = Σ z(y − p):

- `laplace` (default): the episode's MAP under the prior N(θ̂, A⁻¹), by Newton's method; then A ← A + Σ w(θ̂_new) z zᵀ.
- `newton`: one step, A ← A + Σ w z zᵀ, θ̂ ← θ̂ + A⁻¹ g. Sums can be made apart and added.
- `paper`: literally as printed, b ← b + g, θ̂ ← A⁻¹ b. Biased (docs/math.md §2), kept for comparison. b is A θ̂.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.click_model import Observations
from worker.errors import EstimationError, InputError

if TYPE_CHECKING:  # models learn by the functions of this file
    from worker.bandit.hierarchy import Hierarchy
    from worker.bandit.learning import LinearModel
    from worker.bandit.precision import Precision

# Of a Newton step, in posterior standard deviations: the unit that neither the scale of the contexts nor the condition
# of A can spoil. The step is still made, and since Newton's method squares the error, nothing visible is left.
TOLERANCE = 1e-7
MOST_STEPS = 50
# After a step this short, in the same unit, and this much shorter than the one before, the information hardly changes:
# the next step may use that of the last. It divides the error instead of squaring it, so such steps go on for longer.
SHORT, SHORTER = 1.0, 0.2
TOLERANCE_OF_REUSE = 1e-9
# Of the log-odds of a display per fold. What moves further, and ends further from even odds, is not learned but broken.
# Further moves that end nearer to even odds correct an estimate on contexts it had never seen.
LARGEST_STEP = 20.0
GATHERED = 4_000_000  # numbers of contexts gathered at once while they are squared by arm

Coefficients = tuple[Floats, ...]  # the parts of a parameter vector


class ByArm:
    """Displays sorted by arm, so that a Newton step sorts and gathers nothing.

    Sums are made in an order that depends on the displays alone: the same displays in the same order, the same bits.

    Parameters
    ----------
    inputs : (r, n), the contexts of sessions as the model multiplies them, x or u = [1; x]
    sessions : (m,), the row of `inputs` that saw each display
    arms : (m,), the arm displayed
    positions : (m,), the position of each display, from 0; all 0 by default
    """

    def __init__(self, inputs: Floats, *, sessions: Ints, arms: Ints, positions: Ints | None = None) -> None:
        self.inputs, self.sessions, self.arms = inputs, sessions, arms
        self.positions = np.zeros(len(arms), dtype=np.intp) if positions is None else positions
        self._order = np.argsort(arms, kind="stable")
        self.shown, self._firsts, self._counts = np.unique(arms[self._order], return_index=True, return_counts=True)
        self._sorted = inputs[sessions[self._order]]

    def products(self, coefficients: Floats) -> Floats:
        """Return u·m_k of each display in its own order, from the m_k of the arms shown: (J, n) → (m,)."""
        products = np.empty(len(self._order))
        chosen = np.repeat(coefficients, self._counts, axis=0)
        products[self._order] = np.einsum("ij,ij->i", self._sorted, chosen)
        return products

    def sums(self, values: Floats, *, arms: int) -> Floats:
        """Return Σ value·u of each of `arms` arms: (m,) → (arms, n)."""
        sums = np.zeros((arms, self.inputs.shape[1]))
        if len(self.shown):
            sums[self.shown] = np.add.reduceat(self._sorted * values[self._order, None], self._firsts, axis=0)
        return sums

    def sums_by_position(self, values: Floats, *, arms: int, positions: int) -> Floats:
        """Return Σ value·u of each arm at each position after the first: (m,) → (arms, n, positions)."""
        order, firsts, inputs = self._later
        sums = np.zeros((arms, positions, self.inputs.shape[1]))
        if len(order):
            cells = order[firsts]
            by_cell = np.add.reduceat(inputs * values[order, None], firsts, axis=0)
            sums[self.arms[cells], self.positions[cells] - 1] = by_cell
        return sums.transpose(0, 2, 1)

    @cached_property
    def _later(self) -> tuple[Ints, Ints, Floats]:
        """Displays after the first position, sorted by arm and position; the first of each pair; their inputs."""
        later = self._order[self.positions[self._order] > 0]
        order = later[np.lexsort((self.positions[later], self.arms[later]))]
        pairs = self.arms[order] * (1 + self.positions.max(initial=0)) + self.positions[order]
        return order, np.unique(pairs, return_index=True)[1], self.inputs[self.sessions[order]]

    def squares(self, weights: Floats) -> Iterator[tuple[Ints, Floats]]:
        """Yield (distinct arms, Σ w u uᵀ of each).

        Arms with about as many displays are summed by one stacked product, padded with displays of no weight.
        """
        roots = np.sqrt(weights[self._order])
        sizes = 1 << np.ceil(np.log2(self._counts)).astype(np.intp)
        for size in np.unique(sizes).tolist():
            alike = np.flatnonzero(sizes == size)
            at_once = max(1, GATHERED // (size * self.inputs.shape[1]))
            for start in range(0, len(alike), at_once):
                part = alike[start : start + at_once]
                within = np.arange(size)
                real = within < self._counts[part, None]
                rows = np.where(real, self._firsts[part, None] + within, 0)
                scaled = self._sorted[rows]
                scaled *= (roots[rows] * real)[:, :, None]
                yield self.shown[part], scaled.transpose(0, 2, 1) @ scaled  # of a factor with itself: symmetric


#: The precision A of a model's coefficients.
Information: TypeAlias = "Precision | Hierarchy"
Model = TypeVar("Model", bound="LinearModel")
Estimator: TypeAlias = "Callable[[LinearModel, ByArm, Floats], tuple[Coefficients, Information]]"


def estimate(model: Model, data: Observations, *, estimator: str) -> Model:
    """Fold observations into a belief; raise `EstimationError` rather than return one that cannot be used."""
    if not len(data):
        return model
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        seen = model.by_arm(data)
        coefficients, information = ESTIMATORS[estimator](model, seen, data.clicked)
        _check(coefficients, information, model, seen)
        return model.updated(coefficients, information)


def evidence(before: LinearModel, after: LinearModel, data: Observations) -> float:
    """Return the Laplace evidence, in nats, of observations that were folded into `before` and gave `after`."""
    height = _Point(before, before.by_arm(data), data.clicked, after.coefficients).height
    return height + float(before.precision.log_determinant - after.precision.log_determinant) / 2


def inner(one: Coefficients, other: Coefficients) -> float:
    """Return the inner product of two parameter vectors."""
    return float(sum(np.vdot(a, b) for a, b in zip(one, other, strict=True)))


def _moved(start: Coefficients, move: Coefficients, scale: float = 1.0) -> Coefficients:
    return tuple(a + scale * b for a, b in zip(start, move, strict=True))


def _laplace(model: LinearModel, data: ByArm, clicked: Floats) -> tuple[Coefficients, Information]:
    here = _Point(model, data, clicked, model.coefficients)
    information, squared, before = None, np.inf, np.inf
    for _ in range(MOST_STEPS):
        gradient = model.gradient(data, clicked - here.chances)
        slope = _moved(gradient, here.pull, -1.0)
        reused = model.reuses_information and squared <= min(SHORT**2, SHORTER**2 * before)
        if information is None or not reused:
            information = _information(model, data, here.chances)
        move = information.solve(*slope)
        before, squared = squared, inner(slope, move)  # the step's length in standard deviations
        if not np.isfinite(squared):
            raise EstimationError("the Newton step is not finite")
        if squared <= (TOLERANCE_OF_REUSE if reused else TOLERANCE) ** 2:
            here = here.after(move, 1.0)
            return here.coefficients, _information(model, data, here.chances)
        here = _climb(here, move, squared)
    raise EstimationError(f"Newton's method did not converge in {MOST_STEPS} steps")


class _Point:
    """A point on the log posterior: its click probabilities, the prior's pull, and its height."""

    def __init__(self, model: LinearModel, data: ByArm, clicked: Floats, coefficients: Coefficients) -> None:
        self._model, self._data, self._clicked, self.coefficients = model, data, clicked, coefficients
        odds = model.predict(coefficients, data)
        self.chances = sigmoid(odds)
        off = _moved(coefficients, model.coefficients, -1.0)
        self.pull = model.precision.times(*off)
        surprise = np.logaddexp(0, np.where(clicked > 0, -odds, odds)).sum()
        self.height = -float(surprise + inner(off, self.pull) / 2)

    def after(self, move: Coefficients, scale: float) -> _Point:
        return _Point(self._model, self._data, self._clicked, _moved(self.coefficients, move, scale))


def _climb(here: _Point, move: Coefficients, promised: float) -> _Point:
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


def _newton(model: LinearModel, data: ByArm, clicked: Floats) -> tuple[Coefficients, Information]:
    chances = sigmoid(model.predict(model.coefficients, data))
    information = _information(model, data, chances)
    move = information.solve(*model.gradient(data, clicked - chances))
    return _moved(model.coefficients, move), information


def _paper(model: LinearModel, data: ByArm, clicked: Floats) -> tuple[Coefficients, Information]:
    chances = sigmoid(model.predict(model.coefficients, data))
    information = _information(model, data, chances)
    b = model.precision.times(*model.coefficients)
    return information.solve(*_moved(b, model.gradient(data, clicked - chances))), information


ESTIMATORS: Mapping[str, Estimator] = {"laplace": _laplace, "newton": _newton, "paper": _paper}


def _information(model: LinearModel, data: ByArm, chances: Floats) -> Information:
    weights = chances * (1 - chances)
    if not np.isfinite(weights).all():
        raise EstimationError("a predicted probability is not finite")
    try:
        grown: Information = model.precision.plus(data, weights)
        return grown
    except InputError as error:
        raise EstimationError(f"the information is unusable: {error}") from None


def _check(coefficients: Coefficients, information: Information, before: LinearModel, data: ByArm) -> None:
    """Raise unless the estimate is finite, its precision positive definite, and no display's log-odds moved too far."""
    if not all(np.isfinite(part).all() for part in coefficients):
        raise EstimationError("the estimate is not finite")
    if not information.is_positive_definite:
        raise EstimationError("the precision is not positive definite")
    steps = np.abs(before.predict(_moved(coefficients, before.coefficients, -1.0), data))
    moved = float(np.minimum(steps, np.abs(before.predict(coefficients, data))).max(initial=0))
    if not moved <= LARGEST_STEP:
        raise EstimationError(f"the log-odds moved by {moved:.3g} in one fold, more than {LARGEST_STEP:g}")
