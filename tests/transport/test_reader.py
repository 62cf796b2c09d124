"""Reading topics outside of any group, on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tests.mock_cluster import PARTITIONS, MockCluster
from worker.kafka.clients import END, admin_client, offsets_of, topic_reader

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


def test_offsets_are_those_after_the_last_records(brokers: MockCluster) -> None:
    partitions = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    assert set(offsets_of(admin_client(brokers.connection), partitions, END).values()) == {10}
    assert offsets_of(admin_client(brokers.connection), [], END) == {}


def test_a_new_topic_whose_leader_is_not_known_yet_is_asked_for_again(
    brokers: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART]

    class NewTopic(Consumer):
        def get_watermark_offsets(self, *arguments: Any) -> Any:
            if refusals:
                raise KafkaException(KafkaError(refusals.pop()))
            return super().get_watermark_offsets(*arguments)

    monkeypatch.setattr("worker.kafka.clients.Consumer", NewTopic)
    with topic_reader(brokers.connection) as reader:
        assert reader.bounds(TOPIC) == (0, 10)
    assert not refusals
