"""Confidence intervals of means over sessions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from worker.bandit.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceInterval:
    """An estimate, its standard error, and its confidence interval."""

    estimate: float
    error: float
    low: float
    high: float


def interval(
    estimate: float, influence: Floats, *, confidence: float, extra: float = 0.0, beyond: float = 0.0
) -> ConfidenceInterval:
    """Return the interval of an estimate that changes by influence_i / n if session i is drawn anew.

    The unit is the session: displays within a session depend on each other, sessions do not (given the versions that
    served them). Weighted revenue is skewed: most sessions earn nothing, and a few earn much. The symmetric interval
    then misses values above it too often. Hall's cubic transformation of the studentised mean (1992) removes the
    skewness a of the estimate,

        g(T) = T + a T²/3 + a² T³/27 + a/6,     T = (θ̂ − θ) / error,

    and is monotone, so that its inverse at the quantiles gives the interval. The error itself is uncertain if few
    sessions carry most of it: it has 2n/(κ − 1) degrees of freedom, with κ the kurtosis of the influence (n of them if
    it is normal), and the quantiles are those of Student's t.

    influence : (n,), of mean zero
    extra : further variance of the estimate, from an estimated model
    beyond : largest systematic difference of the truth above the estimate; added to the upper end

    >>> symmetric = interval(1.0, np.array([-1.0, 1.0] * 50), confidence=0.95)
    >>> round(symmetric.low, 3), round(symmetric.high, 3)
    (0.803, 1.197)
    >>> skewed = interval(1.0, np.array([-1.0] * 90 + [9.0] * 10), confidence=0.95)
    >>> skewed.high - 1 > 1 - skewed.low
    True
    """
    count = len(influence)
    centred = influence - influence.mean()
    size = float(np.abs(centred).max())
    variance, skewness, freedom = extra, 0.0, float(count)
    if size > 0:
        scaled = centred / size  # fourth powers of unscaled numbers may overflow
        spread = float((scaled**2).mean())
        variance += size**2 * spread / max(1, count - 1)
        freedom = 2 * count / max(float((scaled**4).mean()) / spread**2 - 1, 1e-9)
    error = float(np.sqrt(variance))
    if error == 0:
        return ConfidenceInterval(estimate=estimate, error=0.0, low=estimate, high=estimate + beyond)
    if size > 0:
        skewness = float((scaled**3).mean()) * (size / error) ** 3 / count**2
    quantile = student_quantile(0.5 + confidence / 2, freedom)
    return ConfidenceInterval(
        estimate=estimate,
        error=error,
        low=estimate - error * _untransformed(quantile, skewness),
        high=estimate - error * _untransformed(-quantile, skewness) + beyond,
    )


def jackknife(estimate: float, groups: Floats, *, confidence: float) -> ConfidenceInterval:
    """Return the interval of an estimate from its values without one of g groups of equal size each, (g,).

    The variance is (g − 1)/g Σ (θ̂_j − θ̂)², and the quantile that of Student's t with g − 1 degrees of freedom.

    References
    ----------
    Kott (2001). The delete-a-group jackknife. Journal of Official Statistics.

    >>> found = jackknife(1.0, np.array([0.9, 1.1, 0.9, 1.1]), confidence=0.95)
    >>> round(found.error, 3), round(found.high, 2)
    (0.173, 1.48)
    """
    count = len(groups)
    error = float(np.sqrt((count - 1) * groups.var()))
    width = error * student_quantile(0.5 + confidence / 2, count - 1)
    return ConfidenceInterval(estimate=estimate, error=error, low=estimate - width, high=estimate + width)


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t by its expansion around the normal one; at least 4 degrees of freedom.

    >>> round(student_quantile(0.975, 20), 2), round(student_quantile(0.975, 1e9), 2)
    (2.09, 1.96)
    """
    z = NormalDist().inv_cdf(probability)
    v = max(freedom, 4.0)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _untransformed(value: float, skewness: float) -> float:
    """Return T with g(T) = value."""
    if abs(skewness) < 1e-9:
        return value
    return float(3 / skewness * (np.cbrt(1 + skewness * (value - skewness / 6)) - 1))
