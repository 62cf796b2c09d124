"""Record topics into a log, as their records come.

Rules that hold in this file:

- A recording ends at offsets. End offsets are requested for the output of the workers first, and for their input last.
  So the log contains the causes of every record in it, although traffic continues.
- Parameters and their history are always read from the beginning of their topics: they have the versions that served.
- Every partition keeps its order. Readers of a log sort it by time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from confluent_kafka import Message
from confluent_kafka.admin import AdminClient, OffsetSpec

from worker.kafka.clients import BEGINNING, END, TopicReader, offsets_of, partition_counts, readable_errors, record_of
from worker.kafka.connection import Connection
from worker.logs.format import NO_TIMESTAMP, Headers
from worker.runtime.clock import wall_clock
from worker.stream.topology import Record, Topics

_BATCH: Final = 1000  # records
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The span of a recording; times in milliseconds since the epoch.

    It begins at the time `since`, or at the beginning. It ends at the time `until`, or at the end of the topics when it
    begins; a `live` one ends when it is stopped.
    """

    since: int | None = None
    until: int | None = None
    live: bool = False

    def is_over(self) -> bool:
        """Return whether the end is reached without being stopped."""
        return self.until <= wall_clock() if self.until is not None else not self.live


@dataclass(slots=True, kw_only=True)
class Recorded:
    """The result: records by topic, and their first and last timestamps."""

    counts: Counter[str] = field(default_factory=Counter)
    first: int | None = None
    last: int | None = None


class Recorder:
    """One recording, of the topics with these names (without prefix); raise `FailedError` if one does not exist."""

    def __init__(self, connection: Connection, topics: Topics, names: Collection[str], span: Span) -> None:
        self._connection = connection
        self._topics = [f"{topics.prefix}.{name}" for name in MADE_FIRST if name in names]
        self._from_beginning = frozenset((topics.parameters, topics.parameters_history))
        self._span = span
        counts = partition_counts(connection, *self._topics)
        self._places = [(topic, partition) for topic in self._topics for partition in range(counts[topic])]
        self.result = Recorded()

    def run(
        self,
        log: Callable[[Record, Headers], None],
        stopped: Callable[[], bool],
        report: Callable[[int | None, int], None],
    ) -> Recorded:
        """Record; once `stopped` returns true, end at the current end of the topics.

        `report` receives the number of records of the recording (None: unknown) and the number just written.
        """
        with (
            readable_errors(self._connection),
            TopicReader(self._connection, fetch_message_max_bytes=1 << 20) as reader,
        ):
            starts = self._find_starts(reader.admin)
            reader.read_from(starts)
            while not ((stop := stopped()) or self._span.is_over()):
                messages = reader.poll(_POLL)
                self._write(log, messages)
                report(None, len(messages))
            limits, positions = self._find_limits(reader.admin, stop), dict(reader.positions)
            total = sum(max(0, limits[place] - start) for place, start in starts.items())
            report(total, 0)
            rest = reader.messages_between(positions, limits)
            while messages := list(islice(rest, _BATCH)):
                self._write(log, messages)
                report(total, len(messages))
        return self.result

    def _write(self, log: Callable[[Record, Headers], None], messages: Iterable[Message]) -> None:
        result, until = self.result, self._span.until
        for message in messages:
            record = record_of(message)
            if until is not None and record.timestamp >= until:
                continue
            log(record, tuple(message.headers() or ()))
            result.counts[record.topic] += 1
            if (stamp := record.timestamp) != NO_TIMESTAMP:
                result.first = stamp if result.first is None else min(result.first, stamp)
                result.last = stamp if result.last is None else max(result.last, stamp)

    # ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find_starts(self, admin: AdminClient) -> dict[Place, int]:
        starts = offsets_of(admin, self._places, BEGINNING)
        if self._span.since is not None:
            timed = [place for place in self._places if place[0] not in self._from_beginning]
            starts |= _offsets_at(admin, timed, self._span.since)
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


def _offsets_at(admin: AdminClient, places: Collection[Place], moment: int) -> dict[Place, int]:
    """Return the first offsets at or after a time, else the end offsets."""
    ends = offsets_of(admin, places, END)
    offsets = offsets_of(admin, places, OffsetSpec.for_timestamp(moment))
    return {place: ends[place] if offset < 0 else offset for place, offset in offsets.items()}
