"""Kafka in memory: librdkafka's public interface, as far as the driver uses it, on topics in this process.

A test decides when writes are reported (`Cluster.hold`), and which of them fail.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, TopicPartition

from worker.kafka.clients import BEGINNING


class FakeMessage:
    """A record, or the end of a partition."""

    def __init__(
        self, tp: tuple[str, int], offset: int, key: bytes | None, value: bytes | None, error: KafkaError | None = None
    ) -> None:
        self._tp, self._offset, self._key, self._value, self._error = tp, offset, key, value, error
        self._time = time.time_ns() // 1_000_000

    def topic(self) -> str:
        return self._tp[0]

    def partition(self) -> int:
        return self._tp[1]

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_LOG_APPEND_TIME, self._time

    def error(self) -> KafkaError | None:
        return self._error


class Cluster:
    """Topics, and one consumer group whose members share their partitions by range."""

    def __init__(self, partitions: Mapping[str, int]) -> None:
        self.lock = threading.RLock()
        self.logs: dict[tuple[str, int], list[FakeMessage]] = {
            (topic, number): [] for topic, count in partitions.items() for number in range(count)
        }
        self.firsts: dict[tuple[str, int], int] = defaultdict(int)
        self.committed: dict[tuple[str, int], int] = {}
        self.members: list[FakeConsumer] = []
        self.generation = 0
        self.hold = False
        self.refuse: Callable[[str], bool] = lambda topic: False

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> FakeMessage:
        with self.lock:
            log = self.logs[topic, partition]
            log.append(FakeMessage((topic, partition), len(log), key, value))
            return log[-1]

    def values(self, topic: str) -> list[bytes]:
        with self.lock:
            found = [one.value() for (name, _), log in sorted(self.logs.items()) if name == topic for one in log]
        return [value for value in found if value is not None]

    def change_members(self, member: FakeConsumer, *, joins: bool) -> None:
        with self.lock:
            (self.members.append if joins else self.members.remove)(member)
            self.generation += 1

    def share(self, member: FakeConsumer) -> set[tuple[str, int]]:
        """Return the partitions of a member: those with one number go together."""
        place, count = self.members.index(member), len(self.members)
        totals: dict[str, int] = defaultdict(int)
        for topic, _ in self.logs:
            totals[topic] += 1
        wanted = {tp for tp in self.logs if tp[0] in member.topics}
        return {(topic, number) for topic, number in wanted if number * count // totals[topic] == place}


class FakeConsumer:
    """A consumer of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.topics: set[str] = set()
        self.reading: dict[tuple[str, int], int] = {}
        self.owned: set[tuple[str, int]] = set()
        self.is_lost = False
        self._joined = self._rejoined = -1
        self._ends: dict[tuple[str, int], int] = {}
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

    def poll(self, timeout: float = 0.0) -> FakeMessage | None:
        self._rebalance()
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, most: int, timeout: float = 0.0) -> list[FakeMessage]:
        deadline = time.monotonic() + timeout
        while True:
            found = self._take(most)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.001)

    def _take(self, most: int) -> list[FakeMessage]:
        found: list[FakeMessage] = []
        with self.cluster.lock:
            for tp, position in self.reading.items():
                if len(found) >= most:
                    break
                log = self.cluster.logs[tp]
                if position < self.cluster.firsts[tp] or position > len(log):
                    error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
                    if self._ends.get(tp) != -1:
                        self._ends[tp] = -1
                        found.append(FakeMessage(tp, position, None, None, error))
                    continue
                taken = log[position : position + most - len(found)]
                found += taken
                self.reading[tp] = position + len(taken)
                if self.reading[tp] == len(log) and self._ends.get(tp) != len(log):
                    self._ends[tp] = len(log)
                    found.append(FakeMessage(tp, len(log), None, None, KafkaError(KafkaError._PARTITION_EOF)))
        return found

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self.reading, self._ends = {(one.topic, one.partition): one.offset for one in partitions}, {}

    def unassign(self) -> None:
        self.reading = {}

    def commit(self, *, offsets: Iterable[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        with self.cluster.lock:
            self.cluster.committed.update({(one.topic, one.partition): one.offset for one in offsets})

    def committed(self, partitions: Iterable[TopicPartition], timeout: float) -> list[TopicPartition]:
        known = self.cluster.committed
        return [TopicPartition(p.topic, p.partition, known.get((p.topic, p.partition), -1001)) for p in partitions]

    def get_watermark_offsets(self, tp: TopicPartition, timeout: float) -> tuple[int, int]:
        place = tp.topic, tp.partition
        return self.cluster.firsts[place], len(self.cluster.logs[place])

    def close(self) -> None:
        if self in self.cluster.members:
            if self.owned:
                self._callbacks["on_revoke"](self, [TopicPartition(*tp) for tp in self.owned])
            self.cluster.change_members(self, joins=False)


class FakeProducer:
    """A producer of the cluster: what is written is there at once, and reported when `hold` is off."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._reports: list[tuple[Callable[..., None], KafkaError | None, FakeMessage]] = []

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        on_delivery: Callable[..., None],
        headers: object = None,
    ) -> None:
        error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE) if self.cluster.refuse(topic) else None
        message = FakeMessage((topic, partition), -1, key, value)
        if error is None:
            message = self.cluster.append(topic, partition, key, value)
        self._reports.append((on_delivery, error, message))

    def produce_batch(
        self, topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Callable[..., None]
    ) -> int:
        for one in messages:
            self.produce(topic, one["value"], one["key"], partition, on_delivery)
        return len(messages)

    def poll(self, timeout: float) -> int:
        if self.cluster.hold:
            return 0
        reports, self._reports = self._reports, []
        for on_delivery, error, message in reports:
            on_delivery(error, message)
        return len(reports)

    def purge(self) -> None:
        self._reports = []


class FakeAdmin:
    """An admin client of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def list_offsets(self, wanted: Mapping[TopicPartition, Any], **_: Any) -> dict[TopicPartition, Future[Any]]:
        futures: dict[TopicPartition, Future[Any]] = {}
        for tp, spec in wanted.items():
            place = tp.topic, tp.partition
            is_first = spec is BEGINNING
            futures[tp] = Future()
            offset = self.cluster.firsts[place] if is_first else len(self.cluster.logs[place])
            futures[tp].set_result(SimpleNamespace(offset=offset))
        return futures

    def list_topics(self, **_: Any) -> Any:
        counts: dict[str, int] = defaultdict(int)
        for topic, _number in self.cluster.logs:
            counts[topic] += 1
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions=range(count), error=None) for name, count in counts.items()}
        )
