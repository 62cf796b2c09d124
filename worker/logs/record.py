"""Record topics into a log, in the order of time.

Rules that hold in this file:

- A recording ends at offsets. End offsets are requested for the output of the workers first, and for their input last.
  So the log contains the causes of every record in it, although traffic continues.
- Parameters and their history are always read from the beginning of their topics: they have the versions that served.
- Memory is bounded: a partition that is far ahead of the others is paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from worker.errors import FailedError
from worker.kafka.clients import (
    BEGINNING,
    END,
    TopicReader,
    offsets_of,
    partition_counts,
    readable_errors,
    record_of,
    topic_reader,
)
from worker.kafka.connection import Connection
from worker.logs.format import NO_TIMESTAMP, Headers
from worker.logs.merge import TimeMerge
from worker.logs.recording import Recorded, Span, full_names
from worker.stream.topology import ONLY_PARTITION, Record, Topics

HOLD: Final = 500  # milliseconds that a live record waits for earlier records of other partitions
PATIENCE: Final = 30.0  # seconds without a record before the end offsets, after which recording fails
MEMORY: Final = 256 << 20  # bytes of records held for sorting
_LEAST_SHARE: Final = 2 << 20
_OVERHEAD: Final = 400  # bytes of a record in memory without key and value
_POLL: Final = 0.1  # seconds

Write: TypeAlias = Callable[[Record, Headers], None]
#: A partition: topic and number.
Place: TypeAlias = tuple[str, int]


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
        self._places: list[Place] = []
        self._starts: dict[Place, int] = {}
        self._limits: dict[Place, int] | None = None
        self._ended: set[Place] = set()
        self._paused: set[Place] = set()
        self._total: int | None = None
        self.result = Recorded()

    def run(self, stopped: Callable[[], bool]) -> Recorded:
        """Record; once `stopped` returns true, end at the current end of the topics."""
        counts = partition_counts(self._connection, *self._topics)
        self._places = [(topic, partition) for topic in self._topics for partition in range(counts[topic])]
        with (
            readable_errors(self._connection),
            topic_reader(self._connection, fetch_message_max_bytes=1 << 20) as reader,
        ):
            self._record(reader, stopped)
        return self.result

    # ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find_starts(self, admin: AdminClient) -> dict[Place, int]:
        span = self._span
        starts = _offsets(admin, self._places, BEGINNING)
        timed = [place for place in self._places if place[0] not in self._from_beginning]
        if span.start is not None:
            ends = _offsets(admin, timed, END)
            starts |= {place: min(max(starts[place], span.start), ends[place]) for place in timed}
        elif span.since is not None:
            starts |= _offsets_at(admin, timed, span.since)
        return starts

    def _find_limits(self, admin: AdminClient, stopped: bool) -> dict[Place, int]:
        until = self._span.until
        limits: dict[Place, int] = {}
        for topic in self._topics:  # in the order of MADE_FIRST
            places = [place for place in self._places if place[0] == topic]
            if until is None or stopped:
                limits |= _offsets(admin, places, END)
            else:
                limits |= _offsets_at(admin, places, until)
        return limits

    def _is_due(self) -> bool:
        """Return whether the end is due without `stop`."""
        span = self._span
        return span.until <= self._clock() if span.until is not None else not span.live

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _record(self, reader: TopicReader, stopped: Callable[[], bool]) -> None:
        self._starts = self._find_starts(reader.admin)
        reader.read_from(self._starts)
        merge = TimeMerge[Place, tuple[Record, Headers]](self._places)
        moved = flushed = time.monotonic()
        while True:
            if self._limits is None and ((stop := stopped()) or self._is_due()):
                self._set_limits(self._find_limits(reader.admin, stop))
            self._write_ordered(merge, self._exhausted(reader))
            if len(self._ended) == len(self._places):
                break
            self._pause(reader, merge)
            messages = reader.poll(_POLL)
            now = time.monotonic()
            for message in messages:
                record, headers = record_of(message), tuple(message.headers() or ())
                merge.put((record.topic, record.partition), [(record.timestamp, _size(record), (record, headers))])
            if messages:
                moved = now
            elif self._limits is not None and now - moved > PATIENCE:
                raise FailedError(self._stuck(reader))
            if self._span.live and now - flushed > 1.0:
                self._flush()
                flushed = now
        self._count_gone()

    def _pause(self, reader: TopicReader, merge: TimeMerge[Place, tuple[Record, Headers]]) -> None:
        """Pause the partitions that are far ahead, and those that have ended."""
        share = max(_LEAST_SHARE, MEMORY // len(self._places))
        paused = {place for place in self._places if merge.weights[place] > share} | self._ended
        for place in paused - self._paused:
            reader.pause(*place)
        for place in self._paused - paused:
            reader.resume(*place)
        self._paused = paused

    def _set_limits(self, limits: dict[Place, int]) -> None:
        """Set the offsets at which to end."""
        self._limits = limits
        self._total = sum(max(0, limits[place] - start) for place, start in self._starts.items())
        self._report(self._total, 0)

    def _exhausted(self, reader: TopicReader) -> set[Place]:
        """Return the partitions without further records; with limits, mark those that have reached theirs."""
        if self._limits is None:
            return reader.at_end
        self._ended |= {place for place, position in reader.positions.items() if position >= self._limits[place]}
        return self._ended

    def _write_ordered(self, merge: TimeMerge[Place, tuple[Record, Headers]], exhausted: set[Place]) -> None:
        """Write the records whose order is certain."""
        result, limits, write = self.result, self._limits, self._write
        written = 0
        before = float("inf") if limits is not None else float(self._clock() - HOLD)
        for record, headers in merge.take(exhausted, before):
            if limits is not None and record.offset >= limits[record.topic, record.partition]:
                continue
            write(record, headers)
            result.counts[record.topic] += 1
            if (stamp := record.timestamp) != NO_TIMESTAMP:
                result.first = stamp if result.first is None else min(result.first, stamp)
                result.last = stamp if result.last is None else max(result.last, stamp)
            written += 1
        if written:
            self._report(self._total, written)

    def _count_gone(self) -> None:
        """Count the versions that were removed from the topic."""
        if self._limits is not None and self._parameters in self._topics:
            limit = self._limits[self._parameters, ONLY_PARTITION]
            self.result.gone = limit - self.result.counts[self._parameters]

    def _stuck(self, reader: TopicReader) -> str:
        limits = self._limits or {}
        for place, position in reader.positions.items():
            if position < limits.get(place, 0):
                where = f"{place[0]}, partition {place[1]}, from offset {position} to {limits[place]}"
                return f"no record for {PATIENCE:.0f} s of {where}: is a transaction open, or a broker down?"
        return f"no record for {PATIENCE:.0f} s"


def _offsets(admin: AdminClient, places: Collection[Place], spec: OffsetSpec) -> dict[Place, int]:
    return offsets_of(admin, [TopicPartition(*place) for place in places], spec)


def _offsets_at(admin: AdminClient, places: Collection[Place], moment: int) -> dict[Place, int]:
    """Return the first offsets at or after a time, else the end offsets."""
    ends = _offsets(admin, places, END)
    offsets = _offsets(admin, places, OffsetSpec.for_timestamp(moment))
    return {place: ends[place] if offset < 0 else offset for place, offset in offsets.items()}


def _size(record: Record) -> int:
    return len(record.value or b"") + len(record.key or b"") + _OVERHEAD
