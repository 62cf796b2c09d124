"""Calibration: how many clicks were predicted before anything was learned from them, and how many came.

Rules that hold in this file:

- Predicted is the mean of the version in force before the window was folded: never the optimistic index, and never a
  model that has seen the answers. The prior predicts nothing: figures begin with the second fold.
- A display counts as in the fold: an answered one, or the one after the last answer, which was not clicked.
- Of a display with the probability p: P = Σ p, V = Σ p(1 − p), and the log loss −Σ ln(p if clicked, else 1 − p). The
  ratio is clicks / P. Its interval is that of clicks with the variance V · max(1, ratio).
- Sums per ad belong to the version, and its hash covers them. They fade by what comes: they hold about the last
  `MEMORY` clicks, and what a noticed change forgets. Orders leave them alone; a rollback or an import begins them anew.
- The figures of one window are in its episode record, also if it was frozen or rejected. Tenths are of the displays of
  a window by their probability, so they add up over windows.
- Ads that a policy chose for their estimate look over-predicted: of two ads with the same truth it shows the
  overestimated one. So sessions with random slates and those of the control group are also shown apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Final

import numpy as np

from worker.bandit.arrays import ArrayValue, Floats, Ints, frozen_array, sigmoid
from worker.bandit.click_model import ClickModel, Observations
from worker.errors import InputError
from worker.stream.events import AdCalibration, CalibrationRecord, Interval, PredictedClicks

#: The rows of the sums.
ROWS: Final = ("displays", "predicted", "variance", "clicks", "log_loss")
#: Clicks, about, that the sums hold.
MEMORY: Final = 5_000.0
#: Kinds of sessions, in the order of their figures.
SESSIONS: Final = ("chosen", "random", "control")
TENTHS: Final = 10
#: Standard deviations on each side of a ratio: 95 %.
REACH: Final = 1.96
#: Ratios within which a model is well calibrated.
USUAL: Final = (0.8, 1.25)
#: Clicks from which it is judged, and more of them for more ads, until the first windows hardly count: a model that has
#: just begun shows what it overestimates.
LEAST_CLICKS: Final = 1_000.0
CLICKS_PER_AD: Final = 100.0
MOST_CLICKS: Final = 0.9 * MEMORY
#: Ads that are named.
MOST_NAMED: Final = 10
AT_ONCE: Final = 8192  # displays whose log-odds are computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Displays of a window, their click probabilities by the version before, (m,), and the kind of their sessions."""

    data: Observations
    chances: Floats
    kinds: Ints


def predict(model: ClickModel, data: Observations, kinds: Ints) -> Predicted:
    """Return the click probabilities of displays under a model."""
    odds = np.empty(len(data))
    for first in range(0, len(data), AT_ONCE):
        rows = slice(first, first + AT_ONCE)
        odds[rows] = model.log_odds_of(data.contexts[data.sessions[rows]], data.arms[rows, None])[:, 0]
    effects = model.position_effects
    return Predicted(
        data=data, chances=sigmoid(odds + effects[np.minimum(data.positions, len(effects) - 1)]), kinds=kinds
    )


# ── sums of a version ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration(ArrayValue):
    """Fading sums per ad, (5, K), with a row for each of `ROWS`; ads that were added since are missing.

    >>> known = Calibration(ads=np.array([[1000.0], [100.0], [80.0], [110.0], [250.0]]))
    >>> known.ratio, round(known.loss, 3)
    (Interval(estimate=1.1, low=0.916..., high=1.283...), 0.721)
    """

    ads: Floats = field(default_factory=lambda: np.zeros((len(ROWS), 0)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "ads", frozen_array(self.ads))
        if self.ads.ndim != 2 or len(self.ads) != len(ROWS) or (self.ads < 0).any():
            raise InputError(f"calibration must have {len(ROWS)} rows of sums, a column per ad")

    def plus(self, predicted: Predicted, *, arms: int, kept: float = 1.0) -> Calibration:
        """Return the sums with a window, after which the share `kept` of older sessions counts."""
        window = _by(predicted, predicted.data.arms, arms)
        share = kept * max(0.0, 1.0 - float(predicted.data.clicked.sum()) / MEMORY)
        before = np.pad(self.ads, ((0, 0), (0, arms - self.ads.shape[1])))
        return Calibration(ads=share * before + window)

    @property
    def total(self) -> dict[str, float]:
        """The sums over all ads, by the names of `ROWS`."""
        return dict(zip(ROWS, self.ads.sum(axis=1).tolist(), strict=True))

    @property
    def ratio(self) -> Interval | None:
        """Clicks per predicted click of all ads, with 95 %; None if none were predicted."""
        total = self.total
        if not total["predicted"] > 0:
            return None
        estimate = total["clicks"] / total["predicted"]
        half = REACH * sqrt(total["variance"] * max(1.0, estimate)) / total["predicted"]
        return Interval(estimate, max(0.0, estimate - half), estimate + half)

    @property
    def loss(self) -> float | None:
        """The log loss, as a share of that of the base rate: below 1 if predictions are better than one rate for all.

        None without a click.
        """
        total = self.total
        parts = total["clicks"], total["displays"] - total["clicks"]
        base = sum(part * log(total["displays"] / part) for part in parts if part > 0)
        return total["log_loss"] / base if base > 0 else None

    @property
    def is_bad(self) -> bool:
        """Whether enough clicks say that the predictions are off: the whole interval is outside of what is usual."""
        total, ratio = self.total, self.ratio
        enough = min(max(LEAST_CLICKS, CLICKS_PER_AD * self.ads.shape[1]), MOST_CLICKS)
        if ratio is None or max(total["clicks"], total["predicted"]) < enough:
            return False
        return ratio.low > USUAL[1] or ratio.high < USUAL[0]

    @property
    def sentence(self) -> str:
        """The ratio in words; empty before anything was predicted."""
        if (ratio := self.ratio) is None:
            return ""
        loss = "" if self.loss is None else f"; log loss {self.loss:.2f} of that of one rate for all"
        clicks = f"{self.total['clicks']:,.0f} clicks are {ratio.estimate:.2f} × predicted"
        return f"{clicks} ({ratio.low:.2f} to {ratio.high:.2f}){loss}"

    def worst(self, names: Sequence[str], most: int = MOST_NAMED) -> tuple[AdCalibration, ...]:
        """Return the ads whose clicks differ most clearly from what was predicted."""
        displays, predicted, variance, clicks, _ = self.ads
        deviations = (clicks - predicted) / np.sqrt(variance + 1)  # by one click more or less nothing is clear
        order = np.argsort(-np.abs(deviations), kind="stable")[:most]
        return tuple(
            AdCalibration(
                arm=names[k],
                displays=round(float(displays[k])),
                predicted=float(predicted[k]),
                clicks=round(float(clicks[k])),
                deviations=float(deviations[k]),
            )
            for k in order[displays[order] > 0].tolist()
        )


def _by(predicted: Predicted, labels: Ints, count: int) -> Floats:
    """Return the sums of displays by label, (5, count)."""
    p, y = predicted.chances, predicted.data.clicked
    with np.errstate(divide="ignore"):
        losses = np.minimum(-np.log(np.where(y > 0, p, 1 - p)), 1e3)  # a click on what has no chance
    columns = (np.ones(len(p)), p, p * (1 - p), y, losses)
    return np.array([np.bincount(labels, weights=column, minlength=count) for column in columns])


# ── figures of a window ──────────────────────────────────────────────────────────────────────────────────────────────


def window_figures(predicted: Predicted, sums: Calibration, names: Sequence[str]) -> CalibrationRecord | None:
    """Return the figures of a window, with the worst ads of the sums after it; None without displays or if broken."""
    data, count = predicted.data, len(predicted.data)
    if not count or not np.isfinite(predicted.chances).all():
        return None
    _, _, variance, _, losses = _by(predicted, np.zeros(count, dtype=np.intp), 1)[:, 0].tolist()
    tenths = np.empty(count, dtype=np.intp)
    tenths[np.argsort(predicted.chances, kind="stable")] = np.arange(count) * TENTHS // count
    return CalibrationRecord(
        variance=variance,
        log_loss=losses,
        tenths=_figures(predicted, tenths, TENTHS),
        positions=_figures(predicted, data.positions, int(data.positions.max()) + 1),
        sessions=_figures(predicted, predicted.kinds, len(SESSIONS)),
        worst=sums.worst(names),
    )


def _figures(predicted: Predicted, labels: Ints, count: int) -> PredictedClicks:
    displays, expected, _, clicks, _ = _by(predicted, labels, count).tolist()
    return PredictedClicks(
        displays=tuple(map(round, displays)), predicted=tuple(expected), clicks=tuple(map(round, clicks))
    )
