"""The seam between the worker and Kafka: lists of records in, batches of records out, positions acknowledged.

`Transport` is what the worker calls, `PartitionOwner` is what a transport calls. There are two transports: the one in
`worker.kafka.faust`, and one in memory for tests. Both call from a single event loop.

A transport goes through these steps in every generation of the consumer group:

1. `assign`: the group has assigned its partitions. The answer has those that keep their state.
2. `restore`: the changelogs of the others are read.
3. `open`: reading starts at the committed positions.
4. `take` for every poll, or `take_at_once`; what `committable` returns is committed from time to time.
5. `close` and `drained`: the group rebalances. What is acknowledged by then is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiokafka.structs import TopicPartition

from worker.stream.topology import MOST_BYTES, DeadLetter, Record

#: A coroutine that runs as long as the transport does.
Background = Callable[[], Awaitable[None]]


class RecordList(NamedTuple):
    """The records that one poll took from a partition: all between the positions `start` and `end`.

    `fetched` is the time on the monotonic clock at which they came. The positions are the consumer's, not those of the
    first and last record. Offsets may be missing between them (transaction markers, compaction), and a list without
    records can still move the position on.
    """

    tp: TopicPartition
    generation: int
    start: int
    end: int
    records: Sequence[Record]
    fetched: float = 0.0

    def after(self, offset: int) -> RecordList:
        """Return the part from `offset` on.

        >>> records = [Record("t", 0, offset, 0, None, b"") for offset in (4, 6)]
        >>> taken = RecordList(tp=TopicPartition("t", 0), generation=1, start=4, end=7, records=records)
        >>> taken.after(5).start, [record.offset for record in taken.after(5).records]
        (5, [6])
        """
        if offset <= self.start:
            return self
        kept = [record for record in self.records if record.offset >= offset]
        return self._replace(start=min(offset, self.end), records=kept)


class WrittenBatch(Protocol):
    """Records on their way to a partition.

    `future` resolves when all replicas have them, to a value whose `offset` is that of the first.
    """

    future: asyncio.Future[Any]
    record_count: int


class PartitionWriter(Protocol):
    """Writes to one partition of a topic, in the order of the calls. Each call returns the batches it wrote to."""

    def write(self, pairs: Iterable[tuple[bytes | None, bytes | None]]) -> Sequence[WrittenBatch]:
        """Append keys with values."""

    def write_with_headers(self, records: Iterable[DeadLetter]) -> Sequence[WrittenBatch]:
        """Append keys with values and headers."""


class PartitionOwner(Protocol):
    """The worker, as a transport sees it: the owner of the partitions that the group assigns to it."""

    def assign(self, generation: int, member: str, partitions: Iterable[int]) -> Mapping[int, int]:
        """Start a generation; return the partitions that keep their state, with the last changelog offset of each."""

    async def restore(self, tables: dict[int, dict[bytes, Record]], ends: Mapping[int, int]) -> None:
        """Take the session tables of the other partitions, and the last changelog offset of each that has one.

        A table has the last changelog record of each session.
        """

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

    def accepts(self, generation: int) -> bool:
        """Whether records of this generation may be read now."""

    async def take(self, lists: Sequence[RecordList]) -> None:
        """Handle the records of one poll; return when there is room for more."""

    @property
    def has_room(self) -> bool:
        """Whether `take` would handle records without waiting."""

    def take_at_once(self, lists: Sequence[RecordList]) -> None:
        """Handle the records of one poll, if `has_room`."""

    def skip(self, tp: TopicPartition, offset: int) -> None:
        """Continue at `offset`: the records before it were deleted from the topic."""

    def committable(self) -> Mapping[TopicPartition, int]:
        """Return the positions before which everything is acknowledged."""

    def close(self) -> None:
        """Take no more records: the partitions are about to be revoked."""

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 (running out of time is no error)
        """Wait until everything that was taken is acknowledged; return whether it is."""

    def fail(self, error: BaseException) -> None:
        """Stop for good: take nothing and commit nothing any more."""


class Transport(Protocol):
    """Kafka, as the worker sees it."""

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have assigned the partitions of this worker to others yet."""

    @property
    def can_write(self) -> bool:
        """Whether the metadata of the output topics is loaded."""

    def writer(self, topic: str, partition: int) -> PartitionWriter:
        """Return the writer of a partition."""

    def flush(self) -> None:
        """Send what was written; by itself, that happens at the end of this turn of the loop."""

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the end offsets of assigned partitions."""

    def read_again(self, tp: TopicPartition, offset: int) -> None:
        """Continue reading a partition at `offset`: records from there on were lost on the way."""

    def fail(self, error: BaseException) -> None:
        """End the process with an error and commit nothing."""

    def run(
        self, owner: PartitionOwner, *, partitions: int, background: Sequence[Background], most_bytes: int = MOST_BYTES
    ) -> int:
        """Run until SIGTERM or SIGINT (return 0) or a failure (return 1).

        The inputs have so many partitions; the outputs take batches of `most_bytes`.
        """
