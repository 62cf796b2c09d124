"""Skewed numbers: Yeo and Johnson's power transformation, and the choice of its exponent.

Seconds since the last visit and cents differ by factors: on their own scale a few of them are far from all others. The
transformation of a number a = |x| / unit is, with the exponent p = λ for x ≥ 0 and 2 − λ for x < 0,

    sign(x) · ((1 + a)^p − 1) / p,   sign(x) · ln(1 + a) if p = 0          λ = 1 leaves x as it is, up to the unit

Rules that hold in this file:

- λ and the unit maximise the likelihood of a normal distribution, on a grid. Units are parts of the median of |x|, so
  that it does not matter whether a number comes in cents or in thousands.
- λ stays 1 unless the likelihood gains `LEAST_GAIN` nats per value, as much as exp(0.37 z) gains, and `LEAST_IN_ALL`
  nats in all, which none of 20,000 samples of 20 or of 100 normal numbers did.
- Zeros are left out of the choice: they stay 0 under every exponent, and many of them would decide it.
- Every number is transformed by itself. No number overflows into something that is no number.

Reference: Yeo and Johnson, "A new family of power transformations to improve normality or symmetry", Biometrika 2000.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from worker.bandit.arrays import Floats

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
