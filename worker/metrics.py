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

import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker import __version__
from worker.stream.events import DEAD_LETTER_REASONS, MODES, Episode
from worker.stream.parameters import Parameters
from worker.stream.sessions import ENDINGS
from worker.stream.topology import Emits, Tally

#: Positions that have a label of their own; all beyond share one, so that the set stays closed for any horizon.
MOST_POSITIONS: Final = 20
POSITIONS: Final = (*map(str, range(1, MOST_POSITIONS + 1)), "more")
IDENTITIES: Final = ("arrivals", "sessions", "feedback")
REGRETS: Final = ("pseudo", "bound", "posterior")
CONSUMED: Final = ("arrivals", "clicks", "journal", "parameters")

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = Mapping[str, Sequence[str]]


class Spec(NamedTuple):
    """One metric; `labels` are the values that each label can have."""

    name: str
    kind: Kind
    help: str
    labels: Labels = MappingProxyType({})


#: What there is, in the order of /metrics.
CATALOGUE: Final = (
    # Regret and revenue: the heart of it.
    Spec(
        "adcascade_pseudo_regret_total",
        "counter",
        "Simulated traffic only. Revenue that the slates served fall short of the best slates, both in expectation "
        "under the true model. Exact, free of the luck of clicks.",
    ),
    Spec(
        "adcascade_pseudo_regret_per_session",
        "gauge",
        "Simulated traffic only. Pseudo-regret of the last closed window, divided by its sessions.",
    ),
    Spec(
        "adcascade_oracle_reward_total",
        "counter",
        "Simulated traffic only. Expected revenue of the best slates under the true model, for the sessions that came.",
    ),
    Spec(
        "adcascade_served_value_total",
        "counter",
        "Simulated traffic only. Expected revenue of the slates served under the true model; the oracle's minus this "
        "is the pseudo-regret.",
    ),
    Spec(
        "adcascade_regret_bound_per_session",
        "gauge",
        "Mean optimistic gap of the last closed window: what a session can have lost at the confidence of beta. An "
        "upper bound from the model's own uncertainty, not an estimate of what was lost.",
    ),
    Spec(
        "adcascade_regret_bound_total",
        "counter",
        "Optimistic gaps of all sessions of closed windows, summed.",
    ),
    Spec(
        "adcascade_regret_posterior_per_session",
        "gauge",
        "Mean posterior expected regret of the last closed window: what a session lost on average over all models "
        "still believed possible. An estimate that leans to the high side, not a bound; wrong if the model is.",
    ),
    Spec(
        "adcascade_regret_posterior_total",
        "counter",
        "Posterior expected regret of all sessions of closed windows, summed.",
    ),
    Spec(
        "adcascade_regret_time_averaged",
        "gauge",
        "Regret since the process started, per closed window (the source's R_t / t): pseudo (simulated traffic only), "
        "bound (optimistic gap) or posterior (expected).",
        {"kind": REGRETS},
    ),
    Spec("adcascade_reward_total", "counter", "Revenue of the clicks, at the prices in force."),
    Spec(
        "adcascade_expected_reward_total",
        "counter",
        "Revenue that the serving versions expected of the sessions opened. Above the revenue earned by as much as "
        "users never answer and the estimate is too hopeful.",
    ),
    # Exploration.
    Spec("adcascade_explored_share", "gauge", "Share of the sessions of the last closed window that explored."),
    Spec("adcascade_explored_sessions_total", "counter", "Sessions that explored, each by the share of its positions."),
    Spec("adcascade_explore_budget", "gauge", "Sessions M_t of the coming window that may explore (aucbbp)."),
    Spec("adcascade_beta", "gauge", "Exploration in standard deviations."),
    # Learning.
    Spec("adcascade_episodes_closed_total", "counter", "Windows closed that had sessions."),
    Spec("adcascade_episode_sessions_total", "counter", "Sessions of the windows closed."),
    Spec(
        "adcascade_rejected_folds_total", "counter", "Windows whose fold gave no usable estimate; the old one stands."
    ),
    Spec("adcascade_late_records_total", "counter", "Journal records that came for windows already closed."),
    Spec("adcascade_frozen", "gauge", "1 while learning is frozen by command."),
    Spec("adcascade_parameters_version", "gauge", "Newest version of the parameters."),
    Spec("adcascade_parameters_timestamp_seconds", "gauge", "When the newest version was made, in the stream's time."),
    Spec(
        "adcascade_parameters_effective_timestamp_seconds",
        "gauge",
        "From which arrivals on the newest version serves, in the stream's time.",
    ),
    Spec("adcascade_parameters_observations", "gauge", "Answered displays that the newest version rests on."),
    Spec("adcascade_parameter_norm", "gauge", "Euclidean norm of the estimate."),
    Spec(
        "adcascade_smallest_eigenvalue",
        "gauge",
        "Smallest eigenvalue of the precision: how much is known in the direction least known.",
    ),
    Spec("adcascade_watermark_timestamp_seconds", "gauge", "Time up to which all partitions are processed."),
    # Traffic, and the left and right sides of its accounts.
    Spec("adcascade_arrivals_total", "counter", "Arrival records read."),
    Spec(
        "adcascade_arrivals_classified_total",
        "counter",
        "What became of arrival records; the classes add up to all that were read.",
        {"class": ("opened", "repeated", "dead")},
    ),
    Spec("adcascade_open_sessions", "gauge", "Sessions in the table, ended ones that are still remembered among them."),
    Spec("adcascade_sessions_ended_total", "counter", "Sessions deleted from the table.", {"how": ENDINGS}),
    Spec("adcascade_sessions_recovered_total", "counter", "Sessions taken over with a partition or after a restart."),
    Spec("adcascade_sessions_handed_over_total", "counter", "Sessions given away with a partition."),
    Spec("adcascade_feedback_received_total", "counter", "Feedback records read."),
    Spec(
        "adcascade_feedback_total",
        "counter",
        "What became of feedback records; with those parked they add up to all that were read and recovered.",
        {"class": ("applied", "redundant", "outside", "late", "dead")},
    ),
    Spec("adcascade_parked_records", "gauge", "Feedback records that wait for the arrival of their session."),
    Spec("adcascade_parked_recovered_total", "counter", "Parked records taken over."),
    Spec("adcascade_parked_handed_over_total", "counter", "Parked records given away."),
    Spec(
        "adcascade_accounting_imbalance",
        "gauge",
        "Left minus right side of the accounts when the tables were last counted; anything but 0 is a defect. "
        "arrivals = opened + repeated + dead; opened + recovered = ended + open + handed over; feedback + recovered "
        "parked = applied + redundant + late + outside + dead + parked + handed over parked.",
        {"identity": IDENTITIES},
    ),
    Spec(
        "adcascade_decisions_total",
        "counter",
        "Decisions sent, repeated ones among them.",
        {"mode": MODES, "position": POSITIONS},
    ),
    Spec("adcascade_clicks_total", "counter", "Sessions clicked, by the position.", {"position": POSITIONS}),
    Spec("adcascade_dead_letters_total", "counter", "Records that could not be used.", {"reason": DEAD_LETTER_REASONS}),
    # Speed.
    Spec("adcascade_decision_duration_seconds", "histogram", "Time in which the batch of a decision was handled."),
    Spec("adcascade_batch_records", "histogram", "Records handled at once."),
    Spec("adcascade_arrival_to_decision_seconds", "histogram", "From a session's arrival to its first decision."),
    Spec("adcascade_consumer_lag_records", "gauge", "Records not read yet.", {"topic": CONSUMED}),
    Spec(
        "adcascade_build_info",
        "gauge",
        "Always 1.",
        {"version": (__version__,), "python": (platform.python_version(),)},
    ),
)

DURATIONS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
LAGS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

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
        self._horizon = 1
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

    def version(self, parameters: Parameters) -> None:
        """Take note that a version was published."""
        with self._lock:
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

    def simulated(self, *, oracle: float, served: float, sessions: int) -> None:
        """Take note of what a closed window was worth under the true model: of the best slates and of those served."""
        with self._lock:
            sums = self._simulated = self._simulated or dict.fromkeys(("oracle", "served", "regret", "windows"), 0.0)
            sums["oracle"] += oracle
            sums["served"] += served
            sums["regret"] += max(0.0, oracle - served)
            sums["windows"] += 1
            self._gauges["pseudo_regret_per_session"] = (oracle - served) / sessions if sessions else 0.0

    def decided(self, seconds: float) -> None:
        """Take note of how long a session waited for its first decision."""
        with self._lock:
            self._delays.observe(seconds)

    def watermark(self, time: int) -> None:
        """Take note that everything up to a time (milliseconds) is processed."""
        self._gauges["watermark_timestamp_seconds"] = time / 1000

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
