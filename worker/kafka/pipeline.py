"""The lane of a partition: lists of records through the task, and what comes out of them written in the right order.

Rules that hold here:

1. Per list: journal, dead letters and changelog; when they are acknowledged, decisions; when those are, the list is
   acknowledged, and only then may its offsets be committed.
2. Lists overtake each other at no stage, but the next is handled while the ones before are still being written.
3. Progress is written when everything before the end offsets that were read after the clock is acknowledged.
4. A write that fails fails the worker. Nothing that came after it is ever acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from faust.types import TP

from worker.errors import FailedError
from worker.kafka.transport import Emits, PartitionTask, Record
from worker.kafka.writer import TopicWriter
from worker.stream.topology import dead_letter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWriters:
    """Where a lane writes: the journal is shared by all lanes, changelog and decisions are its own partition."""

    journal: TopicWriter
    dead_letters: TopicWriter
    changelog: TopicWriter
    decisions: TopicWriter


@dataclass(slots=True, eq=False)
class _Flight:
    """A handled list on its way to the broker; `waiting` counts the batches of its present stage."""

    ends: Mapping[TP, int]
    size: int
    since: float
    decisions: list[tuple[bytes, bytes]] = field(default_factory=list)
    waiting: int = 0


class Lane:
    """One assigned partition in one or more generations of the group.

    Parameters
    ----------
    partition, task
        The partition number and the processor that serves it.
    outlets
        Where to write.
    starts
        The committed position of each input partition, where reading begins.
    moved
        Called when a list has come a stage further, with how many records are thereby acknowledged.
    failed
        Called with the error when a write fails.
    """

    def __init__(
        self,
        *,
        partition: int,
        task: PartitionTask,
        outlets: PipelineWriters,
        starts: Mapping[TP, int],
        changelog_end: int,
        moved: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.partition = partition
        #: The last changelog offset that the task's state contains.
        self.changelog_end = changelog_end
        #: The position that has to come next, by input partition.
        self.expected = dict(starts)
        #: Everything before this position is acknowledged.
        self.acknowledged = dict(starts)
        self.task = task
        self._outlets = outlets
        self._moved = moved
        self._failed = failed
        self._writing: deque[_Flight] = deque()
        self._deciding: deque[_Flight] = deque()
        self._target: tuple[int, Mapping[TP, int], tuple[bytes | None, bytes]] | None = None
        self._reporting = False
        #: Set when the partition has gone; what is still under way then lands unheard.
        self.retired = False

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, records: Sequence[Record]) -> Emits:
        """Let the task handle records by themselves."""
        try:
            return self.task.handle(records)
        except Exception:
            # The processor promises not to raise. If it does, find out on what: one bad record costs one dead letter,
            # not the list and not the worker. Stepping a record again changes nothing, so the others may come twice.
            log.exception("partition %d: the processor raised on %d records", self.partition, len(records))
            return self._isolate(records)

    def _isolate(self, records: Sequence[Record]) -> Emits:
        together = Emits()
        survived = 0
        for record in records:
            try:
                emits = self.task.handle([record])
            except Exception as error:
                blame = f"the processor raised {type(error).__name__}: {error}"[:500]
                together.dead_letters.append(dead_letter(record, "invalid", blame))
                continue
            survived += 1
            together.journal += emits.journal
            together.dead_letters += emits.dead_letters
            together.changelog += emits.changelog
            together.decisions += emits.decisions
        if not survived and len(records) != 1:
            # Not a bad record, then. To go on would turn all traffic into dead letters.
            raise FailedError(
                f"partition {self.partition}: the processor failed on every one of {len(records)} records"
            )
        return together

    def launch(self, emits: Emits, ends: Mapping[TP, int], size: int) -> None:
        """Write what so many records called for; when that is durable, all before `ends` is acknowledged."""
        outlets = self._outlets
        flight = _Flight(ends, size, asyncio.get_running_loop().time(), emits.decisions)
        self._writing.append(flight)
        batches: list[Any] = []
        if emits.journal:
            batches += outlets.journal.write(emits.journal)
        if emits.dead_letters:
            batches += outlets.dead_letters.write_with_headers(emits.dead_letters)
        if emits.changelog:
            changelog = outlets.changelog.write(emits.changelog)
            changelog[-1].future.add_done_callback(partial(self._on_changelog, changelog[-1]))
            batches += changelog
        self._follow(flight, batches)

    def _follow(self, flight: _Flight, batches: list[Any]) -> None:
        flight.waiting = len(batches)
        for batch in batches:
            batch.future.add_done_callback(partial(self._when_durable, partial(self._on_batch, flight)))
        if not batches:
            self._advance()

    def _when_durable(self, then: Callable[[], None], future: asyncio.Future[Any]) -> None:
        # Called by the loop, which would only log an exception: here it has to reach the worker.
        if self.retired:
            return
        try:
            future.result()
            then()
        except (Exception, asyncio.CancelledError) as error:
            self._failed(error)  # the flight stays where it is, and everything behind it with it

    def _on_batch(self, flight: _Flight) -> None:
        flight.waiting -= 1
        if not flight.waiting:
            self._advance()

    def _on_changelog(self, batch: Any, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.changelog_end = max(self.changelog_end, future.result().offset + batch.record_count - 1)

    def _advance(self) -> None:
        while self._writing and not self._writing[0].waiting:
            flight = self._writing.popleft()
            self._deciding.append(flight)
            self._moved(0)
            if flight.decisions:
                batches = self._outlets.decisions.write(flight.decisions)
                flight.decisions = []
                self._follow(flight, list(batches))
        while self._deciding and not self._deciding[0].waiting:
            flight = self._deciding.popleft()
            self.acknowledged.update(flight.ends)
            self._moved(flight.size)
        self._check_target()

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def wants_target(self) -> bool:
        """Whether the last progress is written; a lagging partition keeps its target, and so holds time back."""
        return self._target is None and not self._reporting

    def aim(self, time: int, ends: Mapping[TP, int], record: tuple[bytes | None, bytes]) -> None:
        """Write `record`, the progress up to `time`, once everything before `ends` is acknowledged."""
        self._target = (time, ends, record)
        self._check_target()

    def _check_target(self) -> None:
        if self._target is None:
            return
        time, ends, record = self._target
        if any(self.acknowledged[tp] < end for tp, end in ends.items()):
            return
        self._target, self._reporting = None, True
        (batch,) = self._outlets.journal.write([record])
        batch.future.add_done_callback(partial(self._when_durable, partial(self._on_progress, time)))

    def _on_progress(self, time: int) -> None:
        self._reporting = False
        self.task.acknowledged(time)
        self.launch(self.step([]), {}, 0)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def writing(self) -> bool:
        """Whether decisions wait for their facts to be durable."""
        return bool(self._writing)

    @property
    def idle(self) -> bool:
        """Whether everything that was handled is acknowledged."""
        return not (self._writing or self._deciding or self._reporting)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest list is under way, on the loop's clock."""
        return (self._deciding or self._writing)[0].since if self._deciding or self._writing else None

    def retire(self) -> None:
        """End: the partition has gone, or its state is no longer good."""
        self.retired = True
        self.task.release()

    def rewind(self, starts: Mapping[TP, int]) -> None:
        """Begin another generation at these positions, with the state as it is."""
        self.expected = dict(starts)
        self.acknowledged = dict(starts)
        self._target = None
