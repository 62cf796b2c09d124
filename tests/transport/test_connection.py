"""Connections that make no sense are refused before anything starts; secrets are not shown."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from worker.errors import FailedError, InputError
from worker.kafka.clients import readable_errors, topic_reader
from worker.kafka.connection import LIBRARY_LOG, Connection

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
    connection = Connection(servers=("127.0.0.1:1",))
    with (
        pytest.raises(FailedError, match=r"^cannot use Kafka at 127\.0\.0\.1:1: .*Connection refused"),
        readable_errors(connection),
        topic_reader(connection) as reader,
    ):
        reader.bounds("any")


def test_what_librdkafka_repeats_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LIBRARY_LOG.name):
        for attempt in (1, 2):
            LIBRARY_LOG.warning("FAIL [rdkafka#consumer-%d] connection refused", attempt)
        LIBRARY_LOG.warning("CONFWARN [rdkafka#producer-1] a setting of consumers")
    assert [record.args for record in caplog.records] == [(1,)]
