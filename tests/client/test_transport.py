"""The transport over Kafka, on the mock cluster that librdkafka carries."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from tests.mock_cluster import PARTITIONS, MockCluster
from tests.murmur2 import murmur2_partition
from tests.programs import until
from worker.client.kafka import KafkaTransport
from worker.client.transport import Keyed, UndeliveredError
from worker.errors import FailedError, InputError
from worker.kafka.connection import Connection
from worker.stream.topology import Record, Topics

TOPICS = Topics("ads")


@pytest.fixture
def brokers() -> Iterator[MockCluster]:
    with closing(MockCluster(TOPICS.arrivals, TOPICS.clicks, TOPICS.decisions)) as made:
        yield made


def decide(brokers: MockCluster, *numbers: int) -> None:
    brokers.write(TOPICS.decisions, (b"%d" % number for number in numbers))


class Received(list[Record]):
    """The decisions that a transport has handed over."""

    async def numbers(self, count: int) -> list[int]:
        await until(lambda: len(self) >= count)
        return sorted(int(record.value or b"") for record in self)


@asynccontextmanager
async def connected(brokers: MockCluster, **settings: Any) -> AsyncIterator[tuple[KafkaTransport, Received]]:
    transport, received = KafkaTransport(brokers.connection, TOPICS, **settings), Received()
    await transport.start(received.extend)
    try:
        yield transport, received
    finally:
        await transport.stop()


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "adcascade-client"]


def arrival(number: int) -> Keyed:
    return Keyed("arrivals", b"s-%d" % number, b"{}")


async def test_every_decision_after_the_start_is_received_once_and_none_before_it(brokers: MockCluster) -> None:
    decide(brokers, *range(10))
    async with connected(brokers) as (_transport, received):
        await asyncio.to_thread(decide, brokers, *range(100, 120))
        assert await received.numbers(20) == [*range(100, 120)]
        await asyncio.to_thread(decide, brokers, 120)
        assert await received.numbers(21) == [*range(100, 121)]


async def test_records_go_to_the_partition_of_their_key(brokers: MockCluster) -> None:
    async with connected(brokers) as (transport, _received):
        await asyncio.gather(*(transport.send(arrival(number)) for number in range(40)))
    placed = [record.partition for record in brokers.read(TOPICS.arrivals)]
    assert sorted(placed) == sorted(murmur2_partition(b"s-%d" % number, PARTITIONS) for number in range(40))


async def test_decisions_that_come_while_the_loop_is_busy_are_received_afterwards_in_their_order(
    brokers: MockCluster,
) -> None:
    async with connected(brokers) as (_transport, received):
        decide(brokers, *range(30_000))  # blocks the loop
        await received.numbers(30_000)
        for partition in range(PARTITIONS):
            offsets = [record.offset for record in received if record.partition == partition]
            assert offsets == [*range(len(offsets))]


async def test_stopping_waits_for_what_is_in_flight_and_leaves_no_thread(brokers: MockCluster) -> None:
    sent: list[asyncio.Future[None]] = []
    async with connected(brokers) as (transport, _received):
        assert client_threads()
        sent.extend(transport.send(arrival(number)) for number in range(500))
    assert [future.result() for future in sent] == [None] * 500
    assert transport.trouble == "closed"
    assert not client_threads()
    with pytest.raises(UndeliveredError, match="the client is closed"):
        await transport.send(arrival(1))


async def test_a_record_that_is_too_large_is_given_up_alone(brokers: MockCluster) -> None:
    async with connected(brokers) as (transport, _received):
        large = transport.send(Keyed("arrivals", b"s", bytes(2 << 20)))
        await transport.send(arrival(1))
        with pytest.raises(UndeliveredError, match="too large"):
            await large


async def test_without_brokers_records_are_given_up_in_time_and_the_trouble_is_reported(
    brokers: MockCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.client.kafka._ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr("worker.client.kafka._MOST_UNDELIVERED", 3)
    caplog.set_level(logging.WARNING, "worker.client")
    async with connected(brokers, delivery_timeout=0.5, refresh=0.05) as (transport, _):
        assert transport.trouble is None
        await asyncio.to_thread(brokers.close)
        sent = [transport.send(arrival(number)) for number in range(4)]
        assert [future.done() for future in sent] == [False, False, False, True], "three can wait"
        for future in sent:
            with pytest.raises(UndeliveredError, match="no broker accepted the record"):
                await future
        await until(lambda: transport.trouble is not None)
        assert brokers.connection.servers[0] in str(transport.trouble)
        sent.append(transport.send(arrival(4)))  # and nobody waits for it
    assert not client_threads()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("not delivered" in text for text in messages) >= 2
    assert sum("cannot use Kafka" in text for text in messages) == 1


def test_the_thread_ends_with_a_loop_that_was_closed_without_a_stop(brokers: MockCluster) -> None:
    transport = KafkaTransport(brokers.connection, TOPICS)
    asyncio.run(transport.start(lambda _: None))
    (thread,) = client_threads()
    thread.join(300)
    assert not thread.is_alive()


async def test_refused_settings_and_missing_topics_are_reported_before_anything_is_started(
    brokers: MockCluster,
) -> None:
    refused = Connection(servers=("127.0.0.1:1",), settings={"no.such.setting": "1"})
    for connection, complaint in ((refused, "no.such.setting"), (brokers.connection, "adcascade topics create")):
        with pytest.raises((InputError, FailedError), match=complaint):
            await KafkaTransport(connection, Topics("nowhere")).start(lambda _: None)
    assert not client_threads()
