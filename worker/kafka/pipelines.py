"""The lanes of this worker over the generations of its group: what is taken, what is kept, what may be committed.

Faust resumes partitions before it seeks to the committed offsets, clears queues, and cancels polls that then still take
records from the fetcher: the same records come twice, and holes open. So nothing here trusts the order of arrival. Each
partition has one position that may come next; what lies before it is cut off, what lies after it is not taken but read
again from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from faust.types import TP

from worker.errors import FailedError
from worker.kafka.pipeline import Lane, PipelineWriters
from worker.kafka.records import RecordList
from worker.kafka.transport import Emits, PartitionTask, Record
from worker.kafka.writer import TopicWriters
from worker.stream.topology import Topics

log = logging.getLogger(__name__)

#: Seconds between two looks at whether this worker is still, or again, a member of its group.
UNSURE = 0.02


class Serving:
    """Owns the lanes.

    Parameters
    ----------
    names
        The topics.
    step
        Lets several tasks handle their records.
    limit
        How many records may be handled and not yet acknowledged; then no more are taken. Bounds memory, and how much
        is repeated after a crash.
    is_member
        Says whether the group cannot have given the partitions to others yet.
    reread
        Called with a partition and the position it has to be read from again.
    failed
        Called once, with the error after which nothing may be acknowledged any more.
    """

    def __init__(
        self,
        *,
        names: Topics,
        step: Callable[[Sequence[tuple[PartitionTask, Sequence[Record]]]], Sequence[Emits]],
        limit: int,
        is_member: Callable[[], bool],
        reread: Callable[[TP, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.lanes: dict[int, Lane] = {}
        self.failure: BaseException | None = None
        self.generation = -1
        self._member = ""
        self._names = names
        self._step = step
        self._limit = limit
        self._is_member = is_member
        self._reread = reread
        self._report = failed
        self._outlets: TopicWriters | None = None
        self._open = False
        self._clean = False
        self._rereading: dict[TP, int] = {}
        self._under_way = 0
        self._offered = False
        self._moved = asyncio.Event()

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Take nothing more: the partitions are about to go."""
        self._open = self._offered = False
        self._moved.set()

    async def drained(self, patience: float) -> bool:
        """Wait, for so many seconds, until all that was handled is acknowledged; say whether it is."""
        await self._until(lambda: self.failure is not None or all(lane.idle for lane in self.lanes.values()), patience)
        self._clean = self.failure is None and all(lane.idle for lane in self.lanes.values())
        return self._clean

    def keep(self, generation: int, member: str, partitions: Iterable[int]) -> set[int]:
        """Return the partitions whose state is still good, forget the others.

        It is good if this member owned the partition in the generation right before, so that nobody else can have
        changed it, and if all it did there is durable, so that no effect hangs on the memory alone. Everything else is
        read from the changelog again: half a second for 100,000 sessions.
        """
        unbroken = self._clean and bool(member) and member == self._member and generation == self.generation + 1
        kept = self.lanes.keys() & set(partitions) if unbroken else set()
        for partition in self.lanes.keys() - kept:
            self.lanes.pop(partition).retire()
        self._under_way = 0
        self._open = self._clean = False
        return set(kept)

    def open(
        self,
        *,
        generation: int,
        member: str,
        outlets: TopicWriters,
        starts: Mapping[TP, int],
        restored: Mapping[int, tuple[PartitionTask, int]],
    ) -> None:
        """Begin a generation.

        `starts` are the committed positions of all input partitions. `restored` has the task, with the sessions of the
        table, and the last changelog offset of every partition that was not kept.
        """
        self._outlets = outlets
        for partition in sorted({tp.partition for tp in starts}):
            own = {tp: offset for tp, offset in starts.items() if tp.partition == partition}
            lane = self.lanes.get(partition)
            if lane is not None:
                lane.rewind(own)
                continue
            task, end = restored[partition]
            self.lanes[partition] = Lane(
                partition=partition,
                task=task,
                outlets=PipelineWriters(
                    journal=outlets.writer(self._names.journal, 0),
                    dead_letters=outlets.writer(self._names.dead_letters, 0),
                    changelog=outlets.writer(self._names.changelog, partition),
                    decisions=outlets.writer(self._names.decisions, partition),
                ),
                starts=own,
                changelog_end=end,
                moved=self._on_moved,
                failed=self.fail,
            )
        self.generation, self._member = generation, member
        self._rereading.clear()
        self._open = True

    def is_open(self, generation: int) -> bool:
        """Whether lists of this generation are taken."""
        return self._open and generation == self.generation and self.failure is None

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, lists: Sequence[RecordList]) -> None:
        """Handle what one poll brought; return when there is room for more."""
        # Who has slept may have lost what it holds. It finds out soon: the next heartbeat is due.
        while not self._is_member() and self._open and self.failure is None:  # noqa: ASYNC110 (nobody says when)
            await asyncio.sleep(UNSURE)
        work: dict[Lane, list[RecordList]] = {}
        for taken in lists:
            if (lane := self._lane_of(taken)) is not None:
                fresh = taken.after(lane.expected[taken.tp])
                lane.expected[taken.tp] = taken.end
                work.setdefault(lane, []).append(fresh)
        if work:
            self._handle(work)
        await self._until(lambda: self._under_way <= self._limit or not self._open)
        self._offered = False
        self._moved.set()

    def offer(self) -> None:
        """Hear that lists are on their way to `take`."""
        self._offered = True

    async def rested(self, patience: float) -> None:
        """Wait, for so many seconds, until what was offered is handled and there is room for more.

        Who reads ahead holds records that have not been answered, and leaves younger ones for the time after.
        """
        await self._until(lambda: not self._offered, patience)

    async def calm(self, patience: float) -> None:
        """Wait, for so many seconds, until all facts are durable: then the decisions are on their way.

        The next records to be handled would hold them up for as long as that takes.
        """
        await self._until(lambda: not any(lane.writing for lane in self.lanes.values()), patience)

    async def _until(self, condition: Callable[[], bool], patience: float | None = None) -> None:
        """Wait for something that changes only when a list moves on; for so many seconds, if that is said."""
        if condition():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()

    def _lane_of(self, taken: RecordList) -> Lane | None:
        """Return the lane that has to handle a list; None if there is nothing in it that could be handled now."""
        if not self.is_open(taken.generation):
            return None
        lane = self.lanes.get(taken.tp.partition)
        if lane is None or taken.tp not in lane.expected:
            return None
        expected = lane.expected[taken.tp]
        if taken.start > expected:
            self._refuse(taken, expected)
            return None
        self._rereading.pop(taken.tp, None)
        return lane if taken.end > expected else None

    def _handle(self, work: Mapping[Lane, Sequence[RecordList]]) -> None:
        records = {lane: lists[0].records if len(lists) == 1 else _together(lists) for lane, lists in work.items()}
        try:
            emits = self._step([(lane.task, some) for lane, some in records.items()])
        except Exception:
            log.exception("the processors raised on %d records", sum(map(len, records.values())))
            emits = [lane.step(some) for lane, some in records.items()]
        for (lane, lists), emitted in zip(work.items(), emits, strict=True):
            size = len(records[lane])
            self._under_way += size
            lane.launch(emitted, {taken.tp: taken.end for taken in lists}, size)

    def _refuse(self, taken: RecordList, expected: int) -> None:
        if self._rereading.get(taken.tp) == expected:
            return  # asked for already; what is still in the queues comes first
        log.warning("%s-%d: read from %d, but %d comes next", taken.tp.topic, taken.tp.partition, taken.start, expected)
        self._rereading[taken.tp] = expected
        self._reread(taken.tp, expected)

    def skip(self, tp: TP, offset: int) -> None:
        """Go on at `offset`: what came before it was deleted from the topic and cannot be read any more."""
        lane = self.lanes.get(tp.partition)
        if lane is None or lane.expected.get(tp, offset) >= offset:
            return
        log.error("%s-%d: records %d to %d are gone (retention)", tp.topic, tp.partition, lane.expected[tp], offset - 1)
        self._rereading.pop(tp, None)
        lane.expected[tp] = offset
        lane.launch(Emits(), {tp: offset}, 0)

    def _on_moved(self, size: int) -> None:
        self._under_way -= size
        self._moved.set()

    # ── acknowledgement ──────────────────────────────────────────────────────────────────────────────────────────────

    def committable(self) -> dict[TP, int]:
        """Return the positions before which everything is acknowledged; none after a failure."""
        if self.failure is not None:
            return {}
        return {tp: offset for lane in self.lanes.values() for tp, offset in lane.acknowledged.items()}

    def fail(self, error: BaseException) -> None:
        """Stop for good: nothing is taken, nothing is committed any more."""
        if self.failure is not None:
            return
        self.failure = error
        self._open = False
        self._moved.set()
        self._report(error)

    def check_stalled(self, now: float, patience: float) -> None:
        """Fail if a list has been under way for longer than `patience` seconds.

        The idempotent producer retries for ever, also to a topic that was deleted.
        """
        oldest = min((lane.oldest for lane in self.lanes.values() if lane.oldest is not None), default=now)
        if now - oldest > patience:
            self.fail(FailedError(f"Kafka has not acknowledged a write for {now - oldest:.0f} s"))

    @property
    def under_way(self) -> int:
        """How many records are handled and not yet acknowledged."""
        return self._under_way


def _together(lists: Sequence[RecordList]) -> list[Record]:
    return [record for taken in lists for record in taken.records]
