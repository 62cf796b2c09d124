"""Contexts in bulk: packed in memory, one array for planning and folding, on any scale.

Ages, cents and seconds stand next to marks of 0 and 1. The first fold estimates the mean and the standard deviation of
every number from all sessions so far, at least `LEAST_SESSIONS` (docs/design.md §5). From then on the model works on

    clip((y − centre) / scale, ±8)          y = x, or a power of a skewed number; a missing number is 0, the mean

so that priors, β and gates mean the same everywhere. Columns of categories have centre 0 and scale 1, and a number that
was constant has scale 1. A number that was declared later has an infinite scale, so that it is the mean everywhere,
until `LEAST_SESSIONS` sessions have had it: their numbers wait in the standardisation.

Until enough sessions have come, the version itself carries those of the windows so far, as `ObservedSessions`. So
nothing is lost, and a learner that restarts has them as well.

Skewed numbers get Yeo and Johnson's power transformation first. Seconds since the last visit and cents differ by
factors: on their own scale a few of them are far from all others. The transformation of a number a = |x| / unit is,
with the exponent p = λ for x ≥ 0 and 2 − λ for x < 0,

    sign(x) · ((1 + a)^p − 1) / p,   sign(x) · ln(1 + a) if p = 0          λ = 1 leaves x as it is, up to the unit

Rules of the transformation:

- λ and the unit maximise the likelihood of a normal distribution, on a grid. Units are parts of the median of |x|, so
  that it does not matter whether a number comes in cents or in thousands.
- λ stays 1 unless the likelihood gains `LEAST_GAIN` nats per value, as much as exp(0.37 z) gains, and `LEAST_IN_ALL`
  nats in all, which none of 20,000 samples of 20 or of 100 normal numbers did.
- Zeros are left out of the choice: they stay 0 under every exponent, and many of them would decide it.
- Every number is transformed by itself. No number overflows into something that is no number.

Reference: Yeo and Johnson, "A new family of power transformations to improve normality or symmetry", Biometrika 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from struct import pack, unpack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import ArrayValue, Floats, Ints
from worker.bandit.click_model import Observations
from worker.errors import InputError

#: A number of a context that is missing. One object, so that contexts with missing numbers are equal to themselves: a
#: tuple compares its items by identity first.
MISSING: Final = nan


def pack_context(context: tuple[float, ...]) -> bytes:
    """Pack a context as little-endian float64, a third of the memory of the tuple."""
    return pack(f"<{len(context)}d", *context)


def unpack_context(packed: bytes) -> tuple[float, ...]:
    """Return the numbers of a packed context."""
    return unpack(f"<{len(packed) // 8}d", packed)


def stack_packed(packed: Sequence[bytes], dim: int) -> NDArray[np.float64]:
    """Stack n packed contexts of `dim` numbers into a read-only (n, d) array.

    Three times as fast as `numpy.array` on tuples, which inspects every number.

    >>> stack_packed([pack_context((1.0, 2.0)), pack_context((3.0, 4.0))], 2)
    array([[1., 2.],
           [3., 4.]])
    """
    return np.frombuffer(b"".join(packed), "<f8").reshape(len(packed), dim)


# ── skewed numbers ───────────────────────────────────────────────────────────────────────────────────────────────────

#: Exponents that are tried; symmetric about 1, as numbers may be skewed either way.
EXPONENTS: Final = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
#: Units that are tried, as parts of the median of |x|.
UNITS: Final = (1.0, 0.1, 0.01, 0.001)
#: Nats per value, and in all, that an exponent other than 1 must gain.
LEAST_GAIN: Final = 0.1
LEAST_IN_ALL: Final = 10.0
#: Fewest values other than 0 that an exponent is chosen by, and about the most that are looked at.
LEAST_VALUES: Final = 20
MOST_VALUES: Final = 2000
#: A deviation below this share of the largest number is rounding.
_ROUNDING: Final = 1e-8


def yeo_johnson(numbers: Floats, exponent: Floats | float, unit: Floats | float = 1.0) -> Floats:
    """Return numbers (n, d) transformed, with exponent and unit of each column, (d,).

    >>> yeo_johnson(np.array([[-3.0, 0.0, 3.0]]), 0.0).round(4)
    array([[-7.5   ,  0.    ,  1.3863]])
    """
    power = np.where(numbers >= 0, exponent, np.subtract(2.0, exponent))
    with np.errstate(over="ignore"):
        logs = np.log1p(np.abs(numbers) / unit)
        sizes = np.where(power == 0, logs, np.expm1(power * logs) / np.where(power == 0, 1.0, power))
    return np.copysign(sizes, numbers)


def slope(number: Floats, exponent: Floats, unit: Floats) -> Floats:
    """Return the derivative of the transformation, (d,)."""
    power = np.where(number >= 0, exponent, 2.0 - exponent)
    return np.asarray((1.0 + np.abs(number) / unit) ** (power - 1.0) / unit)


def inverse(transformed: Floats, exponent: Floats, unit: Floats) -> Floats:
    """Return the numbers (d,) that are transformed to these.

    >>> inverse(np.array([-7.5]), np.array([0.0]), np.array([1.0]))
    array([-3.])
    """
    power, size = np.where(transformed >= 0, exponent, 2.0 - exponent), np.abs(transformed)
    logs = np.where(power == 0, size, np.log1p(power * size) / np.where(power == 0, 1.0, power))
    return np.copysign(np.expm1(logs) * unit, transformed)


def chosen_scale(numbers: Floats) -> tuple[float, float]:
    """Return exponent and unit for the values of a number, (n,); both 1 if no exponent is clearly better.

    >>> skewed = np.exp(2 * np.random.default_rng(0).standard_normal(500))
    >>> chosen_scale(skewed)[0], chosen_scale(np.log(skewed))
    (0.0, (1.0, 1.0))
    """
    values = numbers[np.isfinite(numbers) & (numbers != 0)]
    values = values[:: -(-len(values) // MOST_VALUES) or 1]
    if len(values) < LEAST_VALUES:
        return 1.0, 1.0
    median, signs = float(np.median(np.abs(values))), np.sign(values)
    best, choice = _normal_fit(values / median) + max(LEAST_GAIN, LEAST_IN_ALL / len(values)), (1.0, 1.0)
    for part in UNITS:
        logs = np.log1p(np.abs(values) / (part * median))
        # Of the density of x / median; exponents below 1 shrink large numbers, which counts against them.
        density = float((signs * logs).mean())
        for exponent in EXPONENTS:
            fit = _normal_fit(yeo_johnson(values, exponent, part * median))
            fit += (exponent - 1.0) * density - float(np.log(part))
            if exponent != 1 and fit > best:
                best, choice = fit, (exponent, part * median)
    return choice


def _normal_fit(numbers: Floats) -> float:
    """Return the log-likelihood per number of the best normal distribution, up to a constant; −∞ for mere rounding."""
    deviation, largest = float(numbers.std()), float(np.abs(numbers).max())
    return -float(np.log(deviation)) if np.isfinite(deviation) and deviation > _ROUNDING * largest else -np.inf


# ── centre and scale ─────────────────────────────────────────────────────────────────────────────────────────────────

#: Fewest sessions that centre and scale are estimated from; with fewer, their observations wait.
LEAST_SESSIONS: Final = 100
#: Largest absolute value of a standardised number.
LARGEST_STANDARD: Final = 8.0
#: Names of the arrays of a standardisation.
SCALES: Final = ("centre", "scale", "exponent", "unit")
#: Most sessions whose numbers wait in a standardisation.
MOST_WAITING: Final = 1000
WAITING: Final = "waiting"
#: A number whose values differ by less than this share of the largest was constant, up to rounding.
_CONSTANT: Final = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standardisation(ArrayValue):
    """Centre (d,) and scale (d,) of contexts, of skewed numbers after Yeo and Johnson's transformation.

    `exponent` (d,) and `unit` (d,) are those of the transformation; an exponent of 1 leaves a number as it is.
    `waiting` (n, u) are the numbers of sessions so far in the u columns without a scale.
    """

    centre: Floats
    scale: Floats
    exponent: Floats = field(default_factory=lambda: np.zeros(0))
    unit: Floats = field(default_factory=lambda: np.zeros(0))
    waiting: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    skewed: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("exponent", "unit"):
            if not getattr(self, name).size:
                object.__setattr__(self, name, np.ones(self.centre.shape))
        arrays = [getattr(self, name) for name in SCALES]
        if self.centre.ndim != 1 or any(one.shape != self.centre.shape for one in arrays):
            raise InputError(f"standardisation: {', '.join(SCALES)} must be lists of the same length")
        finite = np.isfinite([self.centre, self.exponent, self.unit]).all() and not np.isnan(self.scale).any()
        if not (finite and (self.scale > 0).all() and (self.unit > 0).all()):
            raise InputError("standardisation: all numbers must be finite, scale and unit above zero")
        if not self.waiting.size:
            object.__setattr__(self, "waiting", np.zeros((0, len(self.unscaled))))
        if self.waiting.shape[1:] != self.unscaled.shape or np.isinf(self.waiting).any():
            raise InputError("standardisation: waiting must have a number per column without a scale")
        object.__setattr__(self, "skewed", np.flatnonzero(self.exponent != 1))

    @property
    def unscaled(self) -> Ints:
        """The columns whose scale is not known yet."""
        return np.flatnonzero(np.isinf(self.scale))

    def choose_columns(self, columns: Ints, numbers: NDArray[np.bool_]) -> Standardisation:
        """Return the scale of these columns; −1 stands for a new one, whose scale is not known if it is a number."""
        blanks = np.zeros(len(columns)), np.where(numbers, np.inf, 1.0), *np.ones((2, len(columns)))
        usual = dict(zip(SCALES, blanks, strict=True))
        known = Standardisation(
            **{name: np.where(columns < 0, blank, getattr(self, name)[columns]) for name, blank in usual.items()}
        )
        waiting = np.full((len(self.waiting), len(self.scale) + 1), np.nan)  # the last column is that of new ones
        waiting[:, self.unscaled] = self.waiting
        return replace(known, waiting=waiting[:, columns[known.unscaled]])

    def completed(self, contexts: Floats) -> Standardisation:
        """Return the scale with that of columns without one, where enough sessions, with these (n, d), have numbers.

        >>> new = Standardisation(centre=np.zeros(1), scale=np.array([np.inf]))
        >>> once = new.completed(np.arange(60.0)[:, None])
        >>> once.apply(np.array([[29.5]])), once.completed(np.arange(60.0)[:, None]).centre
        (array([[0.]]), array([29.5]))
        """
        columns = self.unscaled
        if not len(columns):
            return self
        values = np.concatenate([self.waiting, contexts[:, columns]])
        ready = np.isfinite(values).sum(axis=0) >= LEAST_SESSIONS
        known = Standardisation.estimate(values[:, ready])
        scales = {name: getattr(self, name).copy() for name in SCALES}
        for name, array in scales.items():
            array[columns[ready]] = getattr(known, name)
        waiting = values[:, ~ready]
        return Standardisation(**scales, waiting=waiting[np.isfinite(waiting).any(axis=1)][-MOST_WAITING:])

    @classmethod
    def estimate(
        cls, contexts: Floats, numbers: NDArray[np.bool_] | None = None, *, straighten: bool = True
    ) -> Standardisation:
        """Return mean and standard deviation of contexts (n, d); only of the columns `numbers`, (d,), if given.

        With `straighten`, skewed numbers get an exponent first. Missing values count for nothing. Values are divided by
        the largest before they are squared, so that none of them overflows.

        >>> known = Standardisation.estimate(np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]]))
        >>> known.centre, known.scale, known.exponent
        (array([2., 5.]), array([1., 1.]), array([1., 1.]))
        """
        exponent, unit = np.ones((2, contexts.shape[1]))
        for column in np.flatnonzero(straighten & (np.ones(len(unit), dtype=bool) if numbers is None else numbers)):
            exponent[column], unit[column] = chosen_scale(contexts[:, column])
        contexts = _straightened(contexts, np.flatnonzero(exponent != 1), exponent, unit)
        there = np.isfinite(contexts)
        known = np.where(there, contexts, 0.0)
        count = np.maximum(there.sum(axis=0), 1)
        largest = np.abs(known).max(axis=0, initial=0.0)
        size = np.where(largest > 0, largest, 1.0)
        with np.errstate(under="ignore"):
            parts = known / size
            mean = parts.sum(axis=0) / count
            squares = np.where(there, parts - mean, 0.0) ** 2
            deviation = np.sqrt(squares.sum(axis=0) / count)
            centre, scale = mean * size, deviation * size
        varies = (deviation > _CONSTANT) & (scale > 0)
        if numbers is not None:
            centre, varies = np.where(numbers, centre, 0.0), varies & numbers
        return cls(centre=centre, scale=np.where(varies, scale, 1.0), exponent=exponent, unit=unit)

    def apply(self, contexts: Floats) -> Floats:
        """Return contexts (n, d) standardised; every number depends on itself alone."""
        if len(self.skewed):
            contexts = _straightened(contexts, self.skewed, self.exponent, self.unit)
        with np.errstate(over="ignore"):
            standard = (contexts - self.centre) / self.scale
        np.maximum(standard, -LARGEST_STANDARD, out=standard)  # two calls in place of `clip`, which is slow for few
        np.minimum(standard, LARGEST_STANDARD, out=standard)
        return without_gaps(standard)

    @property
    def typical(self) -> tuple[Floats, Floats]:
        """The numbers that are standardised to 0, and the size of a standard deviation there, as contexts come."""
        centre, scale, columns = self.centre.copy(), np.where(np.isinf(self.scale), 1.0, self.scale), self.skewed
        exponent, unit = self.exponent[columns], self.unit[columns]
        centre[columns] = inverse(self.centre[columns], exponent, unit)
        scale[columns] /= slope(centre[columns], exponent, unit)
        return centre, scale


def _straightened(contexts: Floats, columns: Ints, exponent: Floats, unit: Floats) -> Floats:
    if not len(columns):
        return contexts
    straight = contexts.copy()
    straight[:, columns] = yeo_johnson(contexts[:, columns], exponent[columns], unit[columns])
    return straight


def without_gaps(contexts: Floats) -> Floats:
    """Return contexts with 0 in place of missing numbers.

    >>> without_gaps(np.array([[1.0, np.nan]]))
    array([[1., 0.]])
    """
    gaps = np.isnan(contexts)
    return np.where(gaps, 0.0, contexts) if gaps.any() else contexts


def recoded(contexts: Floats, columns: Ints, numbers: NDArray[np.bool_]) -> Floats:
    """Return contexts (n, d) in other columns, given by their present ones; −1: no mark, or a number that is missing.

    >>> recoded(np.array([[1.0, 5.0]]), np.array([1, -1, -1]), np.array([True, True, False]))
    array([[ 5., nan,  0.]])
    """
    blank = np.where(numbers, MISSING, 0.0)
    return np.where(columns < 0, blank, contexts[:, columns])


# ── sessions that wait ───────────────────────────────────────────────────────────────────────────────────────────────

#: Names of the arrays in the record of a version.
ARRAYS: Final = ("contexts", "rows", "arms", "positions", "clicked")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSessions(ArrayValue):
    """Sessions in the order of their keys, window by window, and their displays that count.

    Parameters
    ----------
    contexts : (n, d), as they came, one row per session; NaN where a number is missing
    rows, arms, positions : (m,), per display its session, the index of its arm, and its position from 1 on
    clicked : (m,), 1.0 or 0.0
    """

    contexts: Floats
    rows: Ints
    arms: Ints
    positions: Ints
    clicked: Floats

    def __len__(self) -> int:
        return len(self.contexts)

    def followed_by(self, later: ObservedSessions) -> ObservedSessions:
        """Return these sessions and later ones."""
        later = replace(later, rows=later.rows + len(self))
        return ObservedSessions(
            **{name: np.concatenate([getattr(self, name), getattr(later, name)]) for name in ARRAYS}
        )

    def observations(self, prepare: Callable[[Floats], Floats]) -> Observations:
        """Return the displays, without the sessions that have none; `prepare` is applied to the contexts."""
        rows, sessions = np.unique(self.rows, return_inverse=True)
        return Observations(
            contexts=prepare(self.contexts[rows]),
            sessions=sessions.astype(np.intp),
            arms=self.arms,
            positions=self.positions - 1,
            clicked=self.clicked,
        )

    def renamed(self, indices: Sequence[int]) -> ObservedSessions:
        """Return the same under other indices of arms, one per old index; displays of arms with −1 are left out."""
        arms = np.array(indices, dtype=np.intp)[self.arms]
        kept = arms >= 0
        by_display = {name: getattr(self, name)[kept] for name in ("rows", "positions", "clicked")}
        return replace(self, arms=arms[kept], **by_display)

    def recoded(self, columns: Ints, numbers: NDArray[np.bool_]) -> ObservedSessions:
        """Return the same with contexts in other columns (`recoded`)."""
        return replace(self, contexts=recoded(self.contexts, columns, numbers))

    def pack(self) -> dict[str, Floats]:
        """Return the arrays by name."""
        return {name: np.asarray(getattr(self, name), dtype=np.float64) for name in ARRAYS}

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, dim: int, arms: int) -> ObservedSessions:
        """Return what `pack` took apart; raise `InputError` if it is damaged."""
        contexts, rows, shown, positions, clicked = (arrays[name] for name in ARRAYS)
        if contexts.ndim != 2 or contexts.shape[1] != dim or np.isinf(contexts).any():
            raise InputError(f"pending: contexts must be rows of {dim} numbers")
        if any(one.shape != (len(rows),) for one in (rows, shown, positions, clicked)):
            raise InputError("pending: rows, arms, positions and clicked must be lists of the same length")
        for name, numbers, least, most in (
            ("rows", rows, 0, len(contexts) - 1),
            ("arms", shown, 0, arms - 1),
            ("positions", positions, 1, 2**53),
            ("clicked", clicked, 0, 1),
        ):
            if not ((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers))).all():
                raise InputError(f"pending: {name} must be whole numbers from {least} to {most}")
        return cls(
            contexts=contexts,
            rows=rows.astype(np.intp),
            arms=shown.astype(np.intp),
            positions=positions.astype(np.intp),
            clicked=clicked,
        )
