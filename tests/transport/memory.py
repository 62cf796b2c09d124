"""Kafka in memory: librdkafka's public interface, as far as the worker uses it, on topics in this process.

A test decides when writes become durable (`Cluster.hold`), which of them fail (`Cluster.error`), and what a consumer
gets in place of records (`Cluster.incoming`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, TIMESTAMP_NOT_AVAILABLE, KafkaError, Message, TopicPartition
from faust.types import TP

from worker.kafka.clients import BEGINNING, TopicReader
from worker.kafka.connection import Connection
from worker.stream.topology import Record, Topics

#: Where nothing listens.
NOWHERE = Connection(servers=("127.0.0.1:1",))
#: The longest wait for a record, in seconds, whatever is asked for: tests end soon.
MOST_WAIT = 0.02

R = TypeVar("R", bound=TopicReader)


def event(tp: TP, offset: int, error: KafkaError | int) -> Message:
    """Return what comes in place of a record: the end of a partition, or an error."""
    return Message(*tp, offset, error=KafkaError(error) if isinstance(error, int) else error)


class Cluster:
    """Topics, and one consumer group whose members share their partitions by range.

    Where a log has None there is no record, but an offset: the mark of a transaction, or one that was compacted.
    """

    def __init__(self, partitions: Mapping[str, int]) -> None:
        self.lock = threading.RLock()
        self.logs: dict[TP, list[Record | None]] = {
            TP(topic, number): [] for topic, count in partitions.items() for number in range(count)
        }
        self.written: list[Record] = []  # to all topics, in the order of the writes
        self.firsts: dict[TP, int] = defaultdict(int)
        self.committed: dict[TP, int] = {}
        self.members: list[FakeConsumer] = []
        self.generation = 0
        self.clock: Callable[[], int] | None = None  # of a broker that sets the times of records
        self.hold = False
        self.error: Callable[[str, bytes | None], KafkaError | None] = lambda topic, key: None
        self.incoming: list[Message] = []  # what the next consumer gets first
        self.reads = 0  # records that consumers got

    @classmethod
    def with_topics(cls, topics: Topics, count: int = 1) -> Cluster:
        """Return a cluster with the topics of a worker; `count` is the number of partitions of the inputs."""
        many = (topics.arrivals, topics.clicks, topics.decisions, topics.changelog)
        one = (topics.journal, topics.parameters, topics.parameters_history, topics.episodes, topics.dead_letters)
        return cls({**dict.fromkeys(many, count), **dict.fromkeys(one, 1)})

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes | None, timestamp: int = 0) -> Record:
        with self.lock:
            log = self.logs[TP(topic, partition)]
            record = Record(topic, partition, len(log), self.clock() if self.clock else timestamp, key, value)
            log.append(record)
            self.written.append(record)
            return record

    def message(self, record: Record) -> Message:
        """Return a record as clients get it; only a broker with a clock sets its time."""
        kind = TIMESTAMP_NOT_AVAILABLE if self.clock is None else TIMESTAMP_LOG_APPEND_TIME
        return Message(*record[:3], record.key, record.value, timestamp=(kind, record.timestamp))

    def records(self, topic: str) -> list[Record]:
        """Return the records of a topic, partition by partition."""
        with self.lock:
            return [one for tp, log in sorted(self.logs.items()) if tp.topic == topic for one in log if one is not None]

    def table(self, topic: str, partition: int) -> dict[Any, Record]:
        """Return the last record of every key of a partition that is not deleted."""
        newest = {record.key: record for record in self.logs[TP(topic, partition)] if record is not None}
        return {key: record for key, record in newest.items() if record.value is not None}

    def values(self, topic: str) -> list[bytes]:
        return [record.value for record in self.records(topic) if record.value is not None]

    def compact(self, topic: str) -> None:
        """Remove all but the last record of every key; offsets stay."""
        newest = {(one.partition, one.key): one for one in self.records(topic)}
        for tp, log in self.logs.items():
            if tp.topic == topic:
                log[:] = [one if one and newest[one.partition, one.key] is one else None for one in log]

    def reader(self, kind: type[R] = TopicReader) -> R:  # type: ignore[assignment]
        """Return a reader of the cluster."""
        with patch("worker.kafka.clients.Consumer", lambda _: FakeConsumer(self)):
            return kind(NOWHERE)

    def change_members(self, member: FakeConsumer, *, joins: bool) -> None:
        with self.lock:
            (self.members.append if joins else self.members.remove)(member)
            self.generation += 1

    def share(self, member: FakeConsumer) -> set[TP]:
        """Return the partitions of a member: those with one number go together."""
        place, count = self.members.index(member), len(self.members)
        totals: dict[str, int] = defaultdict(int)
        for topic, _ in self.logs:
            totals[topic] += 1
        return {
            tp for tp in self.logs if tp.topic in member.topics and tp.partition * count // totals[tp.topic] == place
        }


class FakeConsumer:
    """A consumer of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.topics: set[str] = set()
        self.reading: dict[TP, int] = {}
        self.owned: set[TP] = set()
        self.is_lost = False
        self._joined = self._rejoined = -1
        self._ends: dict[TP, int] = {}
        self._callbacks: dict[str, Any] = {}

    def subscribe(self, topics: Iterable[str], **callbacks: Any) -> None:
        self.topics, self._callbacks = set(topics), callbacks
        self.cluster.change_members(self, joins=True)

    def _rebalance(self) -> None:
        cluster = self.cluster
        if not self.topics or self._joined == cluster.generation:
            return
        if self._rejoined != cluster.generation:
            generation = cluster.generation
            if self.owned:
                kind = "on_lost" if self.is_lost else "on_revoke"
                self._callbacks[kind](self, [TopicPartition(*tp) for tp in self.owned])
            self.owned, self.reading, self.is_lost, self._rejoined = set(), {}, False, generation
        with cluster.lock:
            if any(one._rejoined != cluster.generation for one in cluster.members):
                return
            self._joined, self.owned = cluster.generation, cluster.share(self)
        self._callbacks["on_assign"](self, [TopicPartition(*tp) for tp in self.owned])

    def poll(self, timeout: float = 0.0) -> Message | None:
        self._rebalance()
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, most: int, timeout: float = 0.0) -> list[Message]:
        deadline = time.monotonic() + min(timeout, MOST_WAIT)
        while True:
            found = self._take(most)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.001)

    def _take(self, most: int) -> list[Message]:
        cluster = self.cluster
        with cluster.lock:
            found, cluster.incoming = cluster.incoming[:most], cluster.incoming[most:]
            for tp, position in self.reading.items():
                if len(found) >= most:
                    break
                log, end = cluster.logs[tp], len(cluster.logs[tp])
                if not cluster.firsts[tp] <= position <= end:
                    if self._ends.get(tp) != -1:
                        self._ends[tp] = -1
                        found.append(event(tp, position, KafkaError._AUTO_OFFSET_RESET))
                    continue
                while position < end and len(found) < most:
                    record = log[position]
                    position += 1
                    if record is not None:
                        found.append(cluster.message(record))
                        cluster.reads += 1
                self.reading[tp] = position
                if position == end != self._ends.get(tp) and len(found) < most:
                    self._ends[tp] = end
                    found.append(event(tp, end, KafkaError._PARTITION_EOF))
        return found

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self.reading, self._ends = {TP(one.topic, one.partition): one.offset for one in partitions}, {}

    def unassign(self) -> None:
        self.reading = {}

    def commit(self, *, offsets: Iterable[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        with self.cluster.lock:
            self.cluster.committed.update({TP(one.topic, one.partition): one.offset for one in offsets})

    def committed(self, partitions: Iterable[TopicPartition], timeout: float) -> list[TopicPartition]:
        known = self.cluster.committed
        return [TopicPartition(p.topic, p.partition, known.get(TP(p.topic, p.partition), -1001)) for p in partitions]

    def get_watermark_offsets(self, tp: TopicPartition, timeout: float) -> tuple[int, int]:
        place = TP(tp.topic, tp.partition)
        return self.cluster.firsts[place], len(self.cluster.logs[place])

    def close(self) -> None:
        if self in self.cluster.members:
            if self.owned:
                self._callbacks["on_revoke"](self, [TopicPartition(*tp) for tp in self.owned])
            self.cluster.change_members(self, joins=False)


class Write(NamedTuple):
    """A record that is not durable yet."""

    tp: TP
    key: bytes | None
    value: bytes | None
    report: Callable[[KafkaError | None, Message], None]


class FakeProducer:
    """A producer of the cluster: a write becomes durable when a test says so, or with the next poll."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pending: list[Write] = []

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        on_delivery: Callable[..., None],
        headers: object = None,
    ) -> None:
        self.pending.append(Write(TP(topic, partition), key, value, on_delivery))

    def produce_batch(
        self, topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Callable[..., None]
    ) -> int:
        for one in messages:
            self.produce(topic, one["value"], one["key"], partition, on_delivery)
        return len(messages)

    def persist(self, write: Write) -> None:
        """Make a write durable, unless it fails, and report it."""
        self.pending.remove(write)
        error = self.cluster.error(write.tp.topic, write.key)
        record = Record(*write.tp, -1, 0, write.key, write.value)
        if error is None:
            record = self.cluster.append(*write.tp, write.key, write.value)
        write.report(error, self.cluster.message(record))

    def poll(self, timeout: float) -> int:
        writes = [] if self.cluster.hold else list(self.pending)
        for write in writes:
            self.persist(write)
        return len(writes)

    def purge(self) -> None:
        self.pending.clear()


class FakeAdmin:
    """An admin client of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def list_offsets(self, wanted: Mapping[TopicPartition, Any], **_: Any) -> dict[TopicPartition, Future[Any]]:
        futures: dict[TopicPartition, Future[Any]] = {}
        for tp, spec in wanted.items():
            place = TP(tp.topic, tp.partition)
            is_first = spec is BEGINNING
            futures[tp] = Future()
            offset = self.cluster.firsts[place] if is_first else len(self.cluster.logs[place])
            futures[tp].set_result(SimpleNamespace(offset=offset))
        return futures
