"""The observer: sums what the processors emit, and makes the series when somebody asks for them."""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker import __version__
from worker.metrics.catalogue import (
    CATALOGUE,
    CONSUMED,
    DURATIONS,
    IDENTITIES,
    LAGS,
    MOST_POSITIONS,
    POSITIONS,
    SIZES,
)
from worker.metrics.history import History, Mark, Snapshot
from worker.stream.events import DEAD_LETTER_REASONS, MODES, Episode
from worker.stream.parameters import Parameters
from worker.stream.session import ENDINGS
from worker.stream.topology import Emits, Tally

Series: TypeAlias = Mapping[tuple[str, ...], float]


class Histogram:
    """Counts of observations by upper bound; several can be made at once, which the library's own does not offer."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count an observation that was made so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts at or below each bound."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class Metrics:
    """Sums what it sees; hand `registry` to whoever answers /metrics.

    Examples
    --------
    >>> metrics = Metrics()
    >>> emits = Emits(tally=Tally(arrivals=2, opened=1, repeated=1))
    >>> metrics.batch(emits, records=2, seconds=0.001)
    >>> metrics.registry.get_sample_value("adcascade_arrivals_total")
    2.0
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._lock = Lock()
        self._tally = Tally()
        self._totals = dict.fromkeys(
            ("episodes", "sessions", "explored", "late", "rejected", "bound", "posterior"), 0.0
        )
        self._simulated: dict[str, float] | None = None
        self._gauges: dict[str, float] = {}
        self._imbalance: dict[str, float] = {}
        self._lag = dict.fromkeys(CONSUMED, 0.0)
        self._refused = 0
        self._horizon = 1
        self._parameters: Parameters | None = None
        self._history = History()
        self._durations, self._sizes, self._delays = Histogram(DURATIONS), Histogram(SIZES), Histogram(LAGS)

    # ── what is observed ─────────────────────────────────────────────────────────────────────────────────────────────

    def batch(self, emits: Emits, records: int, seconds: float) -> None:
        """Take note that some records of a partition were handled."""
        with self._lock:
            self._tally.add(emits.tally)
            self._sizes.observe(records)
            if emits.decisions:
                self._durations.observe(seconds, len(emits.decisions))

    def add(self, tally: Tally) -> None:
        """Take note of what happened outside of a batch: sessions recovered or handed over."""
        with self._lock:
            self._tally.add(tally)

    def episode(self, episode: Episode) -> None:
        """Take note that a window was closed."""
        sessions = episode.sessions
        with self._lock:
            totals = self._totals
            totals["episodes"] += 1
            totals["sessions"] += sessions
            totals["explored"] += episode.explored
            totals["late"] += episode.late
            totals["rejected"] += episode.rejected is not None
            self._gauges["explored_share"] = episode.explored / sessions if sessions else 0.0
            for name, value in (("bound", episode.regret_bound), ("posterior", episode.regret_posterior)):
                if value is not None:
                    # Draws and rounding can leave a loss a little below zero; a counter must not fall.
                    totals[name] += max(0.0, value) * sessions
                    self._gauges[f"regret_{name}_per_session"] = value
            for name in ("parameter_norm", "smallest_eigenvalue"):
                if (number := getattr(episode, name)) is not None:
                    self._gauges[name] = number
            self._history.episode(episode)

    def version(self, parameters: Parameters) -> None:
        """Take note that a version was published."""
        with self._lock:
            if self._parameters is None or parameters.version > self._parameters.version:
                self._history.version(parameters)
            self._parameters = parameters
            self._horizon = max(self._horizon, parameters.settings.horizon)
            self._gauges |= {
                "explore_budget": parameters.explore_budget,
                "beta": parameters.beta,
                "frozen": float(parameters.frozen),
                "parameters_version": parameters.version,
                "parameters_timestamp_seconds": parameters.made_at / 1000,
                "parameters_effective_timestamp_seconds": parameters.effective_at / 1000,
                "parameters_observations": parameters.observations,
                "parameter_norm": parameters.posterior.norm,
            }

    def refused(self) -> None:
        """Take note that a version came that is known with another content: two learners disagree."""
        with self._lock:
            self._refused += 1

    def learning(self, here: bool) -> None:
        """Take note of whether this worker runs the learner."""
        self._gauges["learning"] = float(here)

    def simulated(self, *, oracle: float, served: float, sessions: int, window_end: int) -> None:
        """Take note of what a closed window was worth under the true model: of the best slates and of those served."""
        with self._lock:
            self._history.truth(window_end, oracle=oracle, served=served)
            sums = self._simulated = self._simulated or dict.fromkeys(("oracle", "served", "regret", "windows"), 0.0)
            sums["oracle"] += oracle
            sums["served"] += served
            sums["regret"] += max(0.0, oracle - served)
            sums["windows"] += 1
            self._gauges["pseudo_regret_per_session"] = (oracle - served) / sessions if sessions else 0.0

    def decided(self, seconds: float, times: int = 1) -> None:
        """Take note of how long a session, or so many of them, waited for the first decision."""
        with self._lock:
            self._delays.observe(seconds, times)

    def watermark(self, time: int) -> None:
        """Take note that everything up to a time (milliseconds) is processed."""
        self._gauges["watermark_timestamp_seconds"] = time / 1000
        with self._lock:
            if self._history.wants_mark(time):
                self._history.mark(self._mark(time))

    def _mark(self, time: int) -> Mark:
        tally = Tally()
        tally.add(self._tally)
        return Mark(time=time, tally=tally, durations=tuple(self._durations.counts), delays=tuple(self._delays.counts))

    def consumer_lag(self, topic: str, records: int) -> None:
        """Take note of how many records of a topic (without prefix) have not been read."""
        if topic not in CONSUMED:
            raise ValueError(f"{topic!r} is not one of {', '.join(CONSUMED)}")
        self._lag[topic] = float(records)

    def census(self, *, open_sessions: int, parked: int) -> Mapping[str, int]:
        """Compare the accounts with what is in the tables right now; return what does not balance."""
        with self._lock:
            self._imbalance = imbalance = {
                name: float(value) for name, value in imbalances(self._tally, open_sessions, parked).items()
            }
        return {name: int(value) for name, value in imbalance.items() if value}

    # ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are checked by a test, not at start."""
        return ()

    def snapshot(self) -> Snapshot:
        """Return everything, all of one moment."""
        with self._lock:
            return Snapshot(
                now=self._mark(int(self._gauges.get("watermark_timestamp_seconds", 0.0) * 1000)),
                marks=self._history.marks,
                windows=self._history.windows,
                parameters=self._parameters,
                gauges=dict(self._gauges),
                totals={**self._totals, "refused": float(self._refused)},
                imbalance=dict(self._imbalance),
                lag=dict(self._lag),
                simulated=self._simulated is not None,
            )

    def collect(self) -> Iterable[Metric]:
        """Make the series, all of one moment."""
        with self._lock:
            series = self._series()
            histograms = {
                name: (histogram.buckets(), histogram.sum)
                for name, histogram in (
                    ("adcascade_decision_duration_seconds", self._durations),
                    ("adcascade_batch_records", self._sizes),
                    ("adcascade_arrival_to_decision_seconds", self._delays),
                )
            }
        for spec in CATALOGUE:
            if spec.kind == "histogram":
                family = HistogramMetricFamily(spec.name, spec.help)
                family.add_metric([], *histograms[spec.name])
                yield family
                continue
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            numbers = kind(spec.name, spec.help, labels=list(spec.labels))
            for labels, value in series[spec.name].items():
                numbers.add_metric(list(labels), value)
            yield numbers

    def _series(self) -> dict[str, Series]:
        tally, totals = self._tally, self._totals
        positions = POSITIONS[: self._horizon] if self._horizon <= MOST_POSITIONS else POSITIONS
        gauges = {spec.name: _one(self._gauges.get(spec.name.removeprefix("adcascade_"))) for spec in CATALOGUE}
        return gauges | {
            "adcascade_regret_bound_total": _one(totals["bound"]),
            "adcascade_regret_posterior_total": _one(totals["posterior"]),
            "adcascade_reward_total": _one(tally.reward),
            "adcascade_expected_reward_total": _one(tally.expected_reward),
            "adcascade_explored_sessions_total": _one(totals["explored"]),
            "adcascade_episodes_closed_total": _one(totals["episodes"]),
            "adcascade_episode_sessions_total": _one(totals["sessions"]),
            "adcascade_refused_versions_total": _one(self._refused),
            "adcascade_rejected_folds_total": _one(totals["rejected"]),
            "adcascade_late_records_total": _one(totals["late"]),
            "adcascade_arrivals_total": _one(tally.arrivals),
            "adcascade_arrivals_classified_total": _each(
                opened=tally.opened, repeated=tally.repeated, dead=tally.dead_arrivals
            ),
            "adcascade_open_sessions": _one(tally.opened + tally.recovered - tally.ended.total() - tally.handed_over),
            "adcascade_sessions_ended_total": _each(**{how: tally.ended[how] for how in ENDINGS}),
            "adcascade_sessions_recovered_total": _one(tally.recovered),
            "adcascade_sessions_handed_over_total": _one(tally.handed_over),
            "adcascade_feedback_received_total": _one(tally.feedback),
            "adcascade_feedback_total": _each(
                applied=tally.applied,
                redundant=tally.redundant,
                outside=tally.outside,
                late=tally.late,
                dead=tally.dead_feedback,
            ),
            "adcascade_parked_records": _one(_parked(tally)),
            "adcascade_parked_recovered_total": _one(tally.recovered_parked),
            "adcascade_parked_handed_over_total": _one(tally.handed_over_parked),
            "adcascade_accounting_imbalance": {(name,): self._imbalance.get(name, 0.0) for name in IDENTITIES},
            "adcascade_decisions_total": {
                (mode, position): value
                for mode in MODES
                for position, value in _by_position(
                    {place: count for (how, place), count in tally.decisions.items() if how == mode}, positions
                ).items()
            },
            "adcascade_clicks_total": {(p,): value for p, value in _by_position(tally.clicks, positions).items()},
            "adcascade_dead_letters_total": {(reason,): float(tally.dead[reason]) for reason in DEAD_LETTER_REASONS},
            "adcascade_consumer_lag_records": {(topic,): value for topic, value in self._lag.items()},
            "adcascade_build_info": {(__version__, platform.python_version()): 1.0},
            **self._regrets(),
        }

    def _regrets(self) -> dict[str, Series]:
        episodes = max(1.0, self._totals["episodes"])
        averaged = {kind: self._totals[kind] / episodes for kind in ("bound", "posterior")}
        sums = self._simulated
        if sums is None:
            return {"adcascade_regret_time_averaged": _each(**averaged)}
        return {
            "adcascade_regret_time_averaged": _each(pseudo=sums["regret"] / sums["windows"], **averaged),
            "adcascade_pseudo_regret_total": _one(sums["regret"]),
            "adcascade_oracle_reward_total": _one(sums["oracle"]),
            "adcascade_served_value_total": _one(sums["served"]),
        }


def imbalances(tally: Tally, open_sessions: int, parked: int) -> dict[str, int]:
    """Return left minus right side of each of the accounts of `Tally`, given what is in the tables."""
    return {
        "arrivals": tally.arrivals - tally.opened - tally.repeated - tally.dead_arrivals,
        "sessions": tally.opened + tally.recovered - tally.ended.total() - tally.handed_over - open_sessions,
        "feedback": _parked(tally) - parked,
    }


def _parked(tally: Tally) -> int:
    """Return how many records wait, by the accounts."""
    settled = tally.applied + tally.redundant + tally.late + tally.outside + tally.dead_feedback
    return tally.feedback + tally.recovered_parked - settled - tally.handed_over_parked


def _one(value: float | None) -> Series:
    return {} if value is None else {(): float(value)}


def _each(**values: float) -> Series:
    return {(name,): float(value) for name, value in values.items()}


def _by_position(counts: Mapping[int, int], positions: Sequence[str]) -> dict[str, float]:
    """Return counts by the label of their position, those beyond the last of `POSITIONS` together."""
    numbers = dict.fromkeys(positions, 0.0)
    for position, count in counts.items():
        label = str(position) if position <= MOST_POSITIONS else POSITIONS[-1]
        numbers[label] = numbers.get(label, 0.0) + count
    return numbers
