"""Everything that Prometheus is told, in one place: the catalogue of metrics, and the observer that keeps them.

`Metrics` watches what the processors emit (it is an `Observer` of every runner) and sums plain numbers; the series are
made when somebody asks for them. One lock makes every scrape see whole batches, so that the accounts of `Tally`
balance in each of them. Label sets are closed: what has no place in them is not a label.

Three regrets are told, and they are not the same thing:

- **pseudo-regret**: what the slates served were worth against the best ones, under the true model. Exact, and known in
  simulated traffic only; elsewhere these series are absent.
- **regret bound**: the optimistic gap. What the best slates would earn if every arm were β standard deviations better
  than estimated, minus what the served ones are estimated to earn. An upper bound at that confidence, not an estimate.
- **posterior regret**: the expectation of the regret over what is still believed possible. An estimate (measured:
  0.8 to 6 times the truth), not a bound.
"""

from __future__ import annotations

from worker.metrics.catalogue import (
    CATALOGUE,
    CONSUMED,
    DURATIONS,
    IDENTITIES,
    MOST_POSITIONS,
    POSITIONS,
    REGRETS,
    Spec,
)
from worker.metrics.history import Mark, Snapshot, Window
from worker.metrics.observer import Histogram, Metrics, imbalances

__all__ = [
    "CATALOGUE",
    "CONSUMED",
    "DURATIONS",
    "IDENTITIES",
    "MOST_POSITIONS",
    "POSITIONS",
    "REGRETS",
    "Histogram",
    "Mark",
    "Metrics",
    "Snapshot",
    "Spec",
    "Window",
    "imbalances",
]
