"""Topics of `adcascade bench kafka`: made, filled, watched and thrown away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from worker.bench.kafka.processes import Child
from worker.bench.kafka.recording import Recording
from worker.errors import FailedError
from worker.kafka.clients import admin_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, create
from worker.kafka.writer import TopicWriters
from worker.simulation.traffic.client import partition_of
from worker.stream.parameters import encode_parameters
from worker.stream.topology import Topics

Pair = tuple[bytes, bytes]
# What producers write by default. Larger batches than a consumer's max_partition_fetch_bytes would come from one
# partition at a time only.
BATCH = 16 << 10
LOOK = 0.01  # seconds between two looks at the end of a topic
PATIENCE = 120.0  # seconds without anything new, then it counts as failed


async def prepare(connection: Connection, names: Topics, count: int, *, recording: Recording | None = None) -> None:
    """Create topics with so many partitions; with a recording, publish its parameters."""
    await create(connection, names, TopicLayout(partitions=count))
    if recording is not None:
        value = encode_parameters(recording.parameters)
        await fill(connection, {(names.parameters, 0): [(b"1", value)]})


async def clear(connection: Connection, prefix: str) -> None:
    """Delete all topics whose names begin so."""
    async with admin_client(connection) as admin:
        ours = [name for name in await admin.list_topics() if name.startswith(prefix)]
        if ours:
            await admin.delete_topics(ours)


def inputs(names: Topics, recording: Recording, count: int) -> dict[tuple[str, int], list[Pair]]:
    """Return the arrivals and clicks of a recording by topic and partition, of which there are so many."""
    parts: dict[tuple[str, int], list[Pair]] = {}
    for topic, records in ((names.arrivals, recording.arrivals), (names.clicks, recording.clicks)):
        for sent in records:
            parts.setdefault((topic, partition_of(sent.key, count)), []).append((sent.key, sent.value))
    return parts


async def fill(connection: Connection, parts: Mapping[tuple[str, int], Iterable[Pair]]) -> None:
    """Write records by topic and partition; return when the broker has them."""
    async with AIOKafkaProducer(
        **connection.arguments(), enable_idempotence=True, max_batch_size=BATCH, max_request_size=16 << 20
    ) as producer:
        outlets = TopicWriters(producer)
        await outlets.load_metadata(*{topic for topic, _ in parts})
        batches = [
            batch for (topic, place), pairs in parts.items() for batch in outlets.writer(topic, place).write(pairs)
        ]
        await asyncio.gather(*(batch.future for batch in batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a number of events took."""

    events: int
    seconds: float
    processor: float

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / self.seconds

    @property
    def cost(self) -> float:
        """Processor time per event, in µs."""
        return self.processor / self.events * 1e6


class Ends:
    """Looks at how many records topics have."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer

    async def count(self, topics: Sequence[TopicPartition]) -> int:
        """Return how many records these partitions have."""
        return int(sum((await self._consumer.end_offsets(topics)).values()))

    async def reached(self, topics: Sequence[TopicPartition], count: int, child: Child) -> tuple[float, int]:
        """Wait until there are so many records; return when that was seen, and how many they were then."""
        seen, since = -1, time.monotonic()
        while True:
            there, now = await self.count(topics), time.monotonic()
            if there >= count:
                return now, there
            if there > seen:
                seen, since = there, now
            child.check()
            if now - since > PATIENCE:
                raise FailedError(f"{child.name}: {there} of {count} records, and nothing new: {child.last_words()}")
            await asyncio.sleep(LOOK)

    async def usage(self, topics: Sequence[TopicPartition], count: int, child: Child) -> Usage:
        """Return what a child takes from the first of its records in these partitions to so many of them.

        Until it writes, it starts, joins its group, recovers: none of that counts. What it then has written at once,
        it has worked on before, so that does not count either.
        """
        began, first = await self.reached(topics, 1, child)
        before = child.processor_seconds()
        if first >= count:  # so few that they came at once, within a look
            return Usage(events=first, seconds=LOOK, processor=before)
        ended, there = await self.reached(topics, count, child)
        return Usage(events=there - first, seconds=ended - began, processor=child.processor_seconds() - before)


@asynccontextmanager
async def ends(connection: Connection) -> AsyncIterator[Ends]:
    """Yield a look at the ends of topics."""
    async with standalone_consumer(connection) as consumer:
        yield Ends(consumer)


def partitions(topic: str, count: int) -> list[TopicPartition]:
    """Return the partitions of a topic.

    >>> partitions("t", 1)
    [TopicPartition(topic='t', partition=0)]
    """
    return [TopicPartition(topic, place) for place in range(count)]
