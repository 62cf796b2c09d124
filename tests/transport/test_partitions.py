"""Polls in, results out, rebalances between: the partitions of a worker, with sessions that echo."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import create_autospec

import orjson
import pytest
from faust.types import TP

from tests.embedded.traffic import START, arrivals
from tests.transport.fake import ZERO, FakeWorker, new_partitions, settle
from tests.transport.memory import Cluster
from worker.errors import FailedError
from worker.kafka import partitions as module
from worker.kafka.parameters import PublishedParameters
from worker.kafka.partitions import Partitions
from worker.kafka.polls import Poll, RecordList
from worker.metrics.catalogue import STAGES
from worker.metrics.observer import Metrics
from worker.runtime.settings import ProcessSettings
from worker.stream.serving import Serving
from worker.stream.topology import Emits, Record, Tally, Topics

TOPICS = Topics("t")
ARRIVALS, CLICKS = TP(TOPICS.arrivals, 0), TP(TOPICS.clicks, 0)
OUTPUTS = {TOPICS.journal, TOPICS.changelog, TOPICS.decisions}


def echo() -> Any:
    """Return sessions of a partition that note what happens to them; `seen` has the records."""
    made = create_autospec(Serving, instance=True, has_due=True, seen=[])
    made.restore.return_value = made.hand_over.return_value = Tally()
    made.handle.return_value = Emits(changelog=[(b"over", None)])
    return made


class EchoPartitions(Partitions):
    """Emits one of everything per record, or raises."""

    def __init__(self, know_versions: Callable[[], Awaitable[None]], explosive: Callable[[Record], bool]) -> None:
        metrics = Metrics()
        published = PublishedParameters(ZERO, [ZERO], metrics)
        process = ProcessSettings(learner=(), learning=ZERO.settings)
        super().__init__(published, process, TOPICS, metrics, know_versions=know_versions)
        self.explosive = explosive
        self.made: list[Any] = []
        self.make_serving = self._make_echo
        self.calls = 0

    def _make_echo(self, partition: int) -> Any:
        self.made.append(echo())
        return self.made[-1]

    def serve(self, work: Sequence[tuple[Any, Sequence[Record]]]) -> list[Emits]:
        self.calls += 1
        if any(self.explosive(record) for _, records in work for record in records):
            raise ZeroDivisionError("boom")
        return [self._echo(serving, records) for serving, records in work]

    def _echo(self, serving: Any, records: Sequence[Record]) -> Emits:
        emits = Emits()
        for record in records:
            name = b"%s@%d" % (record.topic.encode(), record.offset)
            serving.seen.append((record.topic, record.offset))
            emits.journal.append((name, b"fact"))
            emits.changelog.append((name, b"state"))
            emits.decisions.append((name, b"decision"))
        return emits


class Bench:
    """Partition 0 and its worker; versions are known at once, unless a test says otherwise."""

    def __init__(self, explosive: Callable[[Record], bool] = lambda record: False) -> None:
        self.kafka = Cluster.with_topics(TOPICS, 2)
        self.versions_known = asyncio.Event()
        self.versions_known.set()
        self.asked = 0
        self.partitions = EchoPartitions(self._know_versions, explosive)
        self.worker = FakeWorker(self.kafka, TOPICS, self.partitions)

    async def _know_versions(self) -> None:
        self.asked += 1
        await self.versions_known.wait()

    def send(self, count: int, tp: TP = ARRIVALS, value: bytes = b"v") -> None:
        for _ in range(count):
            self.kafka.append(*tp, b"k", value)

    async def opened(self) -> Bench:
        await self.worker.rebalance([0])
        return self

    @property
    def echo(self) -> Any:
        return self.partitions.made[-1]

    def pending_topics(self) -> list[str]:
        return [write.tp.topic for write in self.worker.pending]


async def test_arrivals_are_handled_before_clicks_and_all_partitions_in_one_call() -> None:
    bench = Bench()
    bench.send(2, CLICKS)
    bench.send(2)
    bench.send(1, TP(TOPICS.arrivals, 1))
    await bench.worker.rebalance([0, 1])
    await bench.worker.poll()
    first, second = bench.partitions.made
    assert first.seen == [(TOPICS.arrivals, 0), (TOPICS.arrivals, 1), (TOPICS.clicks, 0), (TOPICS.clicks, 1)]
    assert second.seen == [(TOPICS.arrivals, 0)]
    assert bench.partitions.calls == 1


async def test_decisions_are_written_together_with_their_facts_and_acknowledged_with_them() -> None:
    bench = await Bench().opened()
    bench.send(1)
    await bench.worker.poll()
    assert set(bench.pending_topics()) == OUTPUTS
    while len(bench.worker.pending) > 1:
        await bench.worker.persist(bench.worker.pending[-1])
        assert bench.worker.flights.acknowledged[ARRIVALS] == 0
    await bench.worker.persist_all()
    assert bench.worker.flights.acknowledged == {ARRIVALS: 1, CLICKS: 0}


async def test_the_next_poll_is_handled_while_results_of_the_last_are_being_written() -> None:
    bench = await Bench().opened()
    for _ in range(3):
        bench.send(1)
        await bench.worker.poll()
    assert len(bench.echo.seen) == 3
    assert bench.worker.flights.size == 3


async def test_no_poll_is_handled_while_too_much_is_in_flight() -> None:
    bench = await Bench().opened()
    bench.send(module.MOST_IN_FLIGHT + 1)
    await bench.worker.poll()
    bench.send(1)
    waiting = asyncio.create_task(bench.worker.poll())
    await settle()
    assert not waiting.done()
    await bench.worker.persist_all()
    await waiting
    assert len(bench.echo.seen) == module.MOST_IN_FLIGHT + 2


async def test_a_poll_of_an_earlier_generation_is_dropped() -> None:
    bench = await Bench().opened()
    bench.send(1)
    old = bench.worker.next_poll()
    assert old is not None
    await bench.worker.rebalance([0])
    await bench.partitions.handle(old)
    assert bench.echo.seen == []
    bench.versions_known.clear()  # as one that waits while the next rebalance begins
    await bench.worker.rebalance([0])
    waiting = asyncio.create_task(bench.worker.poll())
    await settle()
    bench.worker.generation += 1
    bench.versions_known.set()
    await waiting
    assert bench.echo.seen == []
    await bench.worker.rebalance([0])
    await bench.worker.poll()
    assert bench.echo.seen == [(TOPICS.arrivals, 0)]


async def test_a_lost_poll_is_a_failure() -> None:
    bench = await Bench().opened()
    bench.send(1)
    assert bench.worker.next_poll() is not None
    bench.send(1)
    with pytest.raises(FailedError, match="poll 1 came, but 0 was next"):
        await bench.worker.poll()


async def test_versions_are_read_to_their_end_in_every_rebalance_before_anything_is_served() -> None:
    bench = Bench()
    bench.versions_known.clear()
    await bench.worker.rebalance([0])
    bench.send(1)
    waiting = asyncio.create_task(bench.worker.poll())
    await settle()
    assert (bench.asked, bench.echo.seen) == (1, [])
    bench.versions_known.set()
    await waiting
    assert len(bench.echo.seen) == 1
    await bench.worker.rebalance([0])
    await settle()
    assert bench.asked == 2


async def test_a_partition_taken_over_knows_which_arrivals_may_have_been_answered() -> None:
    bench = Bench()
    bench.send(5)
    bench.kafka.committed[ARRIVALS] = 2
    await bench.worker.rebalance([0])
    bench.send(3)
    await bench.worker.poll()
    bench.echo.take_over.assert_called_once_with(2, 5)


async def test_a_bad_record_that_serving_did_not_expect_costs_one_dead_letter() -> None:
    bench = await Bench(lambda record: record.offset == 1).opened()
    bench.send(3)
    await bench.worker.poll()
    assert bench.echo.seen == [(TOPICS.arrivals, 0), (TOPICS.arrivals, 2)]
    assert bench.pending_topics().count(TOPICS.dead_letters) == 1
    await bench.worker.persist_all()
    assert bench.worker.flights.acknowledged[ARRIVALS] == 3
    large = await Bench(lambda record: record.offset == 0).opened()
    large.send(1, value=bytes(5 * module.LETTER_BYTES))
    await large.worker.poll()
    assert large.worker.flights.size == 1 + 5, "a large one counts as several records in flight"


async def test_serving_that_always_raises_is_a_failure_and_make_no_dead_letters() -> None:
    bench = await Bench(lambda record: True).opened()
    bench.send(3)
    with pytest.raises(FailedError, match="serving failed on every one of 3 records"):
        await bench.worker.poll()
    assert bench.worker.pending == []


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        pytest.param("nothing", True, id="nothing happened"),
        pytest.param("undrained", False, id="something was still in flight"),
        pytest.param("written", False, id="another worker has written to its changelog"),
    ],
)
async def test_sessions_stay_in_memory_if_all_was_durable_and_nobody_else_changed_them(
    changed: str, kept: bool
) -> None:
    bench = await Bench().opened()
    bench.send(1)
    await bench.worker.poll()
    if changed != "undrained":
        await bench.worker.persist_all()
    if changed == "written":
        bench.kafka.append(TOPICS.changelog, 0, b"k", b"state")
    before = bench.echo
    await bench.worker.rebalance([0])
    assert (bench.echo is before) is kept
    assert before.hand_over.called is not kept
    await bench.worker.rebalance([1])  # and 0 to another worker
    assert all(echo.hand_over.called for echo in bench.partitions.made[:-1])
    assert set(bench.partitions.servings) == {1}


async def test_sessions_that_are_over_are_deleted_when_progress_is_acknowledged() -> None:
    bench = await Bench().opened()
    bench.partitions.acknowledge(0, 77)
    bench.echo.acknowledged.assert_called_once_with(77)
    assert bench.partitions.progress == {0: 77}
    assert [(write.tp.topic, write.value) for write in bench.worker.pending] == [(TOPICS.changelog, None)]
    bench.partitions.acknowledge(5, 77)  # revoked meanwhile


# ── times and metrics, with real sessions ────────────────────────────────────────────────────────────────────────────


class PartitionBench:
    """One partition with metrics of its own."""

    def __init__(self, now: int = START) -> None:
        self.now = now
        self.metrics = Metrics()
        self.partitions = new_partitions(TOPICS, self.metrics, clock=lambda: self.now, steady=lambda: 0)
        self.serving = self.partitions.make_serving(0)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"adcascade_{name}", labels) or 0.0

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
    assert bench.counted("arrival_to_decision_seconds_count") == 7
    assert bench.counted("arrival_to_decision_seconds_bucket", le="0.025") == 0
    assert bench.counted("arrival_to_decision_seconds_bucket", le="0.05") == 7


def test_every_stage_of_a_poll_is_measured() -> None:
    bench = PartitionBench()
    lists = [
        RecordList(TP(TOPICS.arrivals, 0), 2, bench.records(2, timestamp=START)),
        RecordList(TP(TOPICS.clicks, 0), 5, []),  # a position that moved on without a record
    ]
    bench.partitions.measure(Poll(1, 0, lists, 10.0), 10.5, 11.0, [0.25, 0.5])
    counts = {stage: bench.counted("stage_seconds_count", stage=stage) for stage in STAGES}
    assert counts == {"fetch": 1, "queue": 1, "handle": 1, "write": 2}
    assert bench.counted("stage_seconds_sum", stage="queue") == 0.5
