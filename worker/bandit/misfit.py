"""A score test for what a click model misses: products of two context columns, and tastes where a model has none.

Each display has a residual y − p, p by the estimate *before* the display was learned from, and the weight w = p(1 − p).
For ad k and a product q = a·b of two columns,

    U_k = Σ q̃ (y − p),   V_k = Σ w q̃²,   q̃ = q − c·[1; a; b]

sum over all windows to the score of q's coefficient and its information (docs/math.md §15). If the model is right, U_k
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
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats, Ints

#: Displays of the average ad that the regression of every ad has in addition.
SHARED: Final = 3.0
#: Added to sums of squares, so that columns that are constant or the same have a regression.
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
    columns, places = np.unique([products.left, products.right], return_inverse=True)
    # [1; x; x²] of the columns that are needed; `NOTHING` is the column of ones.
    own = 1 + len(columns[columns != NOTHING])
    z = np.ones((len(order), 2 * own - 1))
    z[:, 1:own] = contexts[order][:, columns[columns != NOTHING]]
    z[:, own:] = z[:, 1:own] ** 2
    left, right = places.reshape(2, -1) + (NOTHING not in columns)
    weighted, surprised = z * weights[order, None], z[:, :own] * residuals[order, None]
    moments = np.empty((len(shown), z.shape[1], z.shape[1]))
    linear = np.empty((len(shown), own, own))
    for k, (first, end) in enumerate(zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True)):
        moments[k] = weighted[first:end].T @ z[first:end]
        linear[k] = surprised[first:end].T @ z[first:end, :own]
    squared = np.where(left, left + own - 1, 0), np.where(right, right + own - 1, 0)
    sums = _Sums(
        n=moments[:, 0, :1],
        a=moments[:, 0, left],
        b=moments[:, 0, right],
        aa=moments[:, left, left],
        bb=moments[:, right, right],
        q=moments[:, left, right],
        qa=moments[:, squared[0], right],
        qb=moments[:, left, squared[1]],
    )
    c = sums.plus(SHARED / max(1, len(order))).regression(products.right != NOTHING)
    explained = c[0] * linear[:, :1, 0] + c[1] * linear[:, 0, left] + c[2] * linear[:, 0, right]
    scores[shown] = linear[:, left, right] - explained
    informations[shown] = np.maximum(moments[:, squared[0], squared[1]] - sums.explained(c), 0.0)
    return scores, informations


class _Sums(NamedTuple):
    """Weighted sums of 1, a, b, their squares, q = ab and its products with a and b, by ad and product: (K, P)."""

    n: Floats
    a: Floats
    b: Floats
    aa: Floats
    bb: Floats
    q: Floats
    qa: Floats
    qb: Floats

    def plus(self, share: float) -> _Sums:
        """Return the sums with a share of those of all ads."""
        return _Sums(*(part + share * part.sum(axis=0) for part in self))

    def regression(self, is_pair: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
        """Return the coefficients of 1, a and b in the regression of q; of a single column that of 1 alone."""
        n = self.n + _TINY
        mean_a, mean_b, mean_q = self.a / n, self.b / n, self.q / n
        aa, bb = (
            (own - both * mean) * (1 + _TINY) + _TINY
            for own, both, mean in ((self.aa, self.a, mean_a), (self.bb, self.b, mean_b))
        )
        ab, qa, qb = self.q - self.a * mean_b, self.qa - self.q * mean_a, self.qb - self.q * mean_b
        determinant = np.where(is_pair, aa * bb - ab * ab, np.inf)
        of_a, of_b = (bb * qa - ab * qb) / determinant, (aa * qb - ab * qa) / determinant
        return mean_q - of_a * mean_a - of_b * mean_b, of_a, of_b

    def explained(self, c: tuple[Floats, Floats, Floats]) -> Floats:
        """Return how much smaller the sum of squares of q is without c·[1; a; b]."""
        one, of_a, of_b = c
        rest_1 = 2 * self.q - one * self.n - of_a * self.a - of_b * self.b
        rest_a = 2 * self.qa - one * self.a - of_a * self.aa - of_b * self.q
        rest_b = 2 * self.qb - one * self.b - of_a * self.q - of_b * self.bb
        return np.asarray(one * rest_1 + of_a * rest_a + of_b * rest_b)


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
    single = chi_square_deviations(by_arm, np.maximum(known.sum(axis=1), 1))
    return Evidence(
        deviations=float(chi_square_deviations(np.array(found * expected / squares), np.array(expected**2 / squares))),
        strength=max(0.0, (found - expected) / squares) ** 0.5,
        arms=int((single >= CLEAR).sum()),
    )


def chi_square_deviations(squares: Floats, freedom: Floats) -> Floats:
    """Return how far χ² of some degrees of freedom is above its usual values (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return np.asarray((np.cbrt(squares / freedom) - (1 - spread)) / np.sqrt(spread))
