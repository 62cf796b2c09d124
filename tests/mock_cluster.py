"""Brokers without Java: the mock cluster that librdkafka carries."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from confluent_kafka import Producer

from worker.kafka.clients import TopicReader, record_of
from worker.kafka.connection import Connection
from worker.stream.topology import Record

#: Every topic of a mock cluster has as many.
PARTITIONS = 4

_LOG = logging.getLogger("mock-cluster")
_LOG.propagate = False
_LOG.addHandler(logging.NullHandler())


class MockCluster:
    """Three brokers with topics; all end when it is closed."""

    def __init__(self, *topics: str) -> None:
        # The cluster lives in the client that asks for it, and is reached by TCP as any other.
        self._owner = Producer({"bootstrap.servers": "unused:1", "test.mock.num.brokers": 3, "logger": _LOG})
        brokers = self._owner.list_topics(timeout=120).brokers.values()
        self.connection = Connection(servers=tuple(f"{broker.host}:{broker.port}" for broker in brokers))
        for topic in topics:
            assert len(self._owner.list_topics(topic, timeout=120).topics[topic].partitions) == PARTITIONS

    def write(self, topic: str, values: Iterable[bytes]) -> None:
        """Write records, to the partitions in turn."""
        for number, value in enumerate(values):
            self._owner.produce(topic, value, b"key", number % PARTITIONS)
        assert self._owner.flush(60) == 0

    def read(self, topic: str) -> list[Record]:
        """Return all records of a topic."""
        records: list[Record] = []
        with TopicReader(self.connection) as reader:
            reader.read_from({(topic, partition): 0 for partition in range(PARTITIONS)})
            while len(reader.at_end) < PARTITIONS:
                records += map(record_of, reader.poll(1.0))
        return records

    def close(self) -> None:
        self._owner.close()
