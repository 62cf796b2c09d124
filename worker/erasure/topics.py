"""A person in the topics of Kafka.

Rules that hold in this file:

- Kafka deletes records by age only: a segment, which may have the records of `segment.ms`, when the last of them is
  older than `retention.ms`.
- The session table is compacted: there, a record without a value deletes a session. It goes to the partition that the
  session is in, whatever the partitioner of its arrival was.
- Workers have open sessions in memory, and delete them when their time is over. So only sessions whose time is over are
  deleted here: for a worker that still has one, that is its own deletion a little earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final

from worker.console import moment, progress
from worker.erasure.person import IMPERSONAL, Person, Place
from worker.errors import FailedError
from worker.kafka.clients import BEGINNING, END, TopicReader, durable_producer, offsets_of, readable_errors, write
from worker.kafka.connection import Connection
from worker.kafka.topics import POLICY, RETENTION, FoundTopic, find_readable
from worker.logs.findings import ticking
from worker.stream.session import Session, decode_state
from worker.stream.topology import Record, Topics

_SEGMENT: Final = "segment.ms"


def in_topics(connection: Connection, names: Topics, person: Person, *, now: int) -> list[Place]:
    """Search the topics of these names; `now` is in milliseconds since the epoch."""
    table: dict[tuple[int, bytes], bytes | None] = {}  # sessions of the changelog by partition and key
    with readable_errors(connection), TopicReader(connection) as reader:
        found = find_readable(reader.admin, names)
        if names.arrivals not in found:
            raise FailedError(f"no topic {names.arrivals}: give another --prefix")
        if person.user is not None:
            person.learn(_read(reader, {names.arrivals: found[names.arrivals]}))
        personal = {name: topic for name, topic in found.items() if not name.endswith(IMPERSONAL)}
        places = {name: Place(name) for name in personal}
        for record in _read(reader, personal):
            if person.owns(record):
                places[record.topic].add(record.timestamp)
                if record.topic == names.changelog and record.key is not None:
                    table[record.partition, record.key] = record.value
    for name, place in places.items():
        settings = personal[name].settings
        kept = int(settings[RETENTION]) if "delete" in settings[POLICY] else -1
        place.until = None if kept < 0 or place.last is None else place.last + kept + int(settings[_SEGMENT])
    if names.changelog in places:
        held = {key: _end(value) for key, value in table.items() if value is not None}
        over = [key for key, end in held.items() if end < now]
        changelog = places[names.changelog]
        changelog.deletable, changelog.note = len(over), "compaction removes what is deleted"
        changelog.delete = lambda: _erase(connection, names.changelog, over)
        if len(over) < len(held):
            changelog.note = (
                f"{len(held) - len(over):,} open, until {moment(max(held.values()))}: their worker deletes them"
            )
    return list(places.values())


def _read(reader: TopicReader, topics: Mapping[str, FoundTopic]) -> Iterator[Record]:
    """Yield all records of topics up to their present ends."""
    places = [(name, partition) for name, topic in topics.items() for partition in range(topic.partitions)]
    starts, ends = (offsets_of(reader.admin, places, spec) for spec in (BEGINNING, END))
    total = sum(ends.values()) - sum(starts.values())
    with progress(f"searching {len(topics)} topics", total, unit="records") as bar:
        yield from ticking(reader.read_between(starts, ends), bar)


def _end(value: bytes) -> int:
    """Return the time until which a session is open; 0 for feedback without a session, and for what is damaged."""
    try:
        state = decode_state(value)
    except ValueError:
        return 0
    return state.deadline if isinstance(state, Session) else 0


def _erase(connection: Connection, changelog: str, sessions: Sequence[tuple[int, bytes]]) -> None:
    with readable_errors(connection), closing(durable_producer(connection)) as producer:
        for partition, key in sessions:
            write(producer, changelog, None, key, partition)
