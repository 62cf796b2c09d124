"""The observer: sums what the runners emit, and returns snapshots.

One lock covers every change and every snapshot. So each scrape shows whole batches, and the balances hold in it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from threading import Lock
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry

from worker.metrics.catalogue import CATALOGUE, IDENTITIES
from worker.metrics.exposition import Series
from worker.metrics.history import (
    BETWEEN_MARKS,
    DELAY_BOUNDS,
    DURATION_BOUNDS,
    MOST_CONTEXTS,
    MOST_MARKS,
    MOST_WINDOWS,
    SIZE_BOUNDS,
    STAGES,
    Histogram,
    Mark,
    Snapshot,
    Window,
)
from worker.metrics.troubles import TroubleLog
from worker.stream.ad_figures import unanswered
from worker.stream.calibration import SESSIONS
from worker.stream.events import Episode
from worker.stream.features import listed
from worker.stream.misfit import advice
from worker.stream.parameters import Parameters
from worker.stream.table import SessionTable
from worker.stream.topology import Emits, Tally

log = logging.getLogger(__name__)

#: Counts that are 0 before anything happens. Those of simulated traffic are absent elsewhere.
_FROM_ZERO = (
    *("episodes_closed", "episode_sessions", "explored_sessions", "regret_bound", "regret_posterior"),
    *("rejected_folds", "refused_versions", "rounded_versions", "late_records"),
)


class Metrics:
    """Sum everything observed; `registry` serves /metrics. `consumed` are the topics that may lag, on Kafka.

    >>> metrics = Metrics()
    >>> emits = Emits(tally=Tally(arrivals=2, opened=1, repeated=1))
    >>> metrics.batches([emits], records=2, seconds=0.001)
    >>> metrics.registry.get_sample_value("adcascade_arrivals_total")
    2.0
    """

    def __init__(self, consumed: Iterable[str] = ()) -> None:
        self.troubles = TroubleLog()
        self.registry = CollectorRegistry()
        self.registry.register(Series(CATALOGUE, self.snapshot))
        self._lock = Lock()
        self._numbers = dict.fromkeys(_FROM_ZERO, 0.0)
        self._now = Mark(
            time=0,
            tally=Tally(),
            histograms={
                "decision_duration_seconds": {(): Histogram(DURATION_BOUNDS)},
                "batch_records": {(): Histogram(SIZE_BOUNDS)},
                "arrival_to_decision_seconds": {(): Histogram(DELAY_BOUNDS)},
                "stage_seconds": {(stage,): Histogram(DURATION_BOUNDS) for stage in STAGES},
            },
        )
        self._imbalance = dict.fromkeys(IDENTITIES, 0)
        self._lag = dict.fromkeys(consumed, 0.0)
        self._horizon = 1  # the largest of all versions: series must not disappear
        self._parameters: Parameters | None = None
        self._windows: deque[Window] = deque(maxlen=MOST_WINDOWS)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        #: When something was last forgotten, the share of older sessions that is left, and the ads that began anew.
        self._forgotten: tuple[int, float, tuple[str, ...]] | None = None
        self._contexts: deque[bytes] = deque(maxlen=MOST_CONTEXTS)
        self._clicks = np.zeros((2, len(SESSIONS)))  # predicted, observed

    # ── observing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def batches(self, emits: Sequence[Emits], records: int, seconds: float) -> None:
        """Count batches of several partitions that were handled together, and so have one tally."""
        if not emits:
            return
        tally, samples = emits[0].tally, [one.sample for one in emits if one.sample is not None]
        with self._lock:
            self._now.tally.add(tally)
            self._now.histograms["batch_records"][()].observe(records)
            if decisions := sum(len(one.decisions) for one in emits):
                self._now.histograms["decision_duration_seconds"][()].observe(seconds, decisions)
            self._contexts.extend(samples)
        self.troubles.observe(tally)

    def add(self, tally: Tally) -> None:
        """Count what happened outside a batch: sessions recovered or handed over."""
        with self._lock:
            self._now.tally.add(tally)
        self.troubles.observe(tally)

    def episode(self, episode: Episode) -> None:
        """Count a closed window."""
        sessions, numbers = episode.sessions, self._numbers
        with self._lock:
            numbers["episodes_closed"] += 1
            numbers["episode_sessions"] += sessions
            numbers["explored_sessions"] += episode.explored
            numbers["rejected_folds"] += episode.rejected is not None
            # Sampling and rounding can make a regret slightly negative; a counter must not fall.
            numbers["regret_bound"] += max(0.0, episode.regret_bound or 0.0) * sessions
            numbers["regret_posterior"] += max(0.0, episode.regret_posterior or 0.0) * sessions
            if episode.calibration is not None:
                self._clicks += episode.calibration.sessions.predicted, episode.calibration.sessions.clicks
            # A restarted learner reports windows again.
            if not self._windows or episode.window_end > self._windows[-1].episode.window_end:
                self._windows.append(Window(episode=episode))

    def version(self, parameters: Parameters) -> None:
        """Show a published version."""
        with self._lock:
            known = self._parameters
            changed = parameters.kept < 1 or parameters.changed
            if changed and (known is None or parameters.folds > known.folds):
                self._forgotten = (parameters.made_at, parameters.kept, parameters.changed)
            self._parameters = parameters
            self._horizon = max(self._horizon, parameters.settings.horizon)
        ads = [f"{ad.arm} {ad.rate:.0%} ({ad.displays:,} displays)" for ad in unanswered(parameters)]
        self.troubles.set("unanswered-ads", f"feedback: {listed(ads)}" if ads else "")
        self.troubles.set("calibration", parameters.calibration.sentence if parameters.calibration.is_bad else "")
        self.troubles.set("misfit", "; ".join(advice(parameters)))
        self._report_lift(parameters)

    def _report_lift(self, parameters: Parameters) -> None:
        lift = parameters.lift
        told = "" if lift is None else lift.sentence
        self.troubles.set("loss", told if lift is not None and lift.is_loss else "")
        self.troubles.set("guarded", told if parameters.guarded else "")
        mismatch = None if lift is None else lift.mismatch
        self.troubles.set("sample-ratio", "" if mismatch is None else f"it has {mismatch:.2f} of its size")

    def late(self, records: int) -> None:
        """Count journal records for windows that were already closed."""
        with self._lock:
            self._numbers["late_records"] += records

    def count(self, name: Literal["refused_versions", "rounded_versions"], times: int = 1) -> None:
        """Count versions that are unreadable or another content under a known number, or differ by rounding."""
        with self._lock:
            self._numbers[name] += times

    def learning(self, here: bool) -> None:
        """Show whether this worker runs the learner."""
        with self._lock:
            self._numbers["learning"] = float(here)

    def simulated(self, *, oracle: float, served: float, window_end: int) -> None:
        """Count the values of the best and the served slates of a closed window, under the true model."""
        with self._lock:
            for index, window in enumerate(self._windows):
                if window.episode.window_end == window_end:
                    self._windows[index] = replace(window, oracle=oracle, served=served)
            for name, value in (("oracle", oracle), ("pseudo_regret", max(0.0, oracle - served))):
                self._numbers[name] = self._numbers.get(name, 0.0) + value

    def decided(self, seconds: float, times: int = 1) -> None:
        """Count the time from arrival to first decision, of one session or of several equal ones."""
        with self._lock:
            self._now.histograms["arrival_to_decision_seconds"][()].observe(seconds, times)

    def stages(self, spent: Iterable[tuple[str, float]]) -> None:
        """Count the seconds that lists of records spent in stages."""
        with self._lock:
            for stage, seconds in spent:
                self._now.histograms["stage_seconds"][stage,].observe(seconds)

    def watermark(self, time: int) -> None:
        """Show the event time (milliseconds) up to which everything is processed."""
        with self._lock:
            self._now.time = time
            if not self._marks or time >= self._marks[-1].time + BETWEEN_MARKS:
                self._marks.append(deepcopy(self._now))

    def consumer_lag(self, topic: str, records: int) -> None:
        """Show the number of unread records of a topic (without prefix)."""
        with self._lock:
            self._lag[topic] = float(records)

    def census(self, tables: Iterable[SessionTable]) -> None:
        """Compare the balances with the tables, and log those that are off when that changes."""
        with self._lock:
            known, self._imbalance = self._imbalance, self._now.tally.imbalances(tables)
            wrong = {name: value for name, value in self._imbalance.items() if value}
        if wrong and self._imbalance != known:
            log.error("the balances are off: %s", wrong)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        """Return a consistent copy of everything."""
        with self._lock:
            size = 0 if self._parameters is None else 8 * self._parameters.settings.dim  # of a packed context
            return Snapshot(
                now=deepcopy(self._now),
                since=self._marks[0] if self._marks else None,
                windows=tuple(self._windows),
                contexts=tuple(one for one in self._contexts if len(one) == size),
                parameters=self._parameters,
                forgotten=self._forgotten,
                numbers=dict(self._numbers),
                clicks=self._clicks.copy(),
                imbalance=dict(self._imbalance),
                lag=dict(self._lag),
                horizon=self._horizon,
                troubles=self.troubles.active(),
            )

    def trouble_lines(self) -> list[str]:
        """Return the active troubles, a line each."""
        return [f"{active.name}: {active.sentence}" for active in self.troubles.active()]
