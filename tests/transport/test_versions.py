"""The thread that reads versions: prepared planners, catching up, and topics that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.embedded.traffic import ARMS, settings
from tests.transport.fake import in_loop, until
from tests.transport.memory import FakeMessage
from worker.kafka.connection import Connection
from worker.kafka.parameters import PublishedParameters, UnfitError
from worker.kafka.versions import VersionReader
from worker.metrics import Metrics
from worker.runtime.supervision import Pauses
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

ZERO = Parameters.first(settings(), ARMS)
TOPICS = Topics("t")
PLACE = TOPICS.parameters, 0


class Topic:
    """The parameters topic; `error` is raised by the next read."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.error: Exception | None = None
        self.opened = 0

    def append(self, parameters: Parameters) -> None:
        self.values.append(encode_parameters(parameters))


class Reader:
    """Reads it as a `TopicReader` does."""

    def __init__(self, topic: Topic) -> None:
        self.topic, self.positions = topic, {PLACE: 0}
        topic.opened += 1

    def read_from(self, positions: dict[tuple[str, int], int]) -> None:
        self.positions = dict(positions)

    def poll(self, seconds: float) -> list[FakeMessage]:
        error, self.topic.error = self.topic.error, None
        if error is not None:
            raise error
        start = self.positions[PLACE]
        self.positions[PLACE] = len(self.topic.values)
        return [FakeMessage(PLACE, start + at, b"0", one) for at, one in enumerate(self.topic.values[start:])]

    def close(self) -> None:
        pass


@asynccontextmanager
async def reading(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[VersionReader, PublishedParameters, Metrics]]:
    monkeypatch.setattr("worker.kafka.versions.TopicReader", lambda *_, **__: Reader(topic))
    monkeypatch.setattr("worker.kafka.versions.AdminClient", lambda _: None)
    monkeypatch.setattr("worker.kafka.versions.offsets_of", lambda *_: {PLACE: len(topic.values)})
    monkeypatch.setattr(VersionReader, "pauses", Pauses(first=0.001, most=0.001))
    metrics = Metrics()
    published = PublishedParameters(ZERO, [], metrics)
    reader = VersionReader(Connection(servers=("127.0.0.1:1",)), TOPICS, published, metrics.troubles)
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
async def test_versions_come_with_prepared_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    topic, made = Topic(), list[int]()
    monkeypatch.setattr("worker.kafka.versions.prepared", lambda one: made.append(one.version) or None)
    topic.append(ZERO)
    async with reading(topic, monkeypatch) as (reader, published, _):
        await reader.catch_up()
        topic.append(version(1))
        await until(lambda: published.version == 1)
        topic.append(version(1, made_at=5))  # published again
        await reader.catch_up()
    assert made == [0, 1]


@in_loop
async def test_catching_up_returns_when_all_is_taken_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic()
    async with reading(topic, monkeypatch) as (reader, published, _):
        caught_up = asyncio.create_task(reader.catch_up())
        await asyncio.sleep(0)
        assert not reader.ready, "there is no version yet"
        for number in range(3):
            topic.append(version(number))
        await caught_up
        assert published.version == 2
        topic.append(version(3))
        await reader.catch_up()
        assert published.version == 3


@in_loop
async def test_a_topic_that_cannot_be_read_is_trouble_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic()
    topic.append(ZERO)
    topic.error = KafkaException(KafkaError(KafkaError._TRANSPORT))
    async with reading(topic, monkeypatch) as (reader, published, metrics):
        await reader.catch_up()
        assert (topic.opened, published.version) == (2, 0)
        assert "versions-down" not in {trouble.name for trouble in metrics.troubles.active()}


@in_loop
async def test_a_record_that_is_no_version_is_refused_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic()
    topic.append(ZERO)
    topic.values += [b"{", None]
    topic.append(version(1))
    async with reading(topic, monkeypatch) as (reader, published, metrics):
        await reader.catch_up()
        assert published.version == 1
        assert metrics.registry.get_sample_value("adcascade_refused_versions_total") == 1


@in_loop
async def test_a_version_that_this_worker_cannot_serve_by_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic()
    topic.append(Parameters.first(settings(dim=settings().dim + 1), ARMS))
    async with reading(topic, monkeypatch) as (reader, _, _metrics):
        with pytest.raises(
            UnfitError, match=r"another worker has published version 0: --dim is \d, but the published .* have \d"
        ):
            await reader.run()
