"""The Kafka client of simulated traffic: sends its records in batches and receives the decisions.

Kafka's default partitioner (murmur2) chooses the partition of a key, so all records of a session are in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.clients import partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.writer import TopicWriters
from worker.simulation.traffic.generator import Traffic
from worker.simulation.users import Sent
from worker.stream.partitioning import murmur2_partition
from worker.stream.topology import Topics

PAUSE: Final = 0.002  # seconds between two checks for records that are due
MOST_IN_FLIGHT: Final = 64  # batches that the broker has not acknowledged
_BATCH_BYTES: Final = 256 << 10


class KeyedSender:
    """Sends records to the partitions of their keys, in batches that fill while others are in flight."""

    def __init__(self, producer: AIOKafkaProducer, topics: Topics, partitions: int) -> None:
        self._writers = TopicWriters(producer)
        self._names = {"arrivals": topics.arrivals, "clicks": topics.clicks}
        self._partitions = partitions
        self._in_flight: dict[asyncio.Future[Any], None] = {}  # in the order of sending

    async def start(self) -> None:
        """Load the metadata of the topics."""
        await self._writers.load_metadata(*self._names.values())

    async def send(self, records: Iterable[Sent]) -> None:
        """Hand records to the producer; wait only while too many batches are in flight."""
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for record in records:
            parts[record.topic, murmur2_partition(record.key, self._partitions)].append((record.key, record.value))
        for (topic, partition), pairs in parts.items():
            for batch in self._writers.writer(self._names[topic], partition).write(pairs):
                self._in_flight[batch.future] = None
        await self._settle(MOST_IN_FLIGHT)

    async def flush(self) -> None:
        """Wait until the broker has acknowledged everything."""
        await self._settle(0)

    async def _settle(self, most: int) -> None:
        """Drop acknowledged batches, raise failures, and wait until at most `most` batches are in flight."""
        in_flight = self._in_flight
        while in_flight:
            oldest = next(iter(in_flight))
            if len(in_flight) <= most and not oldest.done():
                return
            await oldest
            del in_flight[oldest]


async def run_traffic(
    connection: Connection, topics: Topics, traffic: Traffic, *, stop: asyncio.Event, show: Callable[[], None]
) -> None:
    """Run traffic until it is finished or `stop` is set; `show` is called after every round of sending."""
    counts = await partition_counts(connection, topics.arrivals, topics.clicks, topics.decisions)
    partitions, clicks = counts[topics.arrivals], counts[topics.clicks]
    if partitions != clicks:
        raise FailedError(
            f"{topics.arrivals} has {partitions} partitions, {topics.clicks} has {clicks}; the numbers must be equal"
        )
    async with (
        _consumer(connection, topics.decisions, counts[topics.decisions]) as consumer,
        _producer(connection) as producer,
    ):
        sender = KeyedSender(producer, topics, partitions)
        await sender.start()
        await _exchange(consumer, sender, traffic, stop, show)


async def _exchange(
    consumer: AIOKafkaConsumer, sender: KeyedSender, traffic: Traffic, stop: asyncio.Event, show: Callable[[], None]
) -> None:
    received = asyncio.Event()  # decisions, so answers may be due

    async def receive() -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=200)
            now = time.time_ns()
            for records in fetched.values():
                traffic.receive((record.value for record in records), now)
            if fetched:
                received.set()
                await asyncio.sleep(0)  # a full buffer would otherwise be read without a pause for the sender

    receiver = asyncio.create_task(receive())
    try:
        while not (traffic.finished or stop.is_set() or traffic.stalled(time.time_ns())):
            if receiver.done():
                await receiver
            await sender.send(traffic.due(time.time_ns()))
            show()
            received.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await received.wait()
        await sender.flush()
    finally:
        receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiver


@contextlib.asynccontextmanager
async def _consumer(connection: Connection, topic: str, partitions: int) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield a consumer at the end of a topic."""
    async with standalone_consumer(connection) as consumer:
        tps = [TopicPartition(topic, partition) for partition in range(partitions)]
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)  # the seek takes effect here: every later decision will be received
        yield consumer


@contextlib.asynccontextmanager
async def _producer(connection: Connection) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(**connection.arguments(), enable_idempotence=True, max_batch_size=_BATCH_BYTES)
    try:
        await producer.start()
        yield producer
    finally:
        await producer.stop()
