"""Reading topics outside of any group, on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import KafkaException

from tests.mock_cluster import PARTITIONS, MockCluster
from worker.kafka.clients import topic_reader

TOPIC = "read"


@pytest.fixture
def brokers() -> Iterator[MockCluster]:
    with closing(MockCluster(TOPIC)) as made:
        made.write(TOPIC, (b"%d" % number for number in range(40)))
        yield made


def test_an_error_of_one_partition_loses_no_record_of_another(brokers: MockCluster) -> None:
    with topic_reader(brokers.connection, auto_offset_reset="error") as reader:
        reader.read_from({(TOPIC, 0): 99, **{(TOPIC, partition): 0 for partition in range(1, PARTITIONS)}})
        values, errors = [], []
        while not errors or len(reader.at_end) < PARTITIONS - 1:
            try:
                values += [int(message.value()) for message in reader.poll(1.0)]
            except KafkaException as error:
                errors.append(error)
    assert sorted(values) == [number for number in range(40) if number % PARTITIONS]
    assert len(errors) == 1


def test_reading_others_and_from_elsewhere_returns_nothing_of_before(brokers: MockCluster) -> None:
    with topic_reader(brokers.connection) as reader:
        reader.read_from({(TOPIC, 0): 0, (TOPIC, 1): 0})
        while not reader.poll(1.0, most=3):
            pass
        reader.read_from({(TOPIC, 1): 8})
        values = []
        while not reader.at_end:
            values += [int(message.value()) for message in reader.poll(1.0)]
    assert values == [33, 37]
    assert reader.positions == {(TOPIC, 1): 10}
