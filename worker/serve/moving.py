"""Take the state folder of `adcascade serve` to Kafka: `adcascade topics import`.

Rules that hold in this file:

- The topics must be new. Whatever fails in between, the folder is as it was, and can be served or taken again.
- The newest version is written with its content; its place in the journal is that of the new journal. So the learner on
  Kafka goes on with the windows that are open, and their sessions are folded once.
- Older versions are in the history, from which they can be rolled back to.
- Sessions go to the partitions that murmur2 gives their ids, as the arrivals of most clients do.
- The folder is marked when everything is written. It is served no more: two learners would go different ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from worker.errors import AdcascadeError, FailedError, InputError
from worker.kafka.clients import (
    END,
    admin_client,
    durable_producer,
    offsets_of,
    partition_counts,
    readable_errors,
    write,
)
from worker.kafka.connection import Connection
from worker.serve.recording import complete
from worker.serve.state import StateFolder
from worker.serve.store import MOVED, check_not_moved
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import version_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What was taken to Kafka."""

    version: int
    sessions: int
    journal: int
    kept_versions: int


def move(folder: Path, connection: Connection, topics: Topics) -> Moved:
    """Take a state folder to topics that are new; nothing serves it meanwhile."""
    with StateFolder(folder, create=False) as state:
        check_not_moved(state)
        versions = state.parameters()
        if not versions:
            raise InputError(f"{folder} holds no parameters yet")
        newest = decode_parameters(versions[-1])
        with readable_errors(connection):
            moved = _write(state, newest, connection, topics)
        with suppress(AdcascadeError):  # a log that was moved or compressed is not needed for this
            complete(state)
        state.set_meta(MOVED, b"")
        state.commit()
    return moved


def _write(state: StateFolder, newest: Parameters, connection: Connection, topics: Topics) -> Moved:
    written = (topics.journal, topics.parameters, topics.parameters_history, topics.changelog)
    counts = partition_counts(connection, *written, topics.arrivals)
    _check_empty(connection, {topic: counts[topic] for topic in written})
    with closing(durable_producer(connection, partitioner="murmur2")) as producer:
        sessions = _send(producer, topics.changelog, state.sessions())
        history = state.slots()
        _send(producer, topics.parameters_history, ((slot.encode(), state.in_slot(slot) or b"") for slot in history))
        start = newest.resume_offset
        journal = _send(producer, topics.journal, ((None, value) for _, value in state.journal(start)))
        # Last: a worker serves when there is a version.
        moved = replace(newest, resume_offset=0, journal_offset=newest.journal_offset - start)
        write(producer, topics.parameters, encode_parameters(moved), version_key(moved.version))
    return Moved(
        version=newest.version,
        sessions=sessions,
        journal=journal,
        kept_versions=len({kept.version for kept in history.values()}),
    )


def _check_empty(connection: Connection, counts: dict[str, int]) -> None:
    places = [(topic, partition) for topic, count in counts.items() for partition in range(count)]
    for (topic, _), end in offsets_of(admin_client(connection), places, END).items():
        if end:
            raise FailedError(
                f"{topic} is not empty: a state folder is taken to new topics, before a worker starts "
                "(adcascade topics create --prefix …)"
            )


def _send(producer: Producer, topic: str, records: Iterable[tuple[bytes | None, bytes]]) -> int:
    """Write records in their order, and wait until all replicas have them; return how many there are."""
    count, errors = 0, list[KafkaError]()

    def on_delivery(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error)

    for key, value in records:
        count += 1
        try:
            producer.produce(topic, value, key, on_delivery=on_delivery)
        except BufferError:  # its queue is full
            producer.flush()
            producer.produce(topic, value, key, on_delivery=on_delivery)
    producer.flush()
    if errors:
        raise KafkaException(errors[0])
    return count
