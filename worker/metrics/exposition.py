"""The series for Prometheus, made from a snapshot, and the balances that must hold in it (docs/design.md §7)."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker import __version__
from worker.metrics.catalogue import CATALOGUE, MOST_ADS, MOST_POSITIONS, POSITIONS, MetricSpec
from worker.metrics.history import Histogram, Snapshot
from worker.stream.accounts import ROWS
from worker.stream.events import DEAD_LETTER_REASONS, MODES
from worker.stream.lift import GROUPS, OUTCOMES, Lift
from worker.stream.parameters import Parameters
from worker.stream.session import ENDINGS
from worker.stream.topology import Tally
from worker.stream.troubles import TROUBLES

Series: TypeAlias = Mapping[tuple[str, ...], float]  # values by those of the labels


# ── balances ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_sessions(tally: Tally) -> int:
    """Return how many sessions the table holds by the balances."""
    return tally.opened + tally.recovered - tally.ended.total() - tally.handed_over


def parked_records(tally: Tally) -> int:
    """Return how many feedback records wait for their arrival by the balances."""
    settled = tally.applied + tally.redundant + tally.late + tally.outside + tally.unknown + tally.unparked
    settled += tally.dead_feedback + tally.handed_over_parked
    return tally.feedback + tally.recovered_parked - settled


def imbalances(tally: Tally, sessions: int, parked: int) -> dict[str, int]:
    """Return the left minus the right side of each identity, given the sessions and parked records in the tables."""
    return {
        "arrivals": tally.arrivals - tally.opened - tally.repeated - tally.unremembered - tally.dead_arrivals,
        "sessions": open_sessions(tally) - sessions,
        "feedback": parked_records(tally) - parked,
    }


# ── series ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield every metric of the catalogue, in its order; one without data has no series."""
    series: dict[str, Series] = {name: {(): value} for name, value in snapshot.numbers.items()}
    series |= _labelled(snapshot)
    for spec in CATALOGUE:
        name = spec.name.removeprefix("adcascade_")
        yield family(spec, snapshot.now.histograms[name] if spec.kind == "histogram" else series.get(name, {}))


def family(spec: MetricSpec, series: Mapping[tuple[str, ...], float | Histogram]) -> Metric:
    """Return a metric with its series, by the values of its labels."""
    kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}[spec.kind]
    made: Any = kind(spec.name, spec.help, labels=list(spec.labels))
    for labels, value in series.items():
        if isinstance(value, Histogram):
            made.add_metric(list(labels), value.buckets(), value.sum)
        else:
            made.add_metric(list(labels), float(value))
    return cast(Metric, made)


def _labelled(snapshot: Snapshot) -> dict[str, Series]:
    active = {trouble.name for trouble in snapshot.troubles}
    positions = POSITIONS[: snapshot.horizon] if snapshot.horizon <= MOST_POSITIONS else POSITIONS
    return _counted(snapshot.now.tally, positions) | {
        **({} if snapshot.parameters is None else _of_ads(snapshot.parameters)),
        **({} if snapshot.parameters is None else _of_lift(snapshot.parameters.lift)),
        "regret_time_averaged": _time_averaged(snapshot),
        "accounting_imbalance": {(name,): value for name, value in snapshot.imbalance.items()},
        "consumer_lag_records": {(topic,): value for topic, value in snapshot.lag.items()},
        "troubles_total": {(name,): total for name, total in snapshot.trouble_totals.items()},
        "trouble": {(name, TROUBLES[name].level): name in active for name in snapshot.trouble_totals},
        "calibration_ratio": _calibration_ratio(snapshot),
        **{name: {(of,): number for of, number in numbers.items()} for name, numbers in snapshot.predicted.items()},
        "build_info": {(__version__, platform.python_version()): 1.0},
    }


def _counted(tally: Tally, positions: tuple[str, ...]) -> dict[str, Series]:
    by_mode = {
        mode: {position: count for (how, position), count in tally.decisions.items() if how == mode} for mode in MODES
    }
    return {
        "reward_total": {(): tally.reward},
        "expected_reward_total": {(): tally.expected_reward},
        "arrivals_total": {(): tally.arrivals},
        "arrivals_classified_total": _each(
            opened=tally.opened, repeated=tally.repeated, unremembered=tally.unremembered, dead=tally.dead_arrivals
        ),
        "unlisted_values_total": {(): tally.unlisted.features.total()},
        "open_sessions": {(): open_sessions(tally)},
        "sessions_ended_total": {(how,): tally.ended[how] for how in ENDINGS},
        "sessions_recovered_total": {(): tally.recovered},
        "sessions_handed_over_total": {(): tally.handed_over},
        "feedback_received_total": {(): tally.feedback},
        "feedback_total": _each(
            applied=tally.applied,
            redundant=tally.redundant,
            outside=tally.outside,
            late=tally.late,
            unknown=tally.unknown,
            unremembered=tally.unparked,
            dead=tally.dead_feedback,
        ),
        "parked_records": {(): parked_records(tally)},
        "parked_recovered_total": {(): tally.recovered_parked},
        "parked_handed_over_total": {(): tally.handed_over_parked},
        "replanned_sessions_total": {(): tally.replanned},
        "decisions_total": {
            (mode, position): value
            for mode, counts in by_mode.items()
            for position, value in _by_position(counts, positions).items()
        },
        "clicks_total": {(label,): value for label, value in _by_position(tally.clicks, positions).items()},
        "dead_letters_total": {(reason,): tally.dead[reason] for reason in DEAD_LETTER_REASONS},
    }


def _of_ads(parameters: Parameters) -> dict[str, Series]:
    """Return the sums of the ads with the highest revenue."""
    sums = dict(zip(ROWS, parameters.accounts.total.of(len(parameters.arms)), strict=True))
    shown = np.argsort(-sums["revenue"], kind="stable")[:MOST_ADS].tolist()
    return {f"ad_{name}_total": {(parameters.arms[k].arm,): row[k] for k in shown} for name, row in sums.items()}


def _of_lift(lift: Lift | None) -> dict[str, Series]:
    """Return the comparison with the control group, as far as it is known."""
    if lift is None:
        return {}
    found = {outcome: known for outcome in OUTCOMES if (known := lift.compare(outcome)) is not None}
    return {
        "lift": {
            (outcome, bound): value
            for outcome, known in found.items()
            for bound, value in ({} if known.relative is None else known.relative._asdict()).items()
        },
        "lift_per_session": {
            (outcome, group): getattr(known, group) for outcome, known in found.items() for group in GROUPS
        },
        "lift_sessions": {(group,): sessions for group, sessions in zip(GROUPS, lift.groups[:, 0], strict=True)},
    }


def _time_averaged(snapshot: Snapshot) -> Series:
    numbers, windows = snapshot.numbers, max(1.0, snapshot.numbers["episodes_closed_total"])
    averages = {kind: numbers[f"regret_{kind}_total"] / windows for kind in ("bound", "posterior")}
    if snapshot.is_simulated:
        averages = {"pseudo": numbers["pseudo_regret_total"] / windows, **averages}
    return _each(**averages)


def _calibration_ratio(snapshot: Snapshot) -> Series:
    ratio = None if snapshot.parameters is None else snapshot.parameters.calibration.ratio
    return {} if ratio is None else _each(**ratio._asdict())


def _each(**values: float) -> Series:
    return {(name,): value for name, value in values.items()}


def _by_position(counts: Mapping[int, int], positions: tuple[str, ...]) -> dict[str, int]:
    """Return counts by label; positions beyond `MOST_POSITIONS` share the last one."""
    numbers = dict.fromkeys(positions, 0)
    for position, count in counts.items():
        label = str(position) if position <= MOST_POSITIONS else POSITIONS[-1]
        numbers[label] = numbers.get(label, 0) + count
    return numbers
