"""Topics of `adcascade bench kafka`: create, fill, watch and delete them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.recording import Recording
from worker.errors import FailedError
from worker.kafka.clients import admin_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, create
from worker.kafka.writer import TopicWriters
from worker.stream.parameters import Parameters
from worker.stream.partitioning import murmur2_partition
from worker.stream.topology import Topics
from worker.stream.version_encoding import encode_parameters

Pair = tuple[bytes, bytes]
# The default of producers. Batches larger than a consumer's max_partition_fetch_bytes would come from one partition at
# a time only.
BATCH = 16 << 10
LOOK = 0.01  # seconds between two looks at the end offsets
PATIENCE = 120.0  # seconds without a new record before a run counts as failed


async def prepare(connection: Connection, names: Topics, count: int, *, parameters: Parameters | None = None) -> None:
    """Create topics with `count` partitions, and publish a version if one is given."""
    await create(connection, names, TopicLayout(partitions=count))
    if parameters is not None:
        value = encode_parameters(parameters)
        await fill(connection, {(names.parameters, 0): [(b"1", value)]})


async def delete(connection: Connection, prefix: str) -> None:
    """Delete all topics with this prefix."""
    async with admin_client(connection) as admin:
        ours = [name for name in await admin.list_topics() if name.startswith(prefix)]
        if ours:
            await admin.delete_topics(ours)


def inputs(names: Topics, recording: Recording, count: int) -> dict[tuple[str, int], list[Pair]]:
    """Return the arrivals and clicks of a recording by topic and partition, for `count` partitions."""
    parts: dict[tuple[str, int], list[Pair]] = {}
    for topic, records in ((names.arrivals, recording.arrivals), (names.clicks, recording.clicks)):
        for sent in records:
            parts.setdefault((topic, murmur2_partition(sent.key, count)), []).append((sent.key, sent.value))
    return parts


async def fill(connection: Connection, parts: Mapping[tuple[str, int], Iterable[Pair]]) -> None:
    """Write records by topic and partition; return when the broker has acknowledged them."""
    async with AIOKafkaProducer(
        **connection.arguments(), enable_idempotence=True, max_batch_size=BATCH, max_request_size=16 << 20
    ) as producer:
        writers = TopicWriters(producer)
        await writers.load_metadata(*{topic for topic, _ in parts})
        batches = [
            batch for (topic, part), pairs in parts.items() for batch in writers.writer(topic, part).write(pairs)
        ]
        await asyncio.gather(*(batch.future for batch in batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The time that a number of events took: on the clock, and of the processor."""

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


class EndOffsets:
    """Count the records of topics by their end offsets."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer

    async def count(self, topics: Sequence[TopicPartition]) -> int:
        """Return the number of records in these partitions."""
        return int(sum((await self._consumer.end_offsets(topics)).values()))

    async def reached(self, topics: Sequence[TopicPartition], count: int, child: ChildProcess) -> tuple[float, int]:
        """Wait until the partitions have `count` records; return the time, and the number of records at that time."""
        seen, since = -1, time.monotonic()
        while True:
            there, now = await self.count(topics), time.monotonic()
            if there >= count:
                return now, there
            if there > seen:
                seen, since = there, now
            child.check()
            if now - since > PATIENCE:
                raise FailedError(f"{child.name}: {there} of {count} records, and no more: {child.last_error()}")
            await asyncio.sleep(LOOK)

    async def usage(self, topics: Sequence[TopicPartition], count: int, child: ChildProcess) -> Usage:
        """Return the time that a child takes from its first records in these partitions until there are `count`.

        The start of the process, the join of its group and its recovery come before its first record, and do not count.
        The first records that are seen do not count either: the work on them was done before.
        """
        began, first = await self.reached(topics, 1, child)
        before = child.processor_seconds()
        if first >= count:  # so few that all came between two looks
            return Usage(events=first, seconds=LOOK, processor=before)
        ended, there = await self.reached(topics, count, child)
        return Usage(events=there - first, seconds=ended - began, processor=child.processor_seconds() - before)


@asynccontextmanager
async def end_offsets(connection: Connection) -> AsyncIterator[EndOffsets]:
    """Yield the end offsets, over a consumer of their own."""
    async with standalone_consumer(connection) as consumer:
        yield EndOffsets(consumer)


def partitions(topic: str, count: int) -> list[TopicPartition]:
    """Return the partitions of a topic.

    >>> partitions("t", 1)
    [TopicPartition(topic='t', partition=0)]
    """
    return [TopicPartition(topic, number) for number in range(count)]
