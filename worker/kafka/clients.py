"""Kafka clients outside of any consumer group: ask for metadata and offsets, read topics, append a record.

All of it blocks: commands, the learner process and threads use it. Errors become one line in `readable_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from time import monotonic, sleep
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec, TopicMetadata

from worker.errors import FailedError
from worker.kafka.connection import SILENT_LOG, Connection, reason_of
from worker.stream.topology import ONLY_PARTITION, Record
from worker.stream.version_sizes import VERSION_BYTES

T = TypeVar("T")

#: Seconds that the brokers may take to answer a request.
REQUEST_TIMEOUT: Final = 10.0
#: Seconds without a record before the end of a topic, after which reading fails.
_PATIENCE: Final = 30.0
#: librdkafka wants a name of a group also where none is joined.
NO_GROUP: Final = "adcascade-reader"

BEGINNING: Final = OffsetSpec.earliest()
END: Final = OffsetSpec.latest()


@contextmanager
def readable_errors(connection: Connection) -> Iterator[None]:
    """Raise `FailedError` with one line where Kafka cannot be used."""
    try:
        yield
    except KafkaException as error:
        reason = reason_of(error)
        if error.args and error.args[0].code() in _NO_BROKER and connection.errors:
            # librdkafka reports the cause per broker; its exception only says that no broker could be used.
            causes = [reason_of(one) for one in connection.errors if one.code() != _ALL_DOWN]
            reason = causes[-1] if causes else "the broker closes the connection; does it need TLS?"
        raise FailedError(f"cannot use Kafka at {', '.join(connection.servers)}: {reason}") from None


_ALL_DOWN: Final = KafkaError._ALL_BROKERS_DOWN
#: Errors that only say that no broker answered.
_NO_BROKER: Final = (_ALL_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def admin_client(connection: Connection) -> AdminClient:
    """Return a client that describes and creates topics; raise `KafkaException` if no broker can be reached."""
    admin = AdminClient(connection.configuration(logger=SILENT_LOG))
    seconds = 1.0  # a broker that refuses the connection is reported soon, one that is busy gets more time
    while True:
        try:
            admin.list_topics(timeout=seconds)
        except KafkaException:
            admin.poll(0)  # collects the errors of the brokers
            if connection.errors or seconds >= REQUEST_TIMEOUT:
                raise
            seconds = min(4 * seconds, REQUEST_TIMEOUT)
        else:
            return admin


def durable_producer(connection: Connection, **settings: Any) -> Producer:
    """Return a producer that writes each record once, in order, to all replicas, up to the size of a version.

    `settings` are librdkafka's, with ``_`` for ``.``.
    """
    return Producer(
        connection.configuration(
            **{
                "acks": "all",
                "enable_idempotence": True,
                "linger_ms": 0,
                "message_max_bytes": VERSION_BYTES,
                "queue_buffering_max_kbytes": 4 * VERSION_BYTES // 1024,
                **settings,
            }
        )
    )


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def existing_topics(admin: AdminClient, topics: Collection[str]) -> dict[str, TopicMetadata]:
    """Return those of the topics that exist."""
    # All topics: a broker with auto.create.topics.enable creates those that are asked for by name.
    known = admin.list_topics(timeout=REQUEST_TIMEOUT).topics
    return {name: known[name] for name in topics if name in known and known[name].error is None}


def partition_counts(connection: Connection, *topics: str) -> dict[str, int]:
    """Return the partition counts of topics, in the order given; raise `FailedError` if one does not exist."""
    with readable_errors(connection):
        found = existing_topics(admin_client(connection), topics)
    for topic in topics:
        if topic not in found:
            raise FailedError(f"no topic {topic}: create it first (adcascade topics create), or give another --prefix")
    return {topic: len(found[topic].partitions) for topic in topics}


def offsets_of(
    admin: AdminClient, partitions: Iterable[tuple[str, int]], spec: OffsetSpec
) -> dict[tuple[str, int], int]:
    """Return an offset of each partition, by topic and number: `BEGINNING`, `END` or that of a time.

    The end is that of the committed records. After the last record of a time there is none: the offset is -1 then.
    """
    wanted = {TopicPartition(*place): spec for place in partitions}
    if not wanted:
        return {}

    def ask() -> dict[tuple[str, int], int]:
        futures = admin.list_offsets(
            wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=REQUEST_TIMEOUT
        )
        return {(tp.topic, tp.partition): future.result().offset for tp, future in futures.items()}

    return _with_leaders(admin, ask)


def _with_leaders(client: AdminClient | Consumer, ask: Callable[[], T]) -> T:
    """Return the answer to a request that is repeated while a new partition, or its new leader, is not known yet."""
    deadline = monotonic() + REQUEST_TIMEOUT
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in _OUTDATED or monotonic() > deadline:
                raise
        sleep(0.05)
        client.list_topics(timeout=REQUEST_TIMEOUT)  # brings new partitions and leaders


#: Errors of a client, or of a broker, that does not know a new partition or its new leader yet.
_OUTDATED: Final = (
    KafkaError._NOENT,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
)


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_of(message: Message) -> Record:
    """Return a message of librdkafka as a `Record`; its time is -1 where it has none."""
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
    )


class TopicReader:
    """Reads partitions outside of any group. It commits nothing and reads committed records only.

    `positions` has the offset that comes next, by topic and number. It also moves over what is no record: deleted ones
    and the marks of transactions. `at_end` has the partitions that were read to their end. `settings` are librdkafka's,
    with ``_`` for ``.``.
    """

    def __init__(self, connection: Connection, **settings: Any) -> None:
        self._connection = connection
        self._consumer = Consumer(
            connection.configuration(
                **{
                    "group_id": NO_GROUP,
                    "enable_auto_commit": False,
                    "enable_partition_eof": True,
                    "auto_offset_reset": "earliest",
                    "isolation_level": "read_committed",
                    # A record may be larger: then the broker sends it alone.
                    "fetch_message_max_bytes": 8 << 20,
                    **settings,
                }
            )
        )
        self.positions: dict[tuple[str, int], int] = {}
        self.at_end: set[tuple[str, int]] = set()
        self._failure: KafkaError | None = None

    @cached_property
    def admin(self) -> AdminClient:
        """A client for offsets and metadata."""
        return admin_client(self._connection)

    def bounds(self, topic: str) -> tuple[int, int]:
        """Return the offset of the first record of a topic with one partition, and the offset after the last."""
        consumer, tp = self._consumer, TopicPartition(topic, ONLY_PARTITION)
        first, end = _with_leaders(consumer, lambda: consumer.get_watermark_offsets(tp, REQUEST_TIMEOUT))
        return first, end

    def read_from(self, positions: Mapping[tuple[str, int], int]) -> None:
        """Read these partitions from now on, and no others."""
        self.positions, self.at_end = dict(positions), set()
        self._consumer.assign([TopicPartition(*tp, offset) for tp, offset in positions.items()])

    def poll(self, seconds: float, most: int = 10_000) -> list[Message]:
        """Return the next records; wait for the first of them.

        An error of a broker is left to librdkafka, which tries again. Raises `KafkaException` for one that does not
        pass, after the records before it.
        """
        if (failure := self._failure) is not None:
            self._failure = None
            raise KafkaException(failure)
        messages = self._consumer.consume(1, seconds)
        if messages and most > 1:
            messages += self._consumer.consume(most - 1, 0)
        records = []
        for message in messages:
            place = message.topic(), message.partition()
            if (error := message.error()) is None:
                self.positions[place] = message.offset() + 1
                self.at_end.discard(place)
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self.positions[place] = message.offset()
                self.at_end.add(place)
            elif not error.retriable() and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                self._failure = error  # without rights for a group, one can read outside of any
        return records

    def read_to(self, topic: str, start: int, end: int) -> Iterator[Record]:
        """Yield the records of a topic with one partition, with offsets from `start` to below `end`."""
        place = topic, ONLY_PARTITION
        return self.read_between({place: start}, {place: end})

    def read_between(
        self, starts: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]
    ) -> Iterator[Record]:
        """Yield the records of partitions, with offsets from `starts` to below `ends`; each partition in its order."""
        yield from map(record_of, self.messages_between(starts, ends))

    def messages_between(
        self, starts: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]
    ) -> Iterator[Message]:
        """Yield the same as messages, with their headers."""
        left = {place: start for place, start in starts.items() if start < ends[place]}
        if not left:
            return
        self.read_from(left)
        mine, waiting_since = self.positions, monotonic()
        try:
            while left:
                messages = self.poll(0.2)
                for message in messages:
                    if message.offset() < ends[message.topic(), message.partition()]:
                        yield message
                left = {place: at for place, at in self.positions.items() if at < ends[place]}
                if messages:
                    waiting_since = monotonic()
                elif left and monotonic() - waiting_since > _PATIENCE:
                    topic, partition = next(iter(left))
                    where = f"{topic}, partition {partition}"
                    raise FailedError(f"{where} cannot be read: no record for {_PATIENCE:.0f} s before its end")
        finally:
            if self.positions is mine:
                self.read_from({})  # later records are not fetched

    def read_to_end(self, topic: str, start: int = 0) -> list[Record]:
        """Return all records of a topic with one partition, from an offset on."""
        first, end = self.bounds(topic)
        return list(self.read_to(topic, min(max(start, first), end), end))

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write(
    producer: Producer, topic: str, value: bytes | None, key: bytes | None = None, partition: int = ONLY_PARTITION
) -> Message:
    """Append a record to a partition; return its delivery report when all replicas have it."""
    reports: list[tuple[KafkaError | None, Message]] = []
    producer.produce(topic, value, key, partition, on_delivery=lambda error, message: reports.append((error, message)))
    while not reports:
        producer.poll(0.1)
    error, message = reports[0]
    if error is not None:
        raise KafkaException(error)
    return message
