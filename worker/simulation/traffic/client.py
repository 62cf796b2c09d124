"""Lets a crowd talk to the workers over Kafka: its records go out in batches, the decisions come back.

The crowd decides what is sent and when (`worker.simulation.traffic`); this only moves bytes and tells the time. A
record goes to the partition that Kafka's own partitioner gives its key (murmur2), so that all of a session are in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.partitioner import murmur2
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.clients import partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.writer import TopicWriters
from worker.stream.topology import Topics

PAUSE: Final = 0.002  # seconds between two looks at what is due
MOST_UNDER_WAY: Final = 64  # batches that the broker has not acknowledged
_BATCH_BYTES: Final = 256 << 10


class Outgoing(Protocol):
    """A record that the crowd sends; `topic` is without prefix."""

    @property
    def topic(self) -> str:
        """`arrivals` or `clicks`."""

    @property
    def key(self) -> bytes:
        """The session."""

    @property
    def value(self) -> bytes:
        """What is sent."""


class Crowd(Protocol):
    """Who talks; all times in nanoseconds since the epoch."""

    def due(self, now: int) -> Sequence[Outgoing]:
        """Return what is to be sent by now, in order."""

    def heard(self, values: Iterable[bytes | None], now: int) -> None:
        """Take decisions in."""

    def forlorn(self, now: int) -> bool:
        """Say whether there is nothing left to wait for, though not all has come."""

    @property
    def finished(self) -> bool:
        """Whether all is said."""


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's own partitioner gives a key.

    >>> partition_of(b"s-1", 8)
    7
    """
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


class KeyedSender:
    """Sends records to the partitions of their keys, in batches that fill while others are under way."""

    def __init__(self, producer: AIOKafkaProducer, topics: Topics, partitions: int) -> None:
        self._outlets = TopicWriters(producer)
        self._names = {"arrivals": topics.arrivals, "clicks": topics.clicks}
        self._partitions = partitions
        self._under_way: dict[asyncio.Future[Any], None] = {}  # in the order of sending

    async def start(self) -> None:
        """Find out where the partitions are."""
        await self._outlets.load_metadata(*self._names.values())

    async def send(self, records: Iterable[Outgoing]) -> None:
        """Hand records over; waits only while too much is under way."""
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        partitions = self._partitions
        for record in records:
            key = record.key
            parts[record.topic, partition_of(key, partitions)].append((key, record.value))
        for (topic, partition), pairs in parts.items():
            for batch in self._outlets.writer(self._names[topic], partition).write(pairs):
                self._under_way[batch.future] = None
        await self._settle(MOST_UNDER_WAY)

    async def flush(self) -> None:
        """Return when the broker has everything."""
        await self._settle(0)

    async def _settle(self, most: int) -> None:
        """Forget what is acknowledged, raise what failed, and wait until no more than `most` batches are under way."""
        under_way = self._under_way
        while under_way:
            oldest = next(iter(under_way))
            if len(under_way) <= most and not oldest.done():
                return
            await oldest
            del under_way[oldest]


async def attend(
    connection: Connection,
    topics: Topics,
    crowd: Crowd,
    *,
    stop: asyncio.Event,
    show: Callable[[], None] = lambda: None,
) -> None:
    """Let the crowd send and hear until it is finished or `stop` is set; `show` is called again and again."""
    counts = await partition_counts(connection, topics.arrivals, topics.clicks, topics.decisions)
    partitions, clicks = counts[topics.arrivals], counts[topics.clicks]
    if partitions != clicks:
        raise FailedError(
            f"{topics.arrivals} has {partitions} partitions and {topics.clicks} has {clicks}: they must have as many"
        )
    async with (
        _listener(connection, topics.decisions, counts[topics.decisions]) as consumer,
        _producer(connection) as producer,
    ):
        sender = KeyedSender(producer, topics, partitions)
        await sender.start()
        await _talk(consumer, sender, crowd, stop, show)


async def _talk(
    consumer: AIOKafkaConsumer, sender: KeyedSender, crowd: Crowd, stop: asyncio.Event, show: Callable[[], None]
) -> None:
    news = asyncio.Event()  # decisions have come, so answers may be due

    async def listen() -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=200)
            now = time.time_ns()
            for records in fetched.values():
                crowd.heard((record.value for record in records), now)
            if fetched:
                news.set()
                await asyncio.sleep(0)  # a full buffer would otherwise be read without ever giving way

    listener = asyncio.create_task(listen())
    try:
        while not (crowd.finished or stop.is_set() or crowd.forlorn(time.time_ns())):
            if listener.done():
                await listener
            await sender.send(crowd.due(time.time_ns()))
            show()
            news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await news.wait()
        await sender.flush()
    finally:
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener


@contextlib.asynccontextmanager
async def _listener(connection: Connection, topic: str, partitions: int) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield a consumer that stands at the end of a topic."""
    async with standalone_consumer(connection) as consumer:
        tps = [TopicPartition(topic, partition) for partition in range(partitions)]
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)  # only now it stands there: what is decided from here on is heard
        yield consumer


@contextlib.asynccontextmanager
async def _producer(connection: Connection) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(**connection.arguments(), enable_idempotence=True, max_batch_size=_BATCH_BYTES)
    try:
        await producer.start()
        yield producer
    finally:
        await producer.stop()
