"""Order of writing and of acknowledgement, without a broker: batches become durable in any order a test likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from faust.types import TP
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import FailedError
from worker.kafka.pipelines import UNSURE, Serving
from worker.kafka.records import RecordList
from worker.kafka.transport import Emits, Record
from worker.stream.topology import Topics

NAMES = Topics("t")
ARRIVALS, CLICKS = TP(NAMES.arrivals, 0), TP(NAMES.clicks, 0)


class Echo:
    """A task that notes what it is given and emits one of everything per record."""

    def __init__(self, explosive: Callable[[Record], bool] = lambda record: False) -> None:
        self.seen: list[tuple[str, int]] = []
        self.heard: list[int] = []
        self.calls = 0
        self.released = False
        self._explosive = explosive

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        raise AssertionError("a lane gets its task with the sessions in it")

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

    def acknowledged(self, progress_time: int) -> None:
        self.heard.append(progress_time)

    def release(self) -> None:
        self.released = True


@dataclass
class Batch:
    topic: str
    keys: list[bytes | None]
    future: asyncio.Future[Any]
    record_count: int = 0


@dataclass
class Result:
    offset: int


@dataclass
class Disk:
    """Stands for all outlets: a batch per call, made durable by the test."""

    batches: list[Batch] = field(default_factory=list)

    def writer(self, topic: str, partition: int) -> Any:
        disk = self

        class TopicWriter:
            def write(self, pairs: Iterable[tuple[Any, Any]]) -> list[Batch]:
                return self.write_with_headers((key, value, []) for key, value in pairs)

            def write_with_headers(self, records: Iterable[tuple[Any, Any, Any]]) -> list[Batch]:
                keys = [key for key, _, _ in records]
                batch = Batch(topic, keys, asyncio.get_running_loop().create_future(), len(keys))
                disk.batches.append(batch)
                return [batch]

        return TopicWriter()

    def pending(self) -> list[Batch]:
        return [batch for batch in self.batches if not batch.future.done()]

    def written(self, topic: str) -> list[bytes | None]:
        return [key for batch in self.batches if batch.topic == topic for key in batch.keys]


class Bench:
    """A serving of partition 0 on a disk of the test's own."""

    def __init__(self, task: Echo | None = None, start: int = 0, limit: int = 10**9) -> None:
        self.task = task or Echo()
        self.disk = Disk()
        self.reread: list[tuple[TP, int]] = []
        self.failures: list[BaseException] = []
        self.is_member = True
        self.serving = Serving(
            names=NAMES,
            step=lambda work: [task.handle(records) for task, records in work],
            limit=limit,
            is_member=lambda: self.is_member,
            reread=lambda tp, offset: self.reread.append((tp, offset)),
            failed=self.failures.append,
        )
        self.open(1, start=start)

    def open(self, generation: int, member: str = "me", start: int = 0, restored: Any = None) -> None:
        self.serving.open(
            generation=generation,
            member=member,
            outlets=self.disk,  # type: ignore[arg-type]
            starts={ARRIVALS: start, CLICKS: start},
            restored=restored if restored is not None else {0: (self.task, 4)},
        )

    async def take(self, start: int, end: int, tp: TP = ARRIVALS, generation: int = 1) -> None:
        records = [Record(tp.topic, 0, offset, 0, b"", b"") for offset in range(start, end)]
        await self.serving.take([RecordList(tp=tp, generation=generation, start=start, end=end, records=records)])

    async def persist(self, batch: Batch) -> None:
        batch.future.set_result(Result(10))
        await settle()

    async def persist_all(self) -> None:
        while pending := self.disk.pending():
            await self.persist(pending[0])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=40))
def test_whatever_lists_come_every_record_is_stepped_once_and_in_order(polls: list[tuple[int, int]]) -> None:
    async def scene() -> None:
        bench = Bench()
        reached = 0
        for start, size in polls:
            asked = len(bench.reread)
            await bench.take(start, start + size)
            if start > reached:
                assert bench.reread[:1] and len(bench.reread) <= asked + 1
                assert bench.reread[-1] == (ARRIVALS, reached)
            else:
                reached = max(reached, start + size)
        assert bench.task.seen == [(ARRIVALS.topic, offset) for offset in range(reached)]

    run(scene)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_in_whatever_order_batches_become_durable_nothing_is_acknowledged_before_all_before_it(
    sizes: list[int], chance: Any
) -> None:
    async def scene() -> None:
        bench = Bench()
        start = 0
        for size in sizes:
            await bench.take(start, start + size)
            start += size
        while pending := bench.disk.pending():
            await bench.persist(chance.choice(pending))
            durable = {
                topic: {key for b in bench.disk.batches if b.topic == topic and b.future.done() for key in b.keys}
                for topic in (NAMES.journal, NAMES.changelog, NAMES.decisions)
            }
            decided = set(bench.disk.written(NAMES.decisions))
            assert decided <= durable[NAMES.journal] & durable[NAMES.changelog], "no decision before its facts"
            acknowledged = bench.serving.committable()[ARRIVALS]
            owed = {b"%s@%d" % (ARRIVALS.topic.encode(), offset) for offset in range(acknowledged)}
            assert all(owed <= keys for keys in durable.values()), "no offset before its outputs"
        assert bench.serving.committable()[ARRIVALS] == start
        assert bench.disk.written(NAMES.decisions) == bench.disk.written(NAMES.journal), "in the order of the input"

    run(scene)


def test_a_hole_is_asked_for_once_until_it_is_filled() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(5, 8)
        await bench.take(8, 9)
        assert bench.reread == [(ARRIVALS, 0)]
        await bench.take(0, 7)
        await bench.take(9, 10)
        assert bench.reread == [(ARRIVALS, 0), (ARRIVALS, 7)]

    run(scene)


def test_what_retention_has_deleted_is_gone_over() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(5, 8)
        bench.serving.skip(ARRIVALS, 5)
        await bench.take(5, 8)
        await bench.persist_all()
        assert bench.task.seen == [(ARRIVALS.topic, offset) for offset in (5, 6, 7)]
        assert bench.serving.committable()[ARRIVALS] == 8

    run(scene)


def test_a_list_of_another_generation_is_not_taken() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(0, 3, generation=2)
        bench.serving.close()
        await bench.take(0, 3, generation=1)
        assert not bench.task.seen

    run(scene)


def test_a_failed_write_stops_everything_and_commits_nothing() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(0, 2)
        await bench.persist_all()
        await bench.take(2, 4)
        bench.disk.pending()[0].future.set_exception(OSError("disk full"))
        await settle()
        assert [str(error) for error in bench.failures] == ["disk full"]
        assert bench.serving.committable() == {}
        await bench.take(4, 6)
        assert len(bench.task.seen) == 4

    run(scene)


def test_a_write_that_hangs_is_a_failure_in_the_end() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(0, 2)
        now = asyncio.get_running_loop().time()
        bench.serving.check_stalled(now + 60, 120)
        assert not bench.failures
        bench.serving.check_stalled(now + 121, 120)
        assert isinstance(bench.failures[0], FailedError)

    run(scene)


def test_no_more_is_taken_than_may_be_under_way() -> None:
    async def scene() -> None:
        bench = Bench(limit=5)
        await bench.take(0, 5)
        waiting = asyncio.create_task(bench.take(5, 10))
        await settle()
        assert not waiting.done(), "handled, but the next has to wait"
        await bench.persist_all()
        await asyncio.wait_for(waiting, 1)
        assert bench.serving.under_way == 0

    run(scene)


def test_a_bad_record_that_the_processor_did_not_expect_costs_one_dead_letter() -> None:
    async def scene() -> None:
        bench = Bench(Echo(lambda record: record.offset == 3))
        await bench.take(0, 6)
        await bench.persist_all()
        assert len(bench.disk.written(NAMES.dead_letters)) == 1
        assert len(bench.disk.written(NAMES.journal)) == 5
        assert bench.serving.committable()[ARRIVALS] == 6

    run(scene)


def test_a_processor_that_always_raises_is_a_failure_and_not_a_dead_letter_office() -> None:
    async def scene() -> None:
        bench = Bench(Echo(lambda record: True))
        with pytest.raises(FailedError, match="every one of 6"):
            await bench.take(0, 6)
        assert bench.serving.committable()[ARRIVALS] == 0

    run(scene)


def test_progress_is_written_when_all_before_the_ends_is_acknowledged_and_then_heard() -> None:
    async def scene() -> None:
        bench = Bench()
        (lane,) = bench.serving.lanes.values()
        await bench.take(0, 4)
        await bench.take(0, 2, tp=CLICKS)
        lane.aim(1000, {ARRIVALS: 4, CLICKS: 3}, (b"progress", b""))
        await bench.persist_all()
        assert b"progress" not in bench.disk.written(NAMES.journal), "a click is missing"
        assert not lane.wants_target
        await bench.take(2, 3, tp=CLICKS)
        while b"progress" not in bench.disk.written(NAMES.journal):
            assert len(bench.disk.written(NAMES.journal)) == 7
            await bench.persist(bench.disk.pending()[0])
        assert bench.task.heard == []
        calls = bench.task.calls
        await bench.persist_all()
        assert bench.task.heard == [1000]
        assert bench.task.calls == calls + 1, "it may delete now, also without new records"
        assert lane.wants_target

    run(scene)


def test_a_partition_is_kept_only_from_one_generation_to_the_next_and_only_if_all_was_durable() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.take(0, 2)
        await bench.persist_all()
        bench.serving.close()
        assert await bench.serving.drained(0.01)
        assert bench.serving.keep(2, "me", [0]) == {0}
        assert not bench.task.released
        bench.open(2, restored={}, start=2)
        await bench.take(2, 4, generation=2)
        assert [offset for _, offset in bench.task.seen] == [0, 1, 2, 3]
        bench.serving.close()
        assert not await bench.serving.drained(0.01), "two lists are under way"
        assert bench.serving.keep(3, "me", [0]) == set()

    run(scene)


@pytest.mark.parametrize(("generation", "member"), [(3, "me"), (2, "renamed"), (1, "me")])
def test_a_partition_that_others_may_have_had_meanwhile_is_read_again(generation: int, member: str) -> None:
    async def scene() -> None:
        bench = Bench()
        bench.serving.close()
        assert await bench.serving.drained(0.01)
        task = bench.task
        assert bench.serving.keep(generation, member, [0]) == set()
        assert task.released
        another = Echo()
        bench.open(generation, member, restored={0: (another, 7)})
        assert bench.serving.lanes[0].task is another
        assert bench.serving.lanes[0].changelog_end == 7

    run(scene)


def test_who_may_have_lost_its_partitions_waits_until_it_knows() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.is_member = False
        taking = asyncio.ensure_future(bench.take(0, 2))
        await asyncio.sleep(3 * UNSURE)
        assert not bench.task.seen
        bench.is_member = True
        await taking
        assert [offset for _, offset in bench.task.seen] == [0, 1]

    run(scene)


def test_who_has_lost_its_partitions_handles_nothing_of_what_it_holds() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.is_member = False
        taking = asyncio.ensure_future(bench.take(0, 2))
        await asyncio.sleep(3 * UNSURE)
        bench.serving.close()
        await taking
        assert not bench.task.seen

    run(scene)


def test_a_poll_waits_until_what_was_offered_is_handled_and_there_is_room() -> None:
    async def scene() -> None:
        bench = Bench(limit=1)
        bench.serving.offer()
        waiting = asyncio.ensure_future(bench.serving.rested(60))
        taking = asyncio.ensure_future(bench.take(0, 2))
        await settle()
        assert not waiting.done(), "two records are under way, and one may be"
        await bench.persist_all()
        await asyncio.gather(waiting, taking)

    run(scene)


def test_a_poll_does_not_wait_for_ever_for_what_got_lost() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.serving.offer()
        await bench.serving.rested(0.01)
        waiting = asyncio.ensure_future(bench.serving.rested(60))
        await settle()
        bench.serving.close()
        await waiting

    run(scene)


def test_all_is_calm_when_the_facts_are_durable_though_the_decisions_are_not() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.serving.calm(60)
        await bench.take(0, 1)
        waiting = asyncio.ensure_future(bench.serving.calm(60))
        await settle()
        assert not waiting.done()
        facts = list(bench.disk.batches)
        for batch in facts:
            assert not waiting.done()
            await bench.persist(batch)
        await waiting
        (decisions,) = [batch for batch in bench.disk.batches if batch not in facts]
        assert decisions.topic == NAMES.decisions
        assert not decisions.future.done()

    run(scene)
