"""Reads topics into a log, in the order of time, from somewhere to somewhere or as they grow.

Rules that hold in this file:

- A recording ends at offsets, and these are asked for in a certain order: first of what the workers make, last of what
  they are given. So everything that a record in the log rests on is in the log too, though traffic goes on.
- Parameters are always read from the beginning of their topic: it is small, and whatever serves is in it.
- Memory is bounded: a partition that is far ahead of the others has to wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.clients import partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.logs.format import NO_TIMESTAMP, Headers
from worker.logs.merge import TimeMerge
from worker.stream.topology import Record, Topics

#: In this order ends are asked for: a decision rests on parameters, these on the journal, that on clicks and arrivals.
MADE_FIRST: Final = ("decisions", "episodes", "dead-letters", "parameters", "journal", "clicks", "arrivals")

HOLD: Final = 500  # milliseconds that a live record waits for earlier ones of other partitions
PATIENCE: Final = 30.0  # seconds without a record before the end, after which it will not come
MEMORY: Final = 256 << 20  # bytes of records held to be put in order
_LEAST_SHARE: Final = 2 << 20
_OVERHEAD: Final = 400  # bytes of a record in memory beside key and value
_POLL_MS: Final = 100

Write: TypeAlias = Callable[[Record, Headers], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is recorded, in milliseconds since the epoch.

    From the offset `start` of every partition, or from the time `since`, else from the beginning; until the time
    `until`, else to what is the end at the start; `live` goes on until it is told to stop.
    """

    start: int | None = None
    since: int | None = None
    until: int | None = None
    live: bool = False


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What came of it; `gone` are records of the parameters that compaction or retention took away."""

    counts: Counter[str] = field(default_factory=Counter)  # by topic
    gone: int = 0
    first: int | None = None
    last: int | None = None

    @property
    def records(self) -> int:
        """All records."""
        return self.counts.total()


def full_names(topics: Topics, names: Iterable[str]) -> list[str]:
    """Return topics by their names without prefix, in the order in which their ends are asked for."""
    wanted = set(names)
    return [f"{topics.prefix}.{name}" for name in MADE_FIRST if name in wanted]


class Recorder:
    """One recording.

    Parameters
    ----------
    topics : with their prefix
    names : of those recorded, without it
    write : gets every record, in order
    tell : hears how many records there will be (None: nobody knows), and how many more were written
    flush : called about once a second while it is live
    clock : milliseconds since the epoch
    """

    def __init__(
        self,
        connection: Connection,
        topics: Topics,
        names: Sequence[str],
        span: Span,
        *,
        write: Write,
        tell: Callable[[int | None, int], None] = lambda total, written: None,
        flush: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._connection = connection
        self._topics = full_names(topics, names)
        self._parameters = topics.parameters
        self._span = span
        self._write, self._tell, self._flush, self._clock = write, tell, flush, clock
        self._tps: list[TopicPartition] = []
        self._starts: dict[TopicPartition, int] = {}
        self._limits: dict[TopicPartition, int] | None = None
        self._ended: set[TopicPartition] = set()
        self._total: int | None = None
        self.result = Recorded()

    async def run(self, stop: asyncio.Event) -> Recorded:
        """Record; when `stop` is set, to what is the end then."""
        counts = await partition_counts(self._connection, *self._topics)
        self._tps = [TopicPartition(topic, p) for topic in self._topics for p in range(counts[topic])]
        async with standalone_consumer(self._connection, max_partition_fetch_bytes=1 << 20) as consumer:
            await self._record(consumer, stop)
        return self.result

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _find_starts(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
        span, tps = self._span, self._tps
        starts: dict[TopicPartition, int] = dict(await consumer.beginning_offsets(tps))
        timed = [tp for tp in tps if tp.topic != self._parameters]
        if span.start is not None:
            ends = await consumer.end_offsets(timed)
            starts |= {tp: min(max(starts[tp], span.start), ends[tp]) for tp in timed}
        elif span.since is not None:
            starts |= await _offsets_at(consumer, timed, span.since)
        return starts

    async def _find_limits(self, consumer: AIOKafkaConsumer, stopped: bool) -> dict[TopicPartition, int]:
        until = self._span.until
        limits: dict[TopicPartition, int] = {}
        for topic in self._topics:  # one after the other: see MADE_FIRST
            tps = [tp for tp in self._tps if tp.topic == topic]
            if until is None or stopped:
                limits |= await consumer.end_offsets(tps)
            else:
                limits |= await _offsets_at(consumer, tps, until)
        return limits

    def _is_time(self) -> bool:
        """Say whether the end has come by itself."""
        span = self._span
        return span.until <= self._clock() if span.until is not None else not span.live

    # ── what ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _record(self, consumer: AIOKafkaConsumer, stop: asyncio.Event) -> None:
        consumer.assign(self._tps)
        self._starts = await self._find_starts(consumer)
        for tp, start in self._starts.items():
            consumer.seek(tp, start)
        merge = TimeMerge[TopicPartition, Any](self._tps)
        share = max(_LEAST_SHARE, MEMORY // max(1, len(self._tps)))
        moved = flushed = time.monotonic()
        while True:
            if self._limits is None and (stop.is_set() or self._is_time()):
                self._close(await self._find_limits(consumer, stop.is_set()))
            exhausted = await self._exhausted(consumer)
            self._put_down(merge, exhausted)
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

    def _close(self, limits: dict[TopicPartition, int]) -> None:
        """Take note of where to end."""
        self._limits = limits
        self._total = sum(max(0, limits[tp] - start) for tp, start in self._starts.items())
        self._tell(self._total, 0)

    async def _exhausted(self, consumer: AIOKafkaConsumer) -> set[TopicPartition]:
        """Return the partitions that have brought all they have; with limits, note those that are done for good."""
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
                # Up to there it can be read: beyond may lie a transaction that is not committed.
                end = consumer.last_stable_offset(tp)
                if end is not None and position >= end:
                    exhausted.add(tp)
        return exhausted

    def _put_down(self, merge: TimeMerge[TopicPartition, Any], exhausted: set[TopicPartition]) -> None:
        """Write what is in order."""
        result, limits, write = self.result, self._limits, self._write
        written = 0
        before = float("inf") if limits is not None else float(self._clock() - HOLD)
        for found in merge.take(exhausted, before):
            if limits is not None and found.offset >= limits[found.topic, found.partition]:
                continue
            stamp = NO_TIMESTAMP if found.timestamp is None else found.timestamp
            write(
                Record(found.topic, found.partition, found.offset, stamp, found.key, found.value),
                found.headers,
            )
            result.counts[found.topic] += 1
            if stamp != NO_TIMESTAMP:
                result.first = stamp if result.first is None else min(result.first, stamp)
                result.last = stamp if result.last is None else max(result.last, stamp)
            written += 1
        if written:
            self._tell(self._total, written)

    def _count_gone(self) -> None:
        """Count the versions that were in the topic once and are no more."""
        if self._limits is not None and self._parameters in self._topics:
            tp = TopicPartition(self._parameters, 0)
            self.result.gone = self._limits[tp] - self.result.counts[self._parameters]

    async def _stuck(self, consumer: AIOKafkaConsumer) -> str:
        limits = self._limits or {}
        for tp in self._tps:
            position = await consumer.position(tp)
            if position < limits.get(tp, 0):
                where = f"{tp.topic}, partition {tp.partition}, from offset {position} to {limits[tp]}"
                return f"nothing has come for {PATIENCE:.0f} s of {where}: is a transaction open, or a broker down?"
        return f"nothing has come for {PATIENCE:.0f} s"


async def _offsets_at(
    consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition], moment: int
) -> dict[TopicPartition, int]:
    """Return the first offsets at or after a time; the end where there is nothing."""
    found = await consumer.offsets_for_times(dict.fromkeys(tps, moment))
    ends = await consumer.end_offsets(list(tps))
    return {tp: ends[tp] if found.get(tp) is None else found[tp].offset for tp in tps}


def _size(record: Any) -> int:
    return len(record.value or b"") + len(record.key or b"") + _OVERHEAD
