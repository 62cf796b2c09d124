"""A score test for what a click model misses: products of two context columns, and tastes where a model has none.

Each display has a residual y − p, p by the estimate *before* the display was learned from, and the weight w = p(1 − p).
For ad k and a product q = a·b of two columns,

    U_k = Σ q̃ (y − p),   V_k = Σ w q̃²,   q̃ = q − c·[1; a; b]

sum over all windows to the score of q's coefficient and its information (docs/math.md §16). If the model is right, U_k
has mean 0 and variance V_k; if the log-odds lack β_k q, its mean is about β_k V_k.

Rules that hold in this file:

- q̃ is what the linear columns do not explain: c is the weighted regression of q in the window. So an estimate that is
  still learning 1, a and b does not count as a misfit. Each ad has its own regression, as users who see an ad are
  chosen by a and b, with `SHARED` displays of the average ad added, so that one of few displays has one, too.
- A single column (b = 1) is tested for a taste: q̃ = a − c, and what all ads have in common is taken out at the end.
- Sums are made in an order that depends on the displays alone.

References: C. R. Rao, "Large sample tests of statistical hypotheses …", 1948 (score test); X. Lin, "Variance component
testing in generalised linear models with random effects", Biometrika 1997 (its sum over groups).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats, Ints

#: Displays of the average ad that the regression of every ad has in addition.
SHARED: Final = 3.0
#: Added to the diagonal of a regression, so that a column that is always 0 has one.
_TINY: Final = 1e-9
#: The partner of a single column.
NOTHING: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Products of columns: `left` and `right`, (P,); `right` is `NOTHING` for a single column."""

    left: Ints
    right: Ints


def score_sums(
    products: Products, contexts: Floats, arms: Ints, residuals: Floats, weights: Floats, *, count: int
) -> tuple[Floats, Floats]:
    """Return U and V of some displays, (count, P) each.

    `contexts` (m, d) are of displays, as are `arms`, `residuals` y − p and `weights` p(1 − p), (m,).

    >>> x = np.random.default_rng(0).standard_normal((4000, 2))
    >>> p = 1 / (1 + np.exp(-x[:, 0] - 0.5 * x[:, 0] * x[:, 1]))
    >>> y = np.random.default_rng(1).random(4000) < p
    >>> before = 1 / (1 + np.exp(-x[:, 0]))
    >>> one = Products(left=np.array([0]), right=np.array([1]))
    >>> score, information = score_sums(one, x, np.zeros(4000, dtype=int), y - before, before * (1 - before), count=1)
    >>> (score / information).round(2)
    array([[0.47]])
    """
    order = np.argsort(arms, kind="stable")
    shown, firsts = np.unique(arms[order], return_index=True)
    scores, informations = np.zeros((2, count, len(products.left)))
    if not len(shown):
        return scores, informations
    x = np.ones((len(order), contexts.shape[1] + 1))  # the last column is that of `NOTHING`
    x[:, :-1] = contexts[order]
    w, r = weights[order, None], residuals[order, None]

    def by_ad(values: Floats) -> Floats:
        return np.add.reduceat(values, firsts, axis=0)

    left, right, is_pair = products.left, products.right, products.right != NOTHING
    a, b = x[:, left], x[:, right]
    q = a * b
    wq = w * q
    first, square = by_ad(w * x), by_ad(w * x * x)
    system = np.zeros((len(shown), len(left), 3, 3))
    system[..., 0, 0] = by_ad(w)
    system[..., 0, 1], system[..., 0, 2] = first[:, left], first[:, right]
    system[..., 1, 1], system[..., 2, 2] = square[:, left], square[:, right]
    crossed = by_ad(wq)
    system[..., 1, 2] = crossed
    system[..., [1, 2, 2], [0, 0, 1]] = system[..., [0, 0, 1], [1, 2, 2]]
    target = np.stack([crossed, by_ad(wq * a), by_ad(wq * b)], axis=-1)
    linear = by_ad(r * x)
    of_residuals = np.stack([np.broadcast_to(by_ad(r), crossed.shape), linear[:, left], linear[:, right]], axis=-1)
    for array in (system[..., 1:, :], system[..., 1:].swapaxes(-1, -2), target[..., 1:], of_residuals[..., 1:]):
        array[:, ~is_pair] = 0.0  # a single column is compared with 1 alone
    share = SHARED / len(order)
    ridge = _TINY * np.eye(3)
    c = np.linalg.solve(system + share * system.sum(axis=0) + ridge, (target + share * target.sum(axis=0))[..., None])[
        ..., 0
    ]
    scores[shown] = by_ad(r * q) - (c * of_residuals).sum(axis=-1)
    explained = (c * (2 * target - (system @ c[..., None])[..., 0])).sum(axis=-1)
    informations[shown] = np.maximum(by_ad(wq * q) - explained, 0.0)
    return scores, informations


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What scores say of a family of coefficients β, of several ads and products.

    deviations : the evidence against β = 0, in standard deviations of a normal distribution
    strength : estimate of the standard deviation of β
    arms : number of ads of which it is clear by themselves that β is not 0
    """

    deviations: float
    strength: float
    arms: int


#: Standard deviations from which an ad is clear by itself.
CLEAR: Final = 3.0


def evidence_of(scores: Floats, informations: Floats, *, common: bool) -> Evidence:
    """Return what scores and informations (K, p) say; without `common`, only of how ads differ.

    The test is that of a variance: Σ U² against Σ V, which has the distribution of a weighted sum of χ². It is
    approximated by one χ² of the same mean and variance (Satterthwaite), and that by the cube root of a normal number
    (Wilson and Hilferty).

    >>> evidence_of(np.array([[40.0], [-40.0]]), np.array([[100.0], [100.0]]), common=True)
    Evidence(deviations=4.892859632702574, strength=0.3872983346207417, arms=2)
    """
    if not common:
        total = informations.sum(axis=0)
        mean = np.where(total > 0, scores.sum(axis=0) / np.where(total > 0, total, 1.0), 0.0)
        scores, informations = (
            scores - informations * mean,
            informations - informations**2 / np.where(total > 0, total, 1.0),
        )
    expected, squares = float(informations.sum()), float((informations**2).sum())
    if not (squares > 0 and np.isfinite(squares)):
        return Evidence(deviations=0.0, strength=0.0, arms=0)
    found = float((scores**2).sum())
    known = informations > 0
    by_arm = np.where(known, scores**2 / np.where(known, informations, 1.0), 0.0).sum(axis=1)
    single = _deviations(by_arm, np.maximum(known.sum(axis=1), 1))
    return Evidence(
        deviations=float(_deviations(np.array(found * expected / squares), np.array(expected**2 / squares))),
        strength=max(0.0, (found - expected) / squares) ** 0.5,
        arms=int((single >= CLEAR).sum()),
    )


def _deviations(squares: Floats, freedom: Floats) -> Floats:
    """Return how far χ² of some degrees of freedom is above its usual values, in standard deviations."""
    spread = 2 / (9 * freedom)
    return np.asarray((np.cbrt(squares / freedom) - (1 - spread)) / np.sqrt(spread))
