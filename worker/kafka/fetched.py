"""What was fetched of a partition, unpacked in one go where that is plain.

aiokafka and `worker.kafka.unpacking` unpack a record at a time, through a generator that is ready for compressed
batches, transactions and damage. What a client sends to a live worker is a batch of one or two records with nothing of
that, and there are four such partitions in a poll.
"""

from __future__ import annotations

from typing import Any, Final

from aiokafka.consumer.fetcher import FetchResult
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from worker.kafka.unpacking import BoundedFetchResult, BoundedPartitionRecords, KeptRecords, poll_is_full
from worker.stream.topology import Record

#: Bits of a batch's attributes: its codec, whether it is of a transaction, and whether it is a marker.
_NOT_PLAIN: Final = 0b110111
_new = tuple.__new__


def plain_records(
    tp: TopicPartition, data: bytes, position: int, most: int, *, check_crcs: bool
) -> tuple[list[Record], int] | None:
    """Return the records from a position on, and the position after them; None unless all is plain and not too much.

    The same as `BoundedPartitionRecords` gives, for batches of the present format that are not compressed, not of a
    transaction, and not damaged.
    """
    topic, partition = tp
    taken: list[Record] = []
    batches = MemoryRecords(data)
    try:
        while (batch := batches.next_batch()) is not None:
            if type(batch) is not DefaultRecordBatch or batch.attributes & _NOT_PLAIN:
                return None
            most -= batch.last_offset_delta + 1
            if most < 0 or (check_crcs and not batch.validate_crc()):
                return None
            for record in batch:
                offset = record.offset
                # A batch may begin before the position, and a compacted one has gaps.
                if offset >= position:
                    taken.append(_new(Record, (topic, partition, offset, record.timestamp, record.key, record.value)))
                    position = offset + 1
            if batch.next_offset > position:
                position = batch.next_offset
    except Exception:  # damaged in some way: the careful reader finds out what can be read
        return None
    return taken, position


class FetchedPartition:
    """What was fetched of a partition from a position on.

    Parameters
    ----------
    fetcher : the fetcher that holds this
    assignment, tp, state : of which partition it is
    position : where it begins
    data : the batches, at least one of them whole
    created : when it came, a time of the monotonic clock
    """

    __slots__ = ("_assignment", "_created", "_data", "_fetcher", "_position", "_state", "tp")

    def __init__(
        self,
        fetcher: Any,
        assignment: Any,
        tp: TopicPartition,
        state: Any,
        *,
        position: int,
        data: bytes,
        created: float,
    ) -> None:
        self._fetcher, self._assignment, self.tp, self._state = fetcher, assignment, tp, state
        self._position, self._data, self._created = position, data, created

    def take(self, most: int) -> list[Record] | None:
        """Return all records and move the position on; None if this has to be read carefully."""
        state, position = self._state, self._position
        if state._position != position or state._paused or not self._assignment.active or poll_is_full():
            return None
        found = plain_records(self.tp, self._data, position, most, check_crcs=self._fetcher._check_crcs)
        if found is None:
            return None
        taken, position = found
        state.consumed_to(position)
        return taken

    def careful(self) -> FetchResult:
        """Return the same as aiokafka holds it."""
        fetcher = self._fetcher
        records = BoundedPartitionRecords(
            self.tp,
            KeptRecords(self._data),
            None,
            self._position,
            fetcher._key_deserializer,
            fetcher._value_deserializer,
            fetcher._check_crcs,
            fetcher._isolation_level,
        )
        held = BoundedFetchResult(
            self.tp, assignment=self._assignment, partition_records=records, backoff=fetcher._prefetch_backoff
        )
        held._created = self._created
        return held

    def calculate_backoff(self) -> float:
        """Return the seconds for which aiokafka waits for these records to be taken."""
        waits: float = self.careful().calculate_backoff()
        return waits
