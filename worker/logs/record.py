"""Record topics into a log, in the order of time.

Rules that hold in this file:

- A recording ends at offsets. End offsets are requested for the output of the workers first, and for their input last.
  So the log contains the causes of every record in it, although traffic continues.
- Parameters and their history are always read from the beginning of their topics: they have the versions that served.
- Memory is bounded: a partition that is far ahead of the others is paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.clients import partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.logs.format import NO_TIMESTAMP, Headers
from worker.logs.merge import TimeMerge
from worker.logs.recording import Recorded, Span, full_names
from worker.stream.topology import ONLY_PARTITION, Record, Topics

HOLD: Final = 500  # milliseconds that a live record waits for earlier records of other partitions
PATIENCE: Final = 30.0  # seconds without a record before the end offsets, after which recording fails
MEMORY: Final = 256 << 20  # bytes of records held for sorting
_LEAST_SHARE: Final = 2 << 20
_OVERHEAD: Final = 400  # bytes of a record in memory beside key and value
_POLL_MS: Final = 100

Write: TypeAlias = Callable[[Record, Headers], None]


class Recorder:
    """One recording, of the topics with these names (without prefix).

    `write` receives every record, in order. `report` receives the number of records of the recording (None: unknown)
    and the number just written. `flush` is called about once a second in a live recording.
    """

    def __init__(
        self,
        connection: Connection,
        topics: Topics,
        names: Sequence[str],
        span: Span,
        *,
        write: Write,
        report: Callable[[int | None, int], None] = lambda total, written: None,
        flush: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._connection = connection
        self._topics = full_names(topics, names)
        self._parameters = topics.parameters
        self._from_beginning = frozenset((topics.parameters, topics.parameters_history))
        self._span = span
        self._write, self._report, self._flush, self._clock = write, report, flush, clock
        self._tps: list[TopicPartition] = []
        self._starts: dict[TopicPartition, int] = {}
        self._limits: dict[TopicPartition, int] | None = None
        self._ended: set[TopicPartition] = set()
        self._total: int | None = None
        self.result = Recorded()

    async def run(self, stop: asyncio.Event) -> Recorded:
        """Record; when `stop` is set, end at the current end of the topics."""
        counts = await partition_counts(self._connection, *self._topics)
        self._tps = [TopicPartition(topic, p) for topic in self._topics for p in range(counts[topic])]
        async with standalone_consumer(self._connection, max_partition_fetch_bytes=1 << 20) as consumer:
            await self._record(consumer, stop)
        return self.result

    # ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _find_starts(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
        span, tps = self._span, self._tps
        starts: dict[TopicPartition, int] = dict(await consumer.beginning_offsets(tps))
        timed = [tp for tp in tps if tp.topic not in self._from_beginning]
        if span.start is not None:
            ends = await consumer.end_offsets(timed)
            starts |= {tp: min(max(starts[tp], span.start), ends[tp]) for tp in timed}
        elif span.since is not None:
            starts |= await _offsets_at(consumer, timed, span.since)
        return starts

    async def _find_limits(self, consumer: AIOKafkaConsumer, stopped: bool) -> dict[TopicPartition, int]:
        until = self._span.until
        limits: dict[TopicPartition, int] = {}
        for topic in self._topics:  # in the order of MADE_FIRST
            tps = [tp for tp in self._tps if tp.topic == topic]
            if until is None or stopped:
                limits |= await consumer.end_offsets(tps)
            else:
                limits |= await _offsets_at(consumer, tps, until)
        return limits

    def _is_due(self) -> bool:
        """Return whether the end is due without `stop`."""
        span = self._span
        return span.until <= self._clock() if span.until is not None else not span.live

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _record(self, consumer: AIOKafkaConsumer, stop: asyncio.Event) -> None:
        consumer.assign(self._tps)
        self._starts = await self._find_starts(consumer)
        for tp, start in self._starts.items():
            consumer.seek(tp, start)
        merge = TimeMerge[TopicPartition, Any](self._tps)
        share = max(_LEAST_SHARE, MEMORY // max(1, len(self._tps)))
        moved = flushed = time.monotonic()
        while True:
            if self._limits is None and (stop.is_set() or self._is_due()):
                self._set_limits(await self._find_limits(consumer, stop.is_set()))
            exhausted = await self._exhausted(consumer)
            self._write_ordered(merge, exhausted)
            if len(self._ended) == len(self._tps):
                break
            for tp in self._tps:
                if tp not in self._ended:
                    (consumer.pause if merge.weights[tp] > share else consumer.resume)(tp)
            fetched: Mapping[TopicPartition, list[Any]] = await consumer.getmany(timeout_ms=_POLL_MS)
            now = time.monotonic()
            for tp, records in fetched.items():
                merge.put(tp, [(record.timestamp, _size(record), record) for record in records])
            if fetched:
                moved = now
            elif self._limits is not None and now - moved > PATIENCE:
                raise FailedError(await self._stuck(consumer))
            if self._span.live and now - flushed > 1.0:
                self._flush()
                flushed = now
        self._count_gone()

    def _set_limits(self, limits: dict[TopicPartition, int]) -> None:
        """Set the offsets at which to end."""
        self._limits = limits
        self._total = sum(max(0, limits[tp] - start) for tp, start in self._starts.items())
        self._report(self._total, 0)

    async def _exhausted(self, consumer: AIOKafkaConsumer) -> set[TopicPartition]:
        """Return the partitions without further records; with limits, mark those that have reached theirs."""
        exhausted = set(self._ended)
        for tp in self._tps:
            if tp in self._ended:
                continue
            position = await consumer.position(tp)
            if self._limits is not None:
                if position >= self._limits[tp]:
                    self._ended.add(tp)
                    exhausted.add(tp)
                    consumer.pause(tp)
            else:
                # Records beyond may belong to a transaction that is not committed.
                end = consumer.last_stable_offset(tp)
                if end is not None and position >= end:
                    exhausted.add(tp)
        return exhausted

    def _write_ordered(self, merge: TimeMerge[TopicPartition, Any], exhausted: set[TopicPartition]) -> None:
        """Write the records whose order is certain."""
        result, limits, write = self.result, self._limits, self._write
        written = 0
        before = float("inf") if limits is not None else float(self._clock() - HOLD)
        for found in merge.take(exhausted, before):
            if limits is not None and found.offset >= limits[found.topic, found.partition]:
                continue
            stamp = NO_TIMESTAMP if found.timestamp is None else found.timestamp
            write(Record(found.topic, found.partition, found.offset, stamp, found.key, found.value), found.headers)
            result.counts[found.topic] += 1
            if stamp != NO_TIMESTAMP:
                result.first = stamp if result.first is None else min(result.first, stamp)
                result.last = stamp if result.last is None else max(result.last, stamp)
            written += 1
        if written:
            self._report(self._total, written)

    def _count_gone(self) -> None:
        """Count the versions that were removed from the topic."""
        if self._limits is not None and self._parameters in self._topics:
            tp = TopicPartition(self._parameters, ONLY_PARTITION)
            self.result.gone = self._limits[tp] - self.result.counts[self._parameters]

    async def _stuck(self, consumer: AIOKafkaConsumer) -> str:
        limits = self._limits or {}
        for tp in self._tps:
            position = await consumer.position(tp)
            if position < limits.get(tp, 0):
                where = f"{tp.topic}, partition {tp.partition}, from offset {position} to {limits[tp]}"
                return f"no record for {PATIENCE:.0f} s of {where}: is a transaction open, or a broker down?"
        return f"no record for {PATIENCE:.0f} s"


async def _offsets_at(
    consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition], moment: int
) -> dict[TopicPartition, int]:
    """Return the first offsets at or after a time, else the end offsets."""
    found = await consumer.offsets_for_times(dict.fromkeys(tps, moment))
    ends = await consumer.end_offsets(list(tps))
    return {tp: ends[tp] if found.get(tp) is None else found[tp].offset for tp in tps}


def _size(record: Any) -> int:
    return len(record.value or b"") + len(record.key or b"") + _OVERHEAD
