"""The pipeline of one partition: handle lists of records, write the results, and acknowledge what is durable.

Rules that hold here (docs/design.md §3):

1. Per list: journal, dead letters, changelog and decisions are written together. When all of them are durable, the list
   is acknowledged, and only then may its offsets be committed.
2. A list is acknowledged after the ones before it, but the next is handled while these are still being written.
3. Progress is written when everything before the end offsets that were read after the clock is acknowledged.
4. A write that fails fails the worker. Nothing that came after it is ever acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.clock import broker_time
from worker.kafka.transport import PartitionWriter, WrittenBatch
from worker.stream.topology import Emits, Record, dead_letter

log = logging.getLogger(__name__)


class PartitionTask(Protocol):
    """Serves one assigned partition, arrivals and clicks together. Synchronous; called from one thread only."""

    @property
    def opened(self) -> tuple[tuple[int, int], ...] | None:
        """The sessions opened by the start of their window, for progress; None where all are journaled."""

    def restore(self, records: Iterable[Record]) -> None:
        """Take a part of the session table, a changelog record per session; called before anything else."""

    def take_over(self, start: int, end: int) -> None:
        """Note that other workers may have answered the arrivals between these offsets, the end excluded."""

    def handle(self, records: Sequence[Record]) -> Emits:
        """Handle records. Bad input becomes a dead letter, never an exception.

        Also called without records, after each `acknowledged`, so that a silent partition deletes ended sessions.
        """

    def acknowledged(self, progress_time: int) -> None:
        """Note that the partition's progress up to this time is durable in the journal."""

    def release(self) -> None:
        """Give the partition up; called once, at the end."""


class ConfirmProgress(Protocol):
    """Says whether a progress record counts, given the time that its broker put on it, if any."""

    def __call__(self, stamp: int | None, *, written_at: int) -> bool:
        """Return whether progress up to `written_at` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWriters:
    """Where a pipeline writes: all share the journal and the dead letters, the others are partitions of its own."""

    journal: PartitionWriter
    dead_letters: PartitionWriter
    changelog: PartitionWriter
    decisions: PartitionWriter


@dataclass(slots=True, eq=False)
class _InFlight:
    """A handled list on its way to the broker.

    `waiting` counts its batches that are not durable yet, `changelog` is the last of them that has changes of state.
    """

    ends: Mapping[TopicPartition, int]
    size: int
    since: float
    waiting: int
    changelog: WrittenBatch | None


class PartitionPipeline:
    """One assigned partition in one or more generations of the group.

    Parameters
    ----------
    partition, task
        The partition number and the task that serves it.
    writers
        Where to write.
    starts
        The committed position of each input partition, where reading starts.
    changelog_end
        The last changelog offset that the task's state contains.
    on_moved
        Called when a list is acknowledged, with its number of records and the seconds that it waited for that.
    on_failure
        Called with the error when a write fails.
    most_bytes
        The largest record that all output topics take.
    """

    def __init__(
        self,
        *,
        partition: int,
        task: PartitionTask,
        writers: PipelineWriters,
        starts: Mapping[TopicPartition, int],
        changelog_end: int,
        on_moved: Callable[[int, float], None],
        on_failure: Callable[[BaseException], None],
        most_bytes: int,
    ) -> None:
        self.partition = partition
        self.changelog_end = changelog_end
        #: The position that has to come next, by input partition.
        self.expected = dict(starts)
        #: Everything before this position is acknowledged.
        self.acknowledged = dict(starts)
        self.task = task
        self._writers = writers
        self._on_moved = on_moved
        self._on_failure = on_failure
        self._most_bytes = most_bytes
        self._in_flight: deque[_InFlight] = deque()
        self._target: tuple[int, Mapping[TopicPartition, int], Callable[[], bytes], ConfirmProgress] | None = None
        self._writing_progress = False
        self._retired = False

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, records: Sequence[Record]) -> Emits:
        """Let the task handle records, apart from other partitions."""
        try:
            return self.task.handle(records)
        except Exception:
            # The task promises not to raise. If it does, find the record: one bad record costs one dead letter, not
            # the list and not the worker. Handling a record again changes nothing, so the others may come twice.
            log.exception("partition %d: the processor raised on %d records", self.partition, len(records))
            return self._isolate(records)

    def _isolate(self, records: Sequence[Record]) -> Emits:
        together = Emits()
        survived = 0
        for record in records:
            try:
                emits = self.task.handle([record])
            except Exception as error:
                reason = f"the processor raised {type(error).__name__}: {error}"[:500]
                together.dead_letters.append(dead_letter(record, "invalid", reason, self._most_bytes))
                continue
            survived += 1
            together.journal += emits.journal
            together.dead_letters += emits.dead_letters
            together.changelog += emits.changelog
            together.decisions += emits.decisions
        if not survived and len(records) != 1:
            # The fault is not in a record. Going on would turn all traffic into dead letters.
            raise FailedError(
                f"partition {self.partition}: the processor failed on every one of {len(records)} records"
            )
        return together

    def write(self, emits: Emits, ends: Mapping[TopicPartition, int], size: int) -> None:
        """Write the results of `size` records; when they are durable, everything before `ends` is acknowledged."""
        writers = self._writers
        batches: list[WrittenBatch] = []
        last: WrittenBatch | None = None
        if emits.journal:
            batches += writers.journal.write(emits.journal)
        if emits.dead_letters:
            batches += writers.dead_letters.write_with_headers(emits.dead_letters)
        if emits.changelog:
            changelog = writers.changelog.write(emits.changelog)
            last = changelog[-1]
            batches += changelog
        if emits.decisions:
            batches += writers.decisions.write(emits.decisions)
        flight = _InFlight(ends, size, time.monotonic(), len(batches), last)
        self._in_flight.append(flight)
        durable = partial(self._on_batch, flight)
        for batch in batches:
            batch.future.add_done_callback(durable)
        if not batches:
            self._advance()

    def _on_batch(self, flight: _InFlight, future: asyncio.Future[Any]) -> None:
        # Called by the loop, which would only log an exception: here it has to reach the worker.
        if self._retired:
            return
        try:
            future.result()
            flight.waiting -= 1
            if not flight.waiting:
                self._advance()
        except (Exception, asyncio.CancelledError) as error:
            self._on_failure(error)  # this list stays where it is, and all behind it

    def _advance(self) -> None:
        now = time.monotonic()
        while self._in_flight and not self._in_flight[0].waiting:
            flight = self._in_flight.popleft()
            self.acknowledged.update(flight.ends)
            if (batch := flight.changelog) is not None:
                end = batch.future.result().offset + batch.record_count - 1
                self.changelog_end = max(self.changelog_end, end)
            self._on_moved(flight.size, now - flight.since)
        if self._target is not None:
            self._check_target()

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def needs_target(self) -> bool:
        """Whether the last progress is written. A lagging partition keeps its target and so holds time back."""
        return self._target is None and not self._writing_progress

    def set_target(
        self, written_at: int, ends: Mapping[TopicPartition, int], record: Callable[[], bytes], confirm: ConfirmProgress
    ) -> None:
        """Write what `record` returns, the progress up to `written_at`, once everything before `ends` is acknowledged.

        The task takes the progress if `confirm` does, which gets the broker's time of the record.
        """
        self._target = (written_at, ends, record, confirm)
        self._check_target()

    def _check_target(self) -> None:
        if self._target is None:
            return
        written_at, ends, record, confirm = self._target
        if any(self.acknowledged[tp] < end for tp, end in ends.items()):
            return
        self._target, self._writing_progress = None, True
        (batch,) = self._writers.journal.write([(None, record())])
        done = partial(self._on_progress, written_at, confirm)
        batch.future.add_done_callback(done)

    def _on_progress(self, written_at: int, confirm: ConfirmProgress, future: asyncio.Future[Any]) -> None:
        if self._retired:
            return
        try:
            written = future.result()
            self._writing_progress = False
            if confirm(broker_time(written), written_at=written_at):
                self.task.acknowledged(written_at)
            self.write(self.handle([]), {}, 0)
        except (Exception, asyncio.CancelledError) as error:
            self._on_failure(error)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def idle(self) -> bool:
        """Whether everything that was handled is acknowledged."""
        return not (self._in_flight or self._writing_progress)

    @property
    def oldest(self) -> float | None:
        """The time on the monotonic clock at which the oldest list in flight was handled."""
        return self._in_flight[0].since if self._in_flight else None

    def retire(self) -> None:
        """End: the partition is revoked, or its state is not valid any more. Batches in flight are ignored."""
        self._retired = True
        self.task.release()

    def rewind(self, starts: Mapping[TopicPartition, int]) -> None:
        """Start another generation at these positions, with the present state."""
        self.expected = dict(starts)
        self.acknowledged = dict(starts)
        self._target = None
