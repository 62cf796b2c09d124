"""What is checked before anything starts, secrets that are not shown, and readers outside of any group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from tests.mock_cluster import PARTITIONS, MockCluster
from worker.errors import FailedError, InputError
from worker.kafka.clients import TopicReader, partition_counts
from worker.kafka.connection import LIBRARY_LOG, Connection
from worker.kafka.topics import FoundTopic, TopicLayout
from worker.stream.topology import Topics

SECRET = "hush-hush-hush"
TLS = {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": SECRET}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"servers": ()}, "no broker"),
        ({"servers": ("kafka",)}, "not a broker address"),
        ({"settings": {"sasl.username": "me", "sasl.password": "x"}}, "in clear"),
        ({"settings": {"security.protocol": "SASL_PLAINTEXT"}}, "in clear"),
        ({"settings": {"group.id": "x"}}, "group.id cannot be changed: --group sets it"),
        ({"settings": {"stats_cb": "x"}}, "stats_cb is no setting of librdkafka"),
        ({"settings": {"fetch.wait.max": "5"}}, 'Kafka settings: No such configuration property: "fetch.wait.max"'),
        ({"settings": {"fetch.wait.max.ms": "x"}}, 'Invalid value for configuration property "fetch.wait.max.ms"'),
        ({"settings": {"fetch.wait.max.ms": "300001"}}, "outside allowed range"),
        ({"settings": TLS | {"sasl.mechanism": "NOPE"}}, "Unsupported SASL mechanism: NOPE"),
        ({"settings": TLS | {"ssl.ca.location": "/none"}}, "ssl.ca.location failed"),
        ({"settings": TLS | {"ssl.endpoint.identification.algorithm": SECRET}}, "Invalid value"),
    ],
)
def test_a_connection_that_makes_no_sense_is_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as refusal:
        Connection(**{"servers": ("k:1",), **arguments}).check()
    assert SECRET not in str(refusal.value)


def test_secrets_are_listed_and_never_shown() -> None:
    connection = Connection(servers=("k:1",), settings=TLS | {"ssl.key.password": "psst"})
    assert connection.secrets == [SECRET, "psst"]
    assert SECRET not in repr(connection)
    assert connection.configuration()["sasl.password"] == SECRET


def test_settings_pass_through_except_where_a_client_has_its_own() -> None:
    connection = Connection(servers=("a:1", "b:2"), settings={"fetch.wait.max.ms": "7", "client.id": "me"})
    made = connection.configuration(fetch_wait_max_ms=50)
    assert (made["bootstrap.servers"], made["fetch.wait.max.ms"], made["client.id"]) == ("a:1,b:2", 50, "me")


def test_a_broker_that_is_not_there_is_an_error_of_one_line_with_the_cause() -> None:
    with pytest.raises(FailedError, match=r"^cannot use Kafka at 127\.0\.0\.1:1: .*Connection refused"):
        partition_counts(Connection(servers=("127.0.0.1:1",)), "any")


def test_what_librdkafka_repeats_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LIBRARY_LOG.name):
        for attempt in (1, 2):
            LIBRARY_LOG.warning("FAIL [rdkafka#consumer-%d] connection refused", attempt)
        LIBRARY_LOG.warning("CONFWARN [rdkafka#producer-1] a setting of consumers")
    assert [record.args for record in caplog.records] == [(1,)]


# ── settings of topics ───────────────────────────────────────────────────────────────────────────────────────────────

JOURNAL = next(topic for topic in TopicLayout().topics(Topics("t"), 4) if topic.name == "t.journal")


def test_a_topic_with_which_no_worker_can_serve_is_refused_in_one_line() -> None:
    small = {**JOURNAL.settings, "max.message.bytes": "1048575"}
    with pytest.raises(FailedError, match=r"^t\.journal: max\.message\.bytes is 1048575, less than 1048576; raise it$"):
        JOURNAL.check(FoundTopic(partitions=1, replicas=1, settings=small))
    with pytest.raises(FailedError, match=r"^t\.journal has 2 partitions, and must have 1$"):
        JOURNAL.check(FoundTopic(partitions=2, replicas=1, settings=JOURNAL.settings))


def test_without_the_right_to_read_settings_the_right_ones_are_assumed(caplog: pytest.LogCaptureFixture) -> None:
    JOURNAL.check(FoundTopic(partitions=1, replicas=1, settings={}, error="not authorized"))
    (line,) = caplog.messages
    assert line.startswith("the settings of t.journal cannot be read")


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TOPIC = "read"


@pytest.fixture
def brokers() -> Iterator[MockCluster]:
    with closing(MockCluster(TOPIC)) as made:
        made.write(TOPIC, (b"%d" % number for number in range(40)))
        yield made


def test_an_error_of_one_partition_loses_no_record_of_another(brokers: MockCluster) -> None:
    with TopicReader(brokers.connection, auto_offset_reset="error") as reader:
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
    with TopicReader(brokers.connection) as reader:
        reader.read_from({(TOPIC, 0): 0, (TOPIC, 1): 0})
        while not reader.poll(1.0, most=3):
            pass
        reader.read_from({(TOPIC, 1): 8})
        values = []
        while not reader.at_end:
            values += [int(message.value()) for message in reader.poll(1.0)]
    assert values == [33, 37]
    assert reader.positions == {(TOPIC, 1): 10}


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
    with TopicReader(brokers.connection) as reader:
        assert reader.bounds(TOPIC) == (0, 10)
    assert not refusals
