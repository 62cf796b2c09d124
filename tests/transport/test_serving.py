"""Published versions that contradict each other, and what partitions do with times, settings and metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from faust.types import TP

from tests.embedded.traffic import ARMS, START, arrivals, settings
from tests.transport.fake import settle
from worker.errors import FailedError, InputError
from worker.kafka.connection import Connection
from worker.kafka.parameters import PublishedParameters, with_dimension
from worker.kafka.partitions import Partitions
from worker.kafka.polls import Poll, RecordList
from worker.kafka.settings import WorkerSettings
from worker.kafka.worker import warn
from worker.metrics import Metrics
from worker.metrics.catalogue import STAGES
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, continued
from worker.stream.topology import Emits, Record, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, RoundedError

ZERO = Parameters.first(settings(), ARMS)
TOPICS = Topics("t")


def version(number: int, **changes: object) -> Parameters:
    return replace(ZERO, version=number, journal_offset=number, **changes)  # type: ignore[arg-type]


def other(parameters: Parameters) -> Parameters:
    return replace(parameters, arms=(*parameters.arms[:-1], Arm(arm="other", reward=1.0)))


def on_topic(*versions: Parameters) -> list[Record]:
    return [Record("t.parameters", 0, offset, 0, b"0", encode_parameters(one)) for offset, one in enumerate(versions)]


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"adcascade_{name}", labels) or 0.0


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_published_version_replaces_the_configured_one() -> None:
    metrics = Metrics()
    published = PublishedParameters(other(ZERO), [], metrics)
    assert (published.version, published.history) == (-1, ())
    published.handle(on_topic(ZERO))
    assert published.version == 0
    assert published.versions.history == (ZERO,)
    published.handle(on_topic(ZERO, version(1)))
    assert (published.version, published.versions.newest.version) == (1, 1)
    assert counted(metrics, "refused_versions_total") == 0
    with pytest.raises(FailedError, match="two learners disagree"):
        published.wants(other(ZERO))  # it must not publish its own over it
    started = PublishedParameters(other(ZERO), [ZERO, version(1)], Metrics())
    assert [one.version for one in started.versions.history] == [0, 1], "and those of a start"


def test_a_start_logs_and_passes_on_the_newest_version_and_nothing_that_the_topic_has_of_the_past(caplog) -> None:
    caplog.set_level("INFO")
    old = [version(number) for number in range(20)]
    published, seen = PublishedParameters(ZERO, old[12:], Metrics()), list[int]()
    published.watch(lambda parameters: seen.append(parameters.version))
    caplog.clear()
    published.handle(on_topic(*old))
    assert seen == [19]
    assert "received" not in caplog.text
    published.handle(on_topic(version(20)))
    assert seen == [19, 20]
    assert "version 20" in caplog.text


def test_a_version_that_differs_by_rounding_is_the_same_version(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [ZERO, version(1)], metrics)
    rounded = replace(version(1), radius=version(1).radius + 1e-12)
    assert rounded.sha256 != version(1).sha256
    published.handle(on_topic(rounded, version(2)))
    assert counted(metrics, "rounded_versions_total") == 1
    assert counted(metrics, "refused_versions_total") == 0
    assert [one.sha256 for one in published.versions.history] == [one.sha256 for one in (ZERO, version(1), version(2))]
    with pytest.raises(RoundedError):
        published.wants(rounded)
    assert counted(metrics, "refused_versions_total") == 0


def test_the_last_eight_versions_are_kept_from_their_newest_position() -> None:
    published = PublishedParameters(ZERO, [], Metrics())
    published.handle(on_topic(*(version(number) for number in range(12))))
    again = version(11, frozen=False)
    published.handle(on_topic(replace(again, journal_offset=99), replace(again, journal_offset=50)))
    assert [one.version for one in published.history] == list(range(12 - KEPT, 12))
    assert published.history[-1].journal_offset == 99
    assert published.versions.newest.version == 11


def test_a_version_is_wanted_if_it_is_new_or_the_newest_from_a_newer_position() -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [version(3)], metrics)
    assert published.wants(version(4))
    assert not published.wants(version(3))
    assert published.wants(replace(version(3), journal_offset=70))
    assert not published.wants(version(2))
    with pytest.raises(FailedError, match="two learners disagree"):
        published.wants(other(version(3)))
    assert counted(metrics, "refused_versions_total") == 1


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class PartitionBench:
    """One partition with metrics of its own."""

    def __init__(self, now: int = START) -> None:
        self.now = now
        self.metrics = Metrics()
        published = PublishedParameters(ZERO, [ZERO], self.metrics)
        clocks = {"clock": lambda: self.now, "steady": lambda: 0}
        self.partitions = Partitions(published, TOPICS, self.metrics, know_versions=settle, limits=Limits(), **clocks)
        self.serving = self.partitions.make_serving(0)

    def handle(self, records: Sequence[Record]) -> Emits:
        return self.partitions.serve([(self.serving, records)])[0]

    def records(self, count: int, timestamp: int) -> list[Record]:
        sent = arrivals(count, seconds=1)
        return [
            Record(TOPICS.arrivals, 0, offset, timestamp, one.session.encode(), one.value)
            for offset, one in enumerate(sent)
        ]


def test_a_record_without_a_time_is_dated_by_the_clock() -> None:
    bench = PartitionBench(now=START + 1000)
    emits = bench.handle(bench.records(3, timestamp=-1))
    assert (len(emits.decisions), len(emits.dead_letters)) == (3, 0)
    late = PartitionBench(now=START - 3_600_000)
    emits = late.handle(late.records(3, timestamp=-1))
    assert {dict(letter.headers)["adcascade.reason"] for letter in emits.dead_letters} == {b"future"}


@pytest.mark.parametrize("confirmed", [True, False])
def test_the_timestamp_of_a_client_cannot_make_the_future_the_present(confirmed: bool) -> None:
    bench = PartitionBench(now=START)
    records = bench.records(2, timestamp=START)
    if confirmed:
        bench.handle(records[1:])
    far = START + (3_600_000 if confirmed else 74 * 365 * 86_400_000)
    value = orjson.dumps(orjson.loads(records[0].value or b"") | {"occurred_at": far})
    emits = bench.handle([records[0]._replace(timestamp=far, value=value), records[1]._replace(timestamp=far)])
    (letter,) = emits.dead_letters
    assert dict(letter.headers)["adcascade.reason"] == b"future"
    assert letter.value == value
    assert len(emits.journal) == 1, "a wrong timestamp alone does no harm"


def test_what_was_written_long_ago_is_read_whenever_the_worker_starts() -> None:
    bench = PartitionBench(now=START + 86_400_000)
    emits = bench.handle(bench.records(2, timestamp=START) + bench.records(3, timestamp=-1)[2:])
    assert (len(emits.decisions), len(emits.dead_letters)) == (3, 0)
    written_now = bench.handle(bench.records(3, timestamp=bench.now))
    assert {dict(letter.headers)["adcascade.reason"] for letter in written_now.dead_letters} == {b"past"}


def test_the_time_from_arrival_to_decision_is_measured_for_every_arrival() -> None:
    bench = PartitionBench(now=START + 40)
    bench.handle(bench.records(7, timestamp=START))
    assert counted(bench.metrics, "arrival_to_decision_seconds_count") == 7
    assert counted(bench.metrics, "arrival_to_decision_seconds_bucket", le="0.025") == 0
    assert counted(bench.metrics, "arrival_to_decision_seconds_bucket", le="0.05") == 7


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_dimension_comes_from_the_option_or_from_the_published_parameters() -> None:
    assert with_dimension(settings(), 5, []).dim == 5
    assert with_dimension(settings(), None, [ZERO]).dim == ZERO.settings.dim
    with pytest.raises(InputError, match="--dim is missing"):
        with_dimension(settings(), None, [])
    with pytest.raises(InputError, match="--dim is 9, but the published parameters have 3"):
        with_dimension(settings(), 9, [ZERO])


def configuration(learning: LearningSettings) -> WorkerSettings:
    connection = Connection(servers=("127.0.0.1:1",))
    return WorkerSettings(connection=connection, topics=TOPICS, learner=("true",), learning=learning, arms=ARMS)


def test_settings_that_differ_from_the_published_ones_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    configured = configuration(settings())
    warn(configured, settings(), [replace(ZERO, settings=settings(window=20_000, policy="greedy"))])
    assert "policy, window" in caplog.text
    for given, published in ((True, True), (True, False)):
        caplog.clear()
        learning, zero = settings(standardise=given), replace(ZERO, settings=settings(standardise=published))
        configured = configuration(learning)
        warn(configured, continued(learning, zero.settings), [zero])
        expected = [] if given == published else ["standardise is on here and off in the published parameters"]
        assert [record.getMessage().partition(", which")[0] for record in caplog.records] == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "additive"}, "version 1 has model additive, version 0 has personal"),
        ({"dim": 7}, "version 1 has dim 7, version 0 has 3"),
        ({"standardise": True}, "version 1 has standardise True, version 0 has False"),
    ],
    ids=str,
)
def test_a_version_of_another_model_is_refused_with_one_line_and_serving_goes_on(
    change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [ZERO], metrics)
    other = replace(Parameters.first(settings(**change), ARMS), version=1)
    published.handle([Record(TOPICS.parameters, 0, 5, START, b"1", encode_parameters(other))])
    assert published.versions.newest == ZERO
    assert published.version == 0
    refusals = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text in refusal for refusal in refusals] == [True]
    assert counted(metrics, "refused_versions_total") == 1


def test_every_stage_of_a_poll_is_measured() -> None:
    bench = PartitionBench()
    lists = [
        RecordList(TP(TOPICS.arrivals, 0), 2, bench.records(2, timestamp=START)),
        RecordList(TP(TOPICS.clicks, 0), 5, []),  # a position that moved on without a record
    ]
    bench.partitions.measure(Poll(1, 0, lists, 10.0), 10.5, 11.0, [0.25, 0.5])
    counts = {stage: counted(bench.metrics, "stage_seconds_count", stage=stage) for stage in STAGES}
    assert counts == {"fetch": 1, "queue": 1, "handle": 1, "write": 2}
    assert counted(bench.metrics, "stage_seconds_sum", stage="queue") == 0.5
