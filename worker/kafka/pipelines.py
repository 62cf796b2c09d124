"""The partition pipelines of a worker over the generations of its group. Implements `transport.PartitionOwner`.

Faust resumes partitions before it seeks to the committed offsets, clears queues, and cancels polls that then still take
records from the fetcher: the same records come twice, and holes open. So nothing here relies on the order in which
lists come. Each partition has one position that may come next. Records before it are dropped; after a hole the
partition is read again from that position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.pipeline import PartitionPipeline, PartitionTask, PipelineWriters
from worker.kafka.transport import RecordList, Transport
from worker.stream.topology import MOST_BYTES, ONLY_PARTITION, Emits, Record, Topics

log = logging.getLogger(__name__)

#: Seconds between two checks of whether this worker is still, or again, a member of its group.
MEMBERSHIP_CHECK = 0.02
#: Sessions that a task takes over before the loop may do something else, heartbeats above all.
RESTORED_AT_ONCE = 10_000

#: Bytes of dead letters that count as a record in flight: they are as long as clients made them.
LETTER_BYTES = 16 << 10

#: Takes the seconds that lists of records spent in stages (see `metrics.catalogue.STAGES`).
OnStages = Callable[[Sequence[tuple[str, float]]], None]

HandleTogether = Callable[[Sequence[tuple[Any, Sequence[Record]]]], Sequence[Emits]]


class PartitionPipelines:
    """The pipelines of the assigned partitions.

    Parameters
    ----------
    transport
        Where the records come from and go to.
    make_task
        Makes the task of a partition.
    handle_together
        Lets several tasks handle their records, with the same results as one by one.
    parameters_ready
        Says whether the parameters are known; nothing is read before.
    refresh_parameters
        Called in every generation: the parameters are not ready again before all that are published now are known.
    assign_journal
        Called in every generation with whether the journal is assigned to this worker.
    limit
        The number of records that may be in flight (handled and not yet acknowledged); then no more are taken. Bounds
        memory, and the number of records that are repeated after a crash.
    most_bytes
        The largest record that all output topics take.
    on_stages
        Called with the seconds that lists of records spent in stages.
    """

    def __init__(
        self,
        transport: Transport,
        topics: Topics,
        *,
        make_task: Callable[[int], PartitionTask],
        handle_together: HandleTogether,
        parameters_ready: Callable[[], bool] = lambda: True,
        refresh_parameters: Callable[[], None] = lambda: None,
        assign_journal: Callable[[bool], None] = lambda mine: None,
        limit: int = 4_096,
        most_bytes: int = MOST_BYTES,
        on_stages: OnStages = lambda spent: None,
    ) -> None:
        self.by_partition: dict[int, PartitionPipeline] = {}
        self.failure: BaseException | None = None
        self.generation = -1
        self._member = ""
        self._transport = transport
        self._topics = topics
        self._make_task = make_task
        self._handle_together = handle_together
        self._parameters_ready = parameters_ready
        self._refresh_parameters = refresh_parameters
        self._assign_journal = assign_journal
        self._limit = limit
        self._most_bytes = most_bytes
        self._on_stages = on_stages
        self._open = False
        self._drained = False
        self._restored: dict[int, tuple[PartitionTask, int]] = {}
        self._reading_again: dict[TopicPartition, int] = {}
        self._in_flight = 0
        self._written: list[tuple[str, float]] = []  # what is to be reported of lists that are acknowledged
        self._moved = asyncio.Event()
        self._waiting = 0  # for that event

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────

    def assign(self, generation: int, member: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the partitions whose state is still valid, with its last changelog offset; drop the others.

        A state is valid if this member owned the partition in the generation right before, so that no other worker can
        have changed it, and if all its effects are durable. Everything else is read from the changelog again: half a
        second for 100,000 sessions.
        """
        unbroken = self._drained and bool(member) and member == self._member and generation == self.generation + 1
        kept = self.by_partition.keys() & set(partitions) if unbroken else set()
        for partition in self.by_partition.keys() - kept:
            self.by_partition.pop(partition).retire()
        for task, _ in self._restored.values():
            task.release()  # restored, and revoked before it was used
        self._restored = {}
        self._in_flight = 0
        self._open = self._drained = False
        return {partition: self.by_partition[partition].changelog_end for partition in kept}

    async def restore(self, tables: dict[int, dict[bytes, Record]], ends: Mapping[int, int]) -> None:
        """Make the tasks of partitions from their session tables."""
        restored = self._restored
        try:
            for partition in sorted(tables):
                task = self._make_task(partition)
                restored[partition] = task, ends.get(partition, -1)
                sessions = iter(tables.pop(partition).values())
                while some := list(islice(sessions, RESTORED_AT_ONCE)):
                    task.restore(some)
                    await asyncio.sleep(0)
                    if self._restored is not restored:
                        return  # the partitions were assigned anew meanwhile
        except Exception as error:
            self.fail(error)  # Faust ignores exceptions here

    def open(
        self,
        generation: int,
        member: str,
        starts: Mapping[TopicPartition, int],
        *,
        ends: Mapping[TopicPartition, int],
        owns_journal: bool,
    ) -> None:
        """Start reading at the committed positions of all assigned input partitions, which end at `ends` now."""
        restored, self._restored = self._restored, {}
        for partition in sorted({tp.partition for tp in starts}):
            own = {tp: offset for tp, offset in starts.items() if tp.partition == partition}
            if (kept := self.by_partition.get(partition)) is not None:
                kept.rewind(own)
                continue
            task, changelog_end = restored[partition]
            arrivals = TopicPartition(self._topics.arrivals, partition)
            task.take_over(own[arrivals], ends[arrivals])
            self.by_partition[partition] = PartitionPipeline(
                partition=partition,
                task=task,
                writers=self._writers(partition),
                starts=own,
                changelog_end=changelog_end,
                on_moved=self._on_moved,
                on_failure=self.fail,
                most_bytes=self._most_bytes,
            )
        self.generation, self._member = generation, member
        self._reading_again.clear()
        self._open = True
        self._refresh_parameters()
        self._assign_journal(owns_journal)

    def _writers(self, partition: int) -> PipelineWriters:
        writer, topics = self._transport.writer, self._topics
        return PipelineWriters(
            journal=writer(topics.journal, ONLY_PARTITION),
            dead_letters=writer(topics.dead_letters, ONLY_PARTITION),
            changelog=writer(topics.changelog, partition),
            decisions=writer(topics.decisions, partition),
        )

    def accepts(self, generation: int) -> bool:
        """Whether records of this generation may be read now."""
        is_open = self._open and generation == self.generation and self.failure is None
        return is_open and self._transport.can_write and self._parameters_ready()

    def close(self) -> None:
        """Take no more records: the partitions are about to be revoked."""
        self._open = False
        self._moved.set()

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 (running out of time is no error)
        """Wait until everything that was taken is acknowledged; return whether it is."""

        def idle() -> bool:
            return all(pipeline.idle for pipeline in self.by_partition.values())

        await self._until(lambda: self.failure is not None or idle(), timeout)
        self._drained = self.failure is None and idle()
        return self._drained

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, lists: Sequence[RecordList]) -> None:
        """Handle the records of one poll; return when there is room for more."""
        # A process that was stopped for long may have lost its partitions. The next heartbeat will show.
        while not self._transport.is_member and self._open and self.failure is None:  # noqa: ASYNC110 (no event for it)
            await asyncio.sleep(MEMBERSHIP_CHECK)
        await self._wait_for_room()
        self.take_at_once(lists)
        await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        if self._in_flight > self._limit and self._open:
            await self._until(lambda: self._in_flight <= self._limit or not self._open)

    @property
    def has_room(self) -> bool:
        """Whether `take` would handle records without waiting."""
        return self._in_flight <= self._limit and self._transport.is_member

    def take_at_once(self, lists: Sequence[RecordList]) -> None:
        """Handle the records of one poll."""
        work: dict[PartitionPipeline, list[RecordList]] = {}
        accepted: dict[int, bool] = {}
        for taken in lists:
            if (generation := taken.generation) not in accepted:
                accepted[generation] = self.accepts(generation)
            if accepted[generation] and (pipeline := self._pipeline_of(taken)) is not None:
                fresh = taken.after(pipeline.expected[taken.tp])
                pipeline.expected[taken.tp] = taken.end
                if (some := work.get(pipeline)) is None:
                    work[pipeline] = [fresh]
                else:
                    some.append(fresh)
        if work:
            began = time.monotonic()
            self._handle(work)
            ended = time.monotonic()
            self._transport.flush()
            self._measure([fresh for some in work.values() for fresh in some], began, ended)

    def _measure(self, lists: Sequence[RecordList], began: float, ended: float) -> None:
        """Report how long lists waited to be fetched and to be handled, and how long that took."""
        wall = time.time() - (time.monotonic() - began)
        spent, self._written = self._written, []
        for taken in lists:
            if taken.records and taken.fetched:
                queued = began - taken.fetched
                waited = wall - queued - abs(taken.records[0].timestamp) / 1000
                spent += (("fetch", max(0.0, waited)), ("queue", queued), ("handle", ended - began))
        if spent:
            self._on_stages(spent)

    def _pipeline_of(self, taken: RecordList) -> PartitionPipeline | None:
        """Return the pipeline that has to handle a list of this generation; None if nothing in it can be handled."""
        pipeline = self.by_partition.get(taken.tp.partition)
        if pipeline is None or (expected := pipeline.expected.get(taken.tp)) is None:
            return None
        if taken.start > expected:
            self._read_again(taken, expected)
            return None
        self._reading_again.pop(taken.tp, None)
        return pipeline if taken.end > expected else None

    def _handle(self, work: Mapping[PartitionPipeline, Sequence[RecordList]]) -> None:
        records = {
            pipeline: lists[0].records if len(lists) == 1 else [record for taken in lists for record in taken.records]
            for pipeline, lists in work.items()
        }
        try:
            emits = self._handle_together([(pipeline.task, some) for pipeline, some in records.items()])
        except Exception:
            log.exception("the processors raised on %d records", sum(map(len, records.values())))
            emits = [pipeline.handle(some) for pipeline, some in records.items()]
        for (pipeline, lists), emitted in zip(work.items(), emits, strict=True):
            size = len(records[pipeline])
            if emitted.dead_letters:
                size += sum(len(letter.value or b"") for letter in emitted.dead_letters) // LETTER_BYTES
            self._in_flight += size
            pipeline.write(emitted, {taken.tp: taken.end for taken in lists}, size)

    def _read_again(self, taken: RecordList, expected: int) -> None:
        if self._reading_again.get(taken.tp) == expected:
            return  # requested already; older lists are still in the queues
        log.warning("%s-%d: read from %d, but %d comes next", taken.tp.topic, taken.tp.partition, taken.start, expected)
        self._reading_again[taken.tp] = expected
        self._transport.read_again(taken.tp, expected)

    def skip(self, tp: TopicPartition, offset: int) -> None:
        """Continue at `offset`: the records before it were deleted from the topic."""
        pipeline = self.by_partition.get(tp.partition)
        if pipeline is None or pipeline.expected.get(tp, offset) >= offset:
            return
        expected = pipeline.expected[tp]
        log.error("%s-%d: records %d to %d were deleted (retention)", tp.topic, tp.partition, expected, offset - 1)
        self._reading_again.pop(tp, None)
        pipeline.expected[tp] = offset
        pipeline.write(Emits(), {tp: offset}, 0)

    async def _until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Wait for a condition that changes only when a list moves on; at most so many seconds, if given."""
        if condition():
            return
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while not condition():
                        self._moved.clear()
                        await self._moved.wait()
        finally:
            self._waiting -= 1

    def _on_moved(self, size: int, waited: float) -> None:
        self._in_flight -= size
        if size:
            self._written.append(("write", waited))
            if not self._in_flight:
                # Reported together: with what comes next, or as soon as nothing is on its way.
                spent, self._written = self._written, []
                self._on_stages(spent)
        if self._waiting:
            self._moved.set()

    # ── acknowledgement ──────────────────────────────────────────────────────────────────────────────────────────────

    def committable(self) -> dict[TopicPartition, int]:
        """Return the positions before which everything is acknowledged; none after a failure."""
        if self.failure is not None:
            return {}
        return {tp: offset for one in self.by_partition.values() for tp, offset in one.acknowledged.items()}

    def fail(self, error: BaseException) -> None:
        """Stop for good: take nothing and commit nothing any more."""
        if self.failure is not None:
            return
        self.failure = error
        self._open = False
        self._moved.set()
        self._transport.fail(error)

    def check_stalled(self, now: float, timeout: float) -> None:
        """Fail if a list has been in flight for longer than `timeout` seconds.

        The idempotent producer retries for ever, also to a topic that was deleted.
        """
        oldest = min((one.oldest for one in self.by_partition.values() if one.oldest is not None), default=now)
        if now - oldest > timeout:
            self.fail(FailedError(f"Kafka has not acknowledged a write for {now - oldest:.0f} s"))
