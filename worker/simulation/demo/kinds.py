"""Kinds of users: a few groups by which a report shows who gets which ad."""

from __future__ import annotations

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.bandit.click_model import Truth
from worker.simulation.digits import DigitsTruth

MOST_FEATURES = 5


class Kinds:
    """The kinds of users of a world: by the digit of their image, else by their most pronounced feature.

    Of many features, those count by which the arms differ most.

    >>> from worker.simulation.environments import seeded_environment
    >>> kinds = Kinds(seeded_environment("tastes", dim=2, arms=3, seed=0).truth)
    >>> kinds.names, kinds.of(np.array([[0.1, -3.0], [2.0, 1.0]])).tolist()
    (('x1 high', 'x1 low', 'x2 high', 'x2 low'), [3, 0])
    """

    names: tuple[str, ...]

    def __init__(self, truth: Truth) -> None:
        self._digits = truth if isinstance(truth, DigitsTruth) else None
        if self._digits is not None:
            self.names = tuple(f"digit {digit}" for digit in range(truth.arms))
            return
        tastes = true_heads(truth)[:, 1:]
        strongest = np.argsort(-tastes.std(axis=0), kind="stable")[:MOST_FEATURES]
        self._features = np.sort(strongest)
        self.names = tuple(f"x{feature + 1} {end}" for feature in self._features for end in ("high", "low"))

    def of(self, contexts: Floats) -> Ints:
        """Return the kind of each context, (n, d) → (n,)."""
        if self._digits is not None:
            return self._digits.classes_of(contexts)
        values = contexts[:, self._features]
        strongest = np.abs(values).argmax(axis=1)
        return np.asarray(2 * strongest + (values[np.arange(len(values)), strongest] < 0), dtype=np.intp)


def true_heads(truth: Truth) -> Floats:
    """Return the coefficients of [1; x] in the true log-odds of each arm, which are linear in x: (K, d+1)."""
    corners = np.vstack([np.zeros(truth.dim), np.eye(truth.dim)])
    log_odds = truth.log_odds(corners).T
    log_odds[:, 1:] -= log_odds[:, :1]
    return log_odds
