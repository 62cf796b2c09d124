"""The processors behind the ports: times, accounts, versions that contradict each other. No broker needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tests.embedded.traffic import ARMS, START, arrivals, settings
from worker.errors import FailedError, InputError
from worker.kafka.connection import Connection
from worker.kafka.control import newest_of
from worker.kafka.faust.app import Options
from worker.kafka.learning import fitting
from worker.kafka.processors import JournalFold, Partition, Published, clock_of, publication, step
from worker.kafka.worker import Processors, WorkerSettings, warn
from worker.metrics import Metrics
from worker.stream.learner import Learner
from worker.stream.parameters import Arm, Parameters, encode_parameters
from worker.stream.serving import Serving
from worker.stream.topology import Record, Topics
from worker.stream.versions import KEPT

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


def test_the_configured_version_serves_until_something_is_published() -> None:
    published = Published(ZERO, [], Metrics())
    assert (published.version, published.history) == (-1, ())
    assert published.versions.newest == ZERO
    published.handle(on_topic(ZERO, version(1)))
    assert (published.version, published.versions.newest.version) == (1, 1)


def test_what_is_published_serves_whatever_is_configured() -> None:
    metrics = Metrics()
    published = Published(other(ZERO), [ZERO, version(1)], metrics)
    published.handle(on_topic(ZERO, version(1), version(2)))
    assert [one.version for one in published.versions.history] == [0, 1, 2]
    assert counted(metrics, "refused_versions_total") == 0


def test_a_version_with_another_content_is_refused_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    published = Published(ZERO, [ZERO, version(1)], metrics)
    published.handle(on_topic(other(version(1)), version(2)))
    assert counted(metrics, "refused_versions_total") == 1
    assert "two learners disagree" in caplog.text
    assert [one.sha256 for one in published.history] == [one.sha256 for one in (ZERO, version(1), version(2))]
    assert counted(metrics, "parameters_version") == 2


def test_records_that_are_no_parameters_are_refused_and_tombstones_ignored() -> None:
    metrics = Metrics()
    published = Published(ZERO, [], metrics)
    published.handle([Record("t.parameters", 0, offset, 0, b"0", value) for offset, value in enumerate((None, b"{"))])
    assert counted(metrics, "refused_versions_total") == 1
    assert published.version == -1


def test_what_others_published_is_known_to_the_learner_also_where_another_version_0_was_served() -> None:
    published = Published(other(ZERO), [], Metrics())
    published.handle(on_topic(ZERO))
    assert published.version == 0
    assert published.history[0].sha256 == ZERO.sha256
    assert not published.wants(publication(ZERO)), "it must not publish its own over it"


def test_the_last_eight_versions_are_kept_from_their_newest_position() -> None:
    published = Published(ZERO, [], Metrics())
    published.handle(on_topic(*(version(number) for number in range(12))))
    again = version(11, frozen=False)
    published.handle(on_topic(replace(again, journal_offset=99), replace(again, journal_offset=50)))
    assert [one.version for one in published.history] == list(range(12 - KEPT, 12))
    assert published.history[-1].journal_offset == 99
    assert published.versions.newest.version == 11


def test_a_version_is_wanted_if_it_is_new_or_the_newest_from_a_newer_position() -> None:
    metrics = Metrics()
    published = Published(ZERO, [version(3)], metrics)
    assert published.wants(publication(version(4)))
    assert not published.wants(publication(version(3)))
    assert published.wants(publication(replace(version(3), journal_offset=70)))
    assert not published.wants(publication(version(2)))
    with pytest.raises(FailedError, match="two learners disagree"):
        published.wants(publication(other(version(3))))
    assert counted(metrics, "refused_versions_total") == 1


def test_control_takes_the_first_content_and_the_newest_position_of_a_version() -> None:
    newest = newest_of([version(1), other(version(1)), replace(version(1), journal_offset=9), version(0)])
    assert [(one.version, one.journal_offset, one.sha256) for one in newest] == [
        (0, 0, version(0).sha256),
        (1, 9, version(1).sha256),
    ]


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Desk:
    """A partition, its metrics, and what was released."""

    def __init__(self, now: int = START) -> None:
        self.now = now
        self.metrics = Metrics()
        self.released: list[Partition] = []
        published = Published(ZERO, [ZERO], self.metrics)
        self.partition = Partition(
            Serving(published.versions, topics=TOPICS),
            arrivals=TOPICS.arrivals,
            clock=lambda: self.now,
            metrics=self.metrics,
            released=self.released.append,
        )

    def records(self, count: int, timestamp: int) -> list[Record]:
        sent = arrivals(count, seconds=1)
        return [
            Record(TOPICS.arrivals, 0, offset, timestamp, one.session.encode(), one.value)
            for offset, one in enumerate(sent)
        ]


def test_a_record_without_a_time_is_dated_by_the_clock() -> None:
    desk = Desk(now=START + 1000)
    emits = desk.partition.handle(desk.records(3, timestamp=-1))
    assert (len(emits.decisions), len(emits.dead_letters)) == (3, 0)
    late = Desk(now=START - 3_600_000)
    emits = late.partition.handle(late.records(3, timestamp=-1))
    assert {dict(letter.headers)["adcascade.reason"] for letter in emits.dead_letters} == {b"future"}


def test_sessions_given_away_and_taken_over_balance() -> None:
    desk = Desk()
    changelog = desk.partition.handle(desk.records(5, timestamp=START)).changelog
    desk.partition.release()
    assert desk.released == [desk.partition]
    assert counted(desk.metrics, "sessions_handed_over_total") == 5
    assert counted(desk.metrics, "open_sessions") == 0
    heir = Desk()
    heir.partition.restore((key, value) for key, value in changelog if value is not None)
    assert counted(heir.metrics, "sessions_recovered_total") == 5
    assert not any(heir.metrics.census(open_sessions=heir.partition.serving.open_sessions, parked=0).values())


def test_a_silent_partition_forgets_what_has_ended_and_counts_no_batch() -> None:
    desk = Desk()
    desk.partition.handle(desk.records(2, timestamp=START))
    assert desk.partition.handle([]).changelog == []
    desk.partition.acknowledged(START + 3_600_000)
    assert [value for _, value in desk.partition.handle([]).changelog] == [None, None]
    assert counted(desk.metrics, "open_sessions") == 0
    assert counted(desk.metrics, "batch_records_count") == 1


def test_the_time_from_arrival_to_decision_is_measured_for_every_arrival() -> None:
    desk = Desk(now=START + 40)
    desk.partition.handle(desk.records(7, timestamp=START))
    assert counted(desk.metrics, "arrival_to_decision_seconds_count") == 7
    assert counted(desk.metrics, "arrival_to_decision_seconds_bucket", le="0.025") == 0
    assert counted(desk.metrics, "arrival_to_decision_seconds_bucket", le="0.05") == 7


def test_partitions_that_step_together_do_what_each_does_alone() -> None:
    together, alone = [Desk() for _ in range(3)], [Desk() for _ in range(3)]
    sizes = (5, 0, 70)  # none: a position that moved on without a record
    work = [(desk.partition, desk.records(size, timestamp=START)) for desk, size in zip(together, sizes, strict=True)]
    emitted = step(work)
    for desk, size, emits in zip(alone, sizes, emitted, strict=True):
        wanted = desk.partition.handle(desk.records(size, timestamp=START))
        assert (emits.journal, emits.changelog, emits.decisions) == (wanted.journal, wanted.changelog, wanted.decisions)
        assert len(emits.decisions) == size
    assert [counted(desk.metrics, "arrivals_total") for desk in together] == list(sizes)


# ── learning and settings ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_learner_gives_bytes_with_the_keys_of_the_contract() -> None:
    fold = JournalFold(Learner(settings(), ARMS))
    (first,) = fold.begin().parameters
    assert (first.version, first.key) == (0, b"0")
    order = orjson.dumps({"kind": "arm", "arm": "new", "reward": 1.0, "active": True})
    lessons = fold.handle([Record("t.journal", 0, offset, 0, None, order) for offset in range(3)])
    assert [one.version for one in lessons.parameters] == [1], "what changes nothing makes no version"
    with pytest.raises(FailedError, match="not the journal"):
        JournalFold(Learner(settings(), ARMS, [version(5)])).check_start(0, 2)


def worker_settings(**changes: object) -> WorkerSettings:
    transport = Options(connection=Connection(servers=("127.0.0.1:1",)), learner=("true",))
    return WorkerSettings(transport=transport, learning=settings(), arms=ARMS, **changes)  # type: ignore[arg-type]


def test_the_dimension_comes_from_the_option_or_from_what_is_published() -> None:
    assert fitting(settings(), 5, []).dim == 5
    assert fitting(settings(), None, [ZERO]).dim == ZERO.settings.dim
    with pytest.raises(InputError, match="--dim is missing"):
        fitting(settings(), None, [])
    with pytest.raises(InputError, match="--dim is 9, but the published parameters have 3"):
        fitting(settings(), 9, [ZERO])


def test_settings_that_differ_from_the_published_ones_are_told(caplog: pytest.LogCaptureFixture) -> None:
    warn(worker_settings(), settings(), [replace(ZERO, settings=settings(window=20_000, policy="greedy"))])
    assert "policy, window" in caplog.text


def test_a_worker_knows_its_partitions_until_they_are_released() -> None:
    metrics = Metrics()
    processors = Processors(worker_settings(), settings(), [ZERO], metrics)
    ports = processors.ports()
    task = ports.serve(2, 4)
    task.handle(Desk().records(0, timestamp=START))
    processors.census()
    task.release()
    processors.census()
    assert counted(metrics, "accounting_imbalance", identity="sessions") == 0
    assert orjson.loads(ports.progress(2, 4, 77)[1]) == {
        "kind": "progress",
        "partition": 2,
        "partitions": 4,
        "time": 77,
    }


def test_the_clock_of_a_test_stands_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("1234")
    assert clock_of(str(file))() == 1234
    assert clock_of(None)() > 1_700_000_000_000
