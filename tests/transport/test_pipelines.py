"""Order of writing and of acknowledgement, rebalance and recovery, on the transport in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.fake import FakeTransport, in_loop, settle
from worker.errors import FailedError
from worker.kafka import pipelines as pipelines_module
from worker.kafka.pipelines import MEMBERSHIP_CHECK, PartitionPipelines
from worker.kafka.transport import RecordList
from worker.metrics.catalogue import STAGES
from worker.stream.topology import Emits, Record, Topics

TOPICS = Topics("t")
ARRIVALS, CLICKS = TopicPartition(TOPICS.arrivals, 0), TopicPartition(TOPICS.clicks, 0)
OUTPUTS = (TOPICS.journal, TOPICS.changelog, TOPICS.decisions)


class Echo:
    """A task that notes its records and emits one of everything per record."""

    def __init__(self, explosive: Callable[[Record], bool] = lambda record: False) -> None:
        self.seen: list[tuple[str, int]] = []
        self.progress: list[int] = []
        self.calls = 0
        self.released = False
        self.restored: list[dict[bytes, bytes]] = []
        self._explosive = explosive

    def restore(self, records: Iterable[Record]) -> None:
        self.restored.append({record.key: record.value for record in records if record.key and record.value})
        if b"bad" in self.restored[-1]:
            raise ZeroDivisionError("boom")

    def take_over(self, start: int, end: int) -> None:
        self.taken_over = start, end

    def handle(self, records: Sequence[Record]) -> Emits:
        self.calls += 1
        if any(self._explosive(record) for record in records):
            raise ZeroDivisionError("boom")
        emits = Emits()
        for record in records:
            name = b"%s@%d" % (record.topic.encode(), record.offset)
            self.seen.append((record.topic, record.offset))
            emits.journal.append((name, b"fact"))
            emits.changelog.append((name, b"state"))
            emits.decisions.append((name, b"decision"))
        return emits

    opened = None

    def acknowledged(self, progress_time: int) -> None:
        self.progress.append(progress_time)

    def release(self) -> None:
        self.released = True


class Bench:
    """The pipelines of partition 0 on a transport in memory."""

    def __init__(self, explosive: Callable[[Record], bool] = lambda record: False, limit: int = 10**9) -> None:
        self.kafka = FakeTransport(TOPICS)
        self.tasks: list[Echo] = []
        self.journal: list[bool] = []
        self.spent: list[tuple[str, float]] = []

        def make_task(partition: int) -> Echo:
            self.tasks.append(Echo(explosive))
            return self.tasks[-1]

        self.pipelines = PartitionPipelines(
            self.kafka,
            TOPICS,
            make_task=make_task,
            handle_together=lambda work: [task.handle(records) for task, records in work],
            assign_journal=self.journal.append,
            limit=limit,
            on_stages=self.spent.extend,
        )

    @classmethod
    async def opened(cls, **options: Any) -> Bench:
        bench = cls(**options)
        await bench.kafka.rebalance(bench.pipelines, [0])
        return bench

    @property
    def task(self) -> Echo:
        return self.tasks[-1]

    @property
    def seen(self) -> list[int]:
        return [offset for topic, offset in self.task.seen if topic == ARRIVALS.topic]

    async def take(self, start: int, end: int, tp: TopicPartition = ARRIVALS, generation: int = 1) -> None:
        records = [Record(tp.topic, 0, offset, 0, b"", b"") for offset in range(start, end)]
        await self.pipelines.take([RecordList(tp=tp, generation=generation, start=start, end=end, records=records)])


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=40))
@in_loop
async def test_every_record_is_handled_once_and_in_order_in_whatever_lists_it_comes(polls: list[Any]) -> None:
    bench = await Bench.opened()
    requests, reached = bench.kafka.reads_again, 0
    for start, size in polls:
        before = len(requests)
        await bench.take(start, start + size)
        if start > reached:
            assert requests[:1] and len(requests) <= before + 1
            assert requests[-1] == (ARRIVALS, reached)
        else:
            reached = max(reached, start + size)
    assert bench.seen == list(range(reached))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
@in_loop
async def test_nothing_is_acknowledged_before_all_before_it_in_whatever_order_batches_become_durable(
    sizes: list[int], chance: Any
) -> None:
    bench = await Bench.opened()
    start = 0
    for size in sizes:
        await bench.take(start, start + size)
        start += size
    while pending := bench.kafka.pending():
        await bench.kafka.persist(chance.choice(pending))
        durable = {
            topic: {record.key for tp, log in bench.kafka.durable.items() if tp.topic == topic for record in log}
            for topic in OUTPUTS
        }
        acknowledged = bench.pipelines.committable()[ARRIVALS]
        owed = {b"%s@%d" % (ARRIVALS.topic.encode(), offset) for offset in range(acknowledged)}
        assert all(owed <= keys for keys in durable.values()), "no offset before its outputs"
    assert bench.pipelines.committable()[ARRIVALS] == start
    assert bench.kafka.written(TOPICS.decisions) == bench.kafka.written(TOPICS.journal), "in the order of the input"


@in_loop
async def test_a_hole_is_requested_once_until_it_is_filled() -> None:
    bench = await Bench.opened()
    await bench.take(5, 8)
    await bench.take(8, 9)
    assert bench.kafka.reads_again == [(ARRIVALS, 0)]
    await bench.take(0, 7)
    await bench.take(9, 10)
    assert bench.kafka.reads_again == [(ARRIVALS, 0), (ARRIVALS, 7)]


@in_loop
async def test_records_deleted_by_retention_are_skipped() -> None:
    bench = await Bench.opened()
    await bench.take(5, 8)
    bench.pipelines.skip(ARRIVALS, 5)
    await bench.take(5, 8)
    await bench.kafka.persist_all()
    assert bench.seen == [5, 6, 7]
    assert bench.pipelines.committable()[ARRIVALS] == 8


@in_loop
async def test_a_list_of_another_generation_is_not_taken() -> None:
    bench = await Bench.opened()
    await bench.take(0, 3, generation=2)
    bench.pipelines.close()
    await bench.take(0, 3, generation=1)
    assert not bench.seen


@in_loop
async def test_nothing_is_read_before_outputs_and_parameters_are_known() -> None:
    bench = await Bench.opened()
    assert bench.pipelines.accepts(1)
    bench.kafka.can_write = False
    assert not bench.pipelines.accepts(1)
    bench.kafka.can_write, bench.pipelines._parameters_ready = True, lambda: False
    assert not bench.pipelines.accepts(1)


@in_loop
async def test_no_more_is_taken_than_may_be_in_flight() -> None:
    bench = await Bench.opened(limit=5)
    await bench.take(0, 5)
    waiting = asyncio.create_task(bench.take(5, 10))
    await settle()
    assert not waiting.done(), "handled, but the next has to wait"
    await bench.kafka.persist_all()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(bench.take(10, 15), 1)  # all of the limit is free again


@in_loop
async def test_there_is_room_while_this_is_a_member_and_no_more_than_the_limit_is_in_flight() -> None:
    bench = await Bench.opened(limit=5)
    await bench.take(0, 5)
    assert bench.pipelines.has_room
    records = [Record(ARRIVALS.topic, 0, 5, 0, b"", b"")]
    bench.pipelines.take_at_once([RecordList(tp=ARRIVALS, generation=1, start=5, end=6, records=records)])
    assert not bench.pipelines.has_room
    waiting = asyncio.create_task(bench.take(6, 7))
    await settle()
    assert bench.seen == [0, 1, 2, 3, 4, 5], "what comes after it waits until there is room"
    await bench.kafka.persist_all()
    await asyncio.wait_for(waiting, 1)
    assert bench.seen == [0, 1, 2, 3, 4, 5, 6]
    bench.kafka.is_member = False
    assert not bench.pipelines.has_room


@in_loop
async def test_decisions_are_written_together_with_their_facts() -> None:
    bench = await Bench.opened()
    await bench.take(0, 1)
    assert {batch.tp.topic for batch in bench.kafka.pending()} == set(OUTPUTS)


@in_loop
async def test_every_stage_of_a_list_is_measured() -> None:
    bench = await Bench.opened()
    fetched, sent = time.monotonic() - 2, time.time() - 5
    records = [Record(ARRIVALS.topic, 0, offset, int(1000 * sent), b"", b"") for offset in range(3)]
    taken = RecordList(tp=ARRIVALS, generation=1, start=0, end=3, records=records, fetched=fetched)
    await bench.pipelines.take([taken])
    assert [stage for stage, _ in bench.spent] == ["fetch", "queue", "handle"]
    await bench.kafka.persist_all()
    spent = dict(bench.spent)
    assert list(spent) == list(STAGES)
    assert spent["fetch"] == pytest.approx(3, abs=0.5)
    assert spent["queue"] >= 2
    assert spent["handle"] >= 0 <= spent["write"]


@in_loop
async def test_a_task_that_takes_a_partition_over_learns_which_arrivals_may_have_been_answered() -> None:
    bench = Bench()
    for offset in range(3):
        bench.kafka.append(ARRIVALS, b"", b"%d" % offset)
    bench.kafka.committed[ARRIVALS] = 1
    await bench.kafka.rebalance(bench.pipelines, [0])
    assert bench.task.taken_over == (1, 3)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@in_loop
async def test_a_failed_write_stops_everything_and_commits_nothing() -> None:
    bench = await Bench.opened()
    await bench.take(0, 2)
    await bench.kafka.persist_all()
    await bench.take(2, 4)
    bench.kafka.pending()[0].future.set_exception(OSError("disk full"))
    await settle()
    assert [str(error) for error in bench.kafka.failures] == ["disk full"]
    assert bench.pipelines.committable() == {}
    await bench.take(4, 6)
    assert len(bench.seen) == 4


@in_loop
async def test_a_write_that_hangs_is_a_failure_in_the_end() -> None:
    bench = await Bench.opened()
    await bench.take(0, 2)
    now = asyncio.get_running_loop().time()
    bench.pipelines.check_stalled(now + 60, 120)
    assert not bench.kafka.failures
    bench.pipelines.check_stalled(now + 121, 120)
    assert isinstance(bench.kafka.failures[0], FailedError)


@in_loop
async def test_a_bad_record_that_the_task_did_not_expect_costs_one_dead_letter() -> None:
    bench = await Bench.opened(explosive=lambda record: record.offset == 3)
    await bench.take(0, 6)
    await bench.kafka.persist_all()
    assert len(bench.kafka.written(TOPICS.dead_letters)) == 1
    assert len(bench.kafka.written(TOPICS.journal)) == 5
    assert bench.pipelines.committable()[ARRIVALS] == 6


@in_loop
async def test_large_dead_letters_in_flight_hold_back_the_next_poll() -> None:
    bench = await Bench.opened(explosive=lambda record: record.offset == 0, limit=10)
    records = [Record(ARRIVALS.topic, 0, offset, 0, b"", bytes(900_000)) for offset in range(2)]
    taken = RecordList(tp=ARRIVALS, generation=1, start=0, end=2, records=records)
    taking = asyncio.ensure_future(bench.pipelines.take([taken]))
    await settle()
    assert not taking.done()
    await bench.kafka.persist_all()
    await taking


@in_loop
async def test_a_task_that_always_raises_is_a_failure_and_makes_no_dead_letters() -> None:
    bench = await Bench.opened(explosive=lambda record: True)
    with pytest.raises(FailedError, match="every one of 6"):
        await bench.take(0, 6)
    assert bench.pipelines.committable()[ARRIVALS] == 0


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@in_loop
async def test_progress_is_written_when_all_before_the_ends_is_acknowledged_and_only_then_noted() -> None:
    bench = await Bench.opened()
    (pipeline,) = bench.pipelines.by_partition.values()
    await bench.take(0, 4)
    await bench.take(0, 2, tp=CLICKS)
    pipeline.set_target(1000, {ARRIVALS: 4, CLICKS: 3}, lambda: b"progress", lambda stamp, written_at: True)
    await bench.kafka.persist_all()
    assert None not in bench.kafka.written(TOPICS.journal), "a click is missing"
    assert not pipeline.needs_target
    await bench.take(2, 3, tp=CLICKS)
    while None not in bench.kafka.written(TOPICS.journal):
        assert len(bench.kafka.written(TOPICS.journal)) == 7
        await bench.kafka.persist(bench.kafka.pending()[0])
    assert bench.task.progress == []
    calls = bench.task.calls
    await bench.kafka.persist_all()
    assert bench.task.progress == [1000]
    assert bench.task.calls == calls + 1, "it may delete now, also without new records"
    assert pipeline.needs_target


# ── rebalance and recovery ───────────────────────────────────────────────────────────────────────────────────────────


@in_loop
async def test_a_partition_is_kept_only_from_one_generation_to_the_next_and_only_if_all_was_durable() -> None:
    bench = await Bench.opened()
    await bench.take(0, 2)
    await bench.kafka.persist_all()
    await bench.kafka.rebalance(bench.pipelines, [0])
    assert not bench.task.released
    await bench.take(2, 4, generation=2)
    assert (bench.seen, len(bench.tasks)) == ([0, 1, 2, 3], 1)
    await bench.kafka.rebalance(bench.pipelines, [0])
    assert bench.tasks[0].released, "two records were in flight"
    assert bench.task.restored == [{b"t.arrivals@0": b"state", b"t.arrivals@1": b"state"}]
    assert bench.pipelines.by_partition[0].changelog_end == 1
    assert bench.kafka.committed[ARRIVALS] == 2
    await bench.take(0, 4, generation=3)
    assert bench.seen == [2, 3], "from the committed position on"


@pytest.mark.parametrize(("skip", "member"), [(1, "me"), (0, "renamed"), (-1, "me")])
@in_loop
async def test_a_partition_that_others_may_have_owned_meanwhile_is_restored(skip: int, member: str) -> None:
    bench = await Bench.opened()
    await bench.kafka.rebalance(bench.pipelines, [0], member, skip)
    assert [task.released for task in bench.tasks] == [True, False]
    assert bench.pipelines.by_partition[0].task is bench.task


@in_loop
async def test_the_journal_is_assigned_with_the_partitions() -> None:
    bench = await Bench.opened()
    await bench.kafka.rebalance(bench.pipelines, [1])
    assert bench.journal == [True, False]
    assert list(bench.pipelines.by_partition) == [1]


@in_loop
async def test_a_worker_that_may_have_lost_its_partitions_waits_until_that_is_clear() -> None:
    for lost in (False, True):
        bench = await Bench.opened()
        bench.kafka.is_member = False
        taking = asyncio.ensure_future(bench.take(0, 2))
        await asyncio.sleep(3 * MEMBERSHIP_CHECK)
        assert not bench.seen
        if lost:
            bench.pipelines.close()
        else:
            bench.kafka.is_member = True
        await taking
        assert bench.seen == ([] if lost else [0, 1])


def table(sessions: int) -> dict[bytes, Record]:
    keys = [b"%d" % n for n in range(sessions)]
    return {key: Record(TOPICS.changelog, 0, n, 0, key, b"v") for n, key in enumerate(keys)}


@in_loop
async def test_tables_are_restored_in_pieces_between_which_the_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines_module, "RESTORED_AT_ONCE", 3)  # heartbeats run in the same loop
    bench = Bench()
    bench.pipelines.assign(1, "me", [0, 1])
    restoring = asyncio.ensure_future(bench.pipelines.restore({0: table(7), 1: {}}, {0: 9}))
    seen = []
    while not restoring.done():
        await asyncio.sleep(0)
        seen.append(sum(map(len, bench.tasks[0].restored)) if bench.tasks else 0)
    assert {3, 6, 7} <= set(seen)
    starts = {ARRIVALS: 0, TopicPartition(TOPICS.arrivals, 1): 0}
    bench.pipelines.open(1, "me", starts, ends=starts, owns_journal=False)
    assert {p: one.changelog_end for p, one in bench.pipelines.by_partition.items()} == {0: 9, 1: -1}
    assert [len(some) for some in bench.tasks[0].restored] == [3, 3, 1]


@in_loop
async def test_partitions_assigned_anew_during_a_restore_are_restored_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines_module, "RESTORED_AT_ONCE", 3)
    bench = Bench()
    bench.pipelines.assign(1, "me", [0])
    restoring = asyncio.ensure_future(bench.pipelines.restore({0: table(9)}, {}))
    await asyncio.sleep(0)
    bench.pipelines.assign(2, "me", [0])
    await restoring
    assert bench.tasks[0].released
    assert len(bench.tasks[0].restored) < 3
    await bench.pipelines.restore({0: table(1)}, {0: 0})
    bench.pipelines.open(2, "me", {ARRIVALS: 0}, ends={ARRIVALS: 0}, owns_journal=False)
    assert bench.pipelines.by_partition[0].task is bench.task
    assert bench.task.restored == [{b"0": b"v"}]


@in_loop
async def test_a_task_that_fails_to_restore_ends_the_worker() -> None:
    bench = Bench()
    bench.pipelines.assign(1, "me", [0])
    await bench.pipelines.restore({0: {b"bad": Record(TOPICS.changelog, 0, 0, 0, b"bad", b"1")}}, {})
    assert [type(failure) for failure in bench.kafka.failures] == [ZeroDivisionError]
