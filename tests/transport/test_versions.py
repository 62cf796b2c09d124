"""The thread that reads versions: prepared planners, catching up, and topics that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from faust.types import TP

from tests.embedded.traffic import ARMS, settings
from tests.transport.fake import in_loop, until
from tests.transport.memory import NOWHERE, Cluster, FakeAdmin, FakeConsumer, FakeMessage
from worker.kafka.parameters import PublishedParameters, UnfitError, VersionReader
from worker.metrics import Metrics
from worker.runtime.supervision import Pauses
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

ZERO = Parameters.first(settings(), ARMS)
TOPICS = Topics("t")
PLACE = TP(TOPICS.parameters, 0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Kafka in memory, in place of librdkafka."""
    made = Cluster.with_topics(TOPICS)
    monkeypatch.setattr("worker.kafka.clients.Consumer", lambda _: FakeConsumer(made))
    monkeypatch.setattr("worker.kafka.parameters.AdminClient", lambda _: FakeAdmin(made))
    monkeypatch.setattr(VersionReader, "pauses", Pauses(first=0.001, most=0.001))
    return made


def publish(cluster: Cluster, parameters: Parameters) -> None:
    cluster.append(*PLACE, b"0", encode_parameters(parameters))


@asynccontextmanager
async def reading() -> AsyncIterator[tuple[VersionReader, PublishedParameters, Metrics]]:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [], metrics)
    reader = VersionReader(NOWHERE, TOPICS, published, metrics.troubles)
    running = asyncio.create_task(reader.run())
    try:
        yield reader, published, metrics
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, UnfitError):
            await running


def version(number: int, **changes: Any) -> Parameters:
    return replace(ZERO, version=number, journal_offset=number, **changes)


@in_loop
async def test_versions_come_with_prepared_planners(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr("worker.kafka.parameters.prepared", lambda one: made.append(one.version) or None)
    publish(cluster, ZERO)
    async with reading() as (reader, published, _):
        await reader.catch_up()
        publish(cluster, version(1))
        await until(lambda: published.version == 1)
        publish(cluster, version(1, made_at=5))  # published again
        await reader.catch_up()
    assert made == [0, 1]


@in_loop
async def test_catching_up_returns_when_all_is_taken_that_was_there(cluster: Cluster) -> None:
    async with reading() as (reader, published, _):
        caught_up = asyncio.create_task(reader.catch_up())
        await asyncio.sleep(0)
        assert not reader.ready, "there is no version yet"
        for number in range(3):
            publish(cluster, version(number))
        await caught_up
        assert published.version == 2
        publish(cluster, version(3))
        await reader.catch_up()
        assert published.version == 3


@in_loop
async def test_a_topic_that_cannot_be_read_is_trouble_and_read_again(cluster: Cluster) -> None:
    publish(cluster, ZERO)
    cluster.incoming = [FakeMessage.without_record(PLACE, 0, KafkaError(KafkaError._TRANSPORT))]
    async with reading() as (reader, published, metrics):
        await reader.catch_up()
        assert published.version == 0
        await until(lambda: metrics.troubles.totals().get("versions-down") == 1 and not metrics.troubles.active())


@in_loop
async def test_a_record_that_is_no_version_is_refused_and_the_next_is_taken(cluster: Cluster) -> None:
    publish(cluster, ZERO)
    cluster.append(*PLACE, b"0", b"{")
    cluster.append(*PLACE, b"0", None)
    publish(cluster, version(1))
    async with reading() as (reader, published, metrics):
        await reader.catch_up()
        assert published.version == 1
        assert metrics.registry.get_sample_value("adcascade_refused_versions_total") == 1


@in_loop
async def test_a_version_that_this_worker_cannot_serve_by_ends_it(cluster: Cluster) -> None:
    publish(cluster, Parameters.first(settings(dim=settings().dim + 1), ARMS))
    async with reading() as (reader, _, _metrics):
        with pytest.raises(
            UnfitError, match=r"another worker has published version 0: --dim is \d, but the published .* have \d"
        ):
            await reader.run()
