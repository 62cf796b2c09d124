"""A list of records of one partition, and how aiokafka is brought to give one quickly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from worker.kafka.transport import Record

if TYPE_CHECKING:
    from faust.types import TP  # takes half a second to import, and the learner does without


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordList:
    """What one poll took from a partition: everything between the positions `start` and `end`.

    The positions are the consumer's, not those of the first and last record: between them offsets may be missing
    (transaction markers, compaction), and a list may have no records at all and still move the position on.
    """

    tp: TP
    generation: int
    start: int
    end: int
    records: Sequence[Record]

    def after(self, offset: int) -> RecordList:
        """Return the part from `offset` on.

        >>> from faust.types import TP
        >>> records = [Record("t", 0, offset, 0, None, b"") for offset in (4, 6)]
        >>> taken = RecordList(tp=TP("t", 0), generation=1, start=4, end=7, records=records)
        >>> taken.after(5).start, [record.offset for record in taken.after(5).records]
        (5, [6])
        """
        if offset <= self.start:
            return self
        kept = [record for record in self.records if record.offset >= offset]
        return replace(self, start=min(offset, self.end), records=kept)

    def followed_by(self, later: RecordList) -> RecordList:
        """Return this list and a later one as one; the later alone if it does not begin where this one ends.

        >>> from faust.types import TP
        >>> first = RecordList(tp=TP("t", 0), generation=1, start=4, end=7, records=())
        >>> first.followed_by(replace(first, start=7, end=9)).start
        4
        >>> first.followed_by(replace(first, start=5, end=9)).start
        5
        """
        if later.start != self.end or later.generation != self.generation:
            return later  # somebody has moved the position meanwhile; what is missing will be noticed
        return replace(later, start=self.start, records=[*self.records, *later.records])


def plain(record: Any) -> Record:
    """Return what matters of an aiokafka record."""
    if type(record) is Record:
        return record
    return Record(record.topic, record.partition, record.offset, record.timestamp, record.key, record.value)


_new = tuple.__new__


def _unpacked(tp: Any, record: Any) -> Record:
    return _new(Record, (tp.topic, tp.partition, record.offset, record.timestamp, record.key, record.value))


def unpack_lean(fetcher: Any) -> None:
    """Let all that an aiokafka fetcher holds be unpacked as `Record`.

    The records of aiokafka have eleven fields, each set by a call: that was 3 of the 21 µs that a worker spends on an
    event, twice over, as the learner reads them too. What is fetched later comes as aiokafka has it (see `plain`).
    """
    for fetched in fetcher._records.values():
        held = getattr(fetched, "_partition_records", None)  # none in an error
        if held is not None:
            held._consumer_record = _unpacked


async def next_records(consumer: Any, *, seconds: float, most: int | None = None) -> dict[Any, list[Record]]:
    """Return what an aiokafka consumer has, by partition; wait so many seconds for it if there is nothing."""
    fetcher = consumer._fetcher
    if not fetcher._records:
        waiter = fetcher._create_fetch_waiter()
        done, _ = await asyncio.wait([waiter], timeout=seconds)
        if not done:
            waiter.cancel()
            return {}
        waiter.result()
    unpack_lean(fetcher)
    fetched = await consumer.getmany(timeout_ms=0, max_records=most)
    return {tp: [plain(record) for record in records] for tp, records in fetched.items()}
