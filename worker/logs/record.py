"""Record topics into a log, in the order of time.

Rules that hold in this file:

- A recording ends at offsets. End offsets are requested for the output of the workers first, and for their input last.
  So the log contains the causes of every record in it, although traffic continues.
- Parameters and their history are always read from the beginning of their topics: they have the versions that served.
- Memory is bounded: records wait in a temporary database for earlier ones of other partitions.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from confluent_kafka.admin import AdminClient, OffsetSpec

from worker.errors import FailedError
from worker.kafka.clients import BEGINNING, END, TopicReader, offsets_of, partition_counts, readable_errors, record_of
from worker.kafka.connection import Connection
from worker.logs.format import NO_TIMESTAMP, Headers, LogWriter, cannot_sort, encode_line, temporary_database
from worker.runtime.clock import wall_clock
from worker.stream.topology import ONLY_PARTITION, Record, Topics

HOLD: Final = 500  # milliseconds that a live record waits for earlier records of other partitions
PATIENCE: Final = 30.0  # seconds without a record before the end offsets, after which recording fails
_POLL: Final = 0.1  # seconds

#: The order of requests for end offsets: decisions follow from parameters, these from the journal, that from traffic.
MADE_FIRST: Final = (
    "decisions",
    "episodes",
    "dead-letters",
    "parameters-history",
    "parameters",
    "journal",
    "clicks",
    "arrivals",
)

#: A partition: topic and number.
Place: TypeAlias = tuple[str, int]

_TABLES: Final = """
    CREATE TABLE waiting (time, place, offset, timestamp, line, PRIMARY KEY (time, place, offset)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The span of a recording; times in milliseconds since the epoch.

    It begins at the offset `start` of every partition, at the time `since`, or at the beginning. It ends at the time
    `until`, or at the end of the topics when it begins; a `live` one ends when it is stopped.
    """

    start: int | None = None
    since: int | None = None
    until: int | None = None
    live: bool = False


@dataclass(slots=True, kw_only=True)
class Recorded:
    """The result; `gone` counts records of the parameters that compaction or retention has removed."""

    counts: Counter[str] = field(default_factory=Counter)  # by topic
    gone: int = 0
    first: int | None = None
    last: int | None = None

    @property
    def records(self) -> int:
        """Number of all records."""
        return self.counts.total()


class TimeOrder:
    """Hold the records of several partitions until no other partition can still deliver an earlier one.

    A partition keeps its order: a record with an earlier timestamp than its predecessor gets the predecessor's time.

    >>> order = TimeOrder([("clicks", 0), ("clicks", 1)])
    >>> for partition, offset, time in (0, 1, 10), (0, 2, 50), (1, 1, 40), (1, 2, 20):
    ...     order.add(Record("clicks", partition, offset, time, None, None))
    >>> [(place, offset) for place, offset, _, _ in order.drain()]
    [(('clicks', 0), 1)]
    >>> [(place, offset) for place, offset, _, _ in order.drain(exhausted=[("clicks", 0), ("clicks", 1)])]
    [(('clicks', 1), 1), (('clicks', 1), 2), (('clicks', 0), 2)]
    >>> order.close()
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._indices = {place: index for index, place in enumerate(places)}
        self._latest: dict[Place, float] = dict.fromkeys(places, -inf)
        self._database = temporary_database(_TABLES)

    def close(self) -> None:
        """Remove the database."""
        self._database.close()

    def add(self, record: Record, headers: Headers = ()) -> None:
        """Add the next record of its partition."""
        place = record.topic, record.partition
        time = self._latest[place] = max(self._latest[place], record.timestamp)
        row = time, self._indices[place], record.offset, record.timestamp, encode_line(record, headers)
        try:
            self._database.execute("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise cannot_sort(error) from None

    def drain(self, exhausted: Collection[Place] = (), before: float = inf) -> Iterator[tuple[Place, int, int, bytes]]:
        """Yield partition, offset, timestamp and line of the records whose order is certain, and remove them.

        `exhausted` partitions have no more records for the time being, so no record waits for them. Records with a
        time at or after `before` stay.
        """
        bound = min((time for place, time in self._latest.items() if place not in exhausted), default=inf)
        bound = min(bound, before)
        columns, rows = "place, offset, timestamp, line", "FROM waiting WHERE time < ?"
        try:
            for place, *rest in self._database.execute(
                f"SELECT {columns} {rows} ORDER BY time, place, offset", [bound]
            ):
                yield self._places[place], *rest
            self._database.execute(f"DELETE {rows}", [bound])
        except sqlite3.Error as error:
            raise cannot_sort(error) from None


class Recorder:
    """One recording, of the topics with these names (without prefix); raise `FailedError` if one does not exist."""

    def __init__(self, connection: Connection, topics: Topics, names: Collection[str], span: Span) -> None:
        self._connection = connection
        self._topics = [f"{topics.prefix}.{name}" for name in MADE_FIRST if name in names]
        self._parameters = topics.parameters
        self._from_beginning = frozenset((topics.parameters, topics.parameters_history))
        self._span = span
        counts = partition_counts(connection, *self._topics)
        self._places = [(topic, partition) for topic in self._topics for partition in range(counts[topic])]
        self._starts: dict[Place, int] = {}
        self._limits: dict[Place, int] | None = None
        self._ended: set[Place] = set()
        self._total: int | None = None
        self.result = Recorded()

    def run(self, log: LogWriter, stopped: Callable[[], bool], report: Callable[[int | None, int], None]) -> Recorded:
        """Record; once `stopped` returns true, end at the current end of the topics.

        `report` receives the number of records of the recording (None: unknown) and the number just written.
        """
        with (
            readable_errors(self._connection),
            TopicReader(self._connection, fetch_message_max_bytes=1 << 20) as reader,
            closing(TimeOrder(self._places)) as order,
        ):
            self._starts = self._find_starts(reader.admin)
            reader.read_from(self._starts)
            moved = flushed = time.monotonic()
            while True:
                if self._limits is None and ((stop := stopped()) or self._is_due()):
                    self._limits = self._find_limits(reader.admin, stop)
                    self._total = sum(max(0, self._limits[place] - start) for place, start in self._starts.items())
                    report(self._total, 0)
                written = self._write_ordered(log, order, self._exhausted(reader))
                if written:
                    report(self._total, written)
                if len(self._ended) == len(self._places):
                    break
                messages = reader.poll(_POLL)
                now = time.monotonic()
                for message in messages:
                    order.add(record_of(message), tuple(message.headers() or ()))
                if messages:
                    moved = now
                elif self._limits is not None and now - moved > PATIENCE:
                    raise FailedError(self._stuck(reader))
                if self._span.live and now - flushed > 1.0:
                    log.flush()
                    flushed = now
        self._count_gone()
        return self.result

    # ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find_starts(self, admin: AdminClient) -> dict[Place, int]:
        span = self._span
        starts = offsets_of(admin, self._places, BEGINNING)
        timed = [place for place in self._places if place[0] not in self._from_beginning]
        if span.start is not None:
            ends = offsets_of(admin, timed, END)
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
                limits |= offsets_of(admin, places, END)
            else:
                limits |= _offsets_at(admin, places, until)
        return limits

    def _is_due(self) -> bool:
        """Return whether the end is due without `stop`."""
        span = self._span
        return span.until <= wall_clock() if span.until is not None else not span.live

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _exhausted(self, reader: TopicReader) -> set[Place]:
        """Return the partitions without further records; with limits, mark those that have reached theirs."""
        if self._limits is None:
            return reader.at_end
        for place, position in reader.positions.items():
            if position >= self._limits[place] and place not in self._ended:
                self._ended.add(place)
                reader.pause(*place)
        return self._ended

    def _write_ordered(self, log: LogWriter, order: TimeOrder, exhausted: set[Place]) -> int:
        """Write the records whose order is certain; return their number."""
        result, limits, before = self.result, self._limits, log.lines
        for place, offset, stamp, line in order.drain(exhausted, inf if limits is not None else wall_clock() - HOLD):
            if limits is not None and offset >= limits[place]:
                continue
            log.write_line(line)
            result.counts[place[0]] += 1
            if stamp != NO_TIMESTAMP:
                result.first = stamp if result.first is None else min(result.first, stamp)
                result.last = stamp if result.last is None else max(result.last, stamp)
        return log.lines - before

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


def _offsets_at(admin: AdminClient, places: Collection[Place], moment: int) -> dict[Place, int]:
    """Return the first offsets at or after a time, else the end offsets."""
    ends = offsets_of(admin, places, END)
    offsets = offsets_of(admin, places, OffsetSpec.for_timestamp(moment))
    return {place: ends[place] if offset < 0 else offset for place, offset in offsets.items()}
