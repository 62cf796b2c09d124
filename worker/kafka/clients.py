"""Kafka clients outside of any consumer group: ask for metadata, read topics, append a record.

`run_client` runs them for a command and turns errors into one line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.connection import Connection
from worker.kafka.fetch_sessions import install
from worker.kafka.records import plain
from worker.stream.sizes import VERSION_BYTES
from worker.stream.topology import ONLY_PARTITION, Record

T = TypeVar("T")

#: Milliseconds that a broker may take to answer a request.
REQUEST_TIMEOUT = 10_000


def run_client(connection: Connection, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses Kafka; raise `FailedError` with one line if the brokers are unreachable or refuse."""
    with readable_errors(connection):
        return asyncio.run(work)


@contextmanager
def readable_errors(connection: Connection) -> Iterator[None]:
    """Raise `FailedError` with one line where Kafka cannot be used; meanwhile aiokafka logs nothing."""
    with _captured_log() as messages:
        try:
            yield
        except (KafkaError, OSError) as error:
            # aiokafka logs the cause per broker; its error has only the fact that no broker could be used.
            reason = messages[-1] if messages else f"{type(error).__name__} {error}".strip()
            raise FailedError(f"cannot use Kafka at {', '.join(connection.servers)}: {reason}") from None


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collect the log messages of aiokafka instead of showing them."""

    class Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    logger, capture = logging.getLogger("aiokafka"), Capture(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(capture)
    try:
        yield messages
    finally:
        logger.removeHandler(capture)
        logger.propagate = propagated


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def admin_client(connection: Connection) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yield a client that describes and creates topics."""
    admin = AIOKafkaAdminClient(**connection.arguments(), request_timeout_ms=REQUEST_TIMEOUT)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def standalone_consumer(connection: Connection, **settings: Any) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield a consumer outside of any group. It commits nothing and reads committed records only.

    `settings` override those of the aiokafka consumer.
    """
    defaults: dict[str, Any] = {
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "isolation_level": "read_committed",
        "fetch_max_wait_ms": 500,
        # A record may be larger: then the broker sends it alone.
        "max_partition_fetch_bytes": 8 << 20,
    }
    install()
    consumer = AIOKafkaConsumer(**connection.arguments(), group_id=None, **{**defaults, **settings})
    try:
        await consumer.start()
        yield consumer
    finally:
        await consumer.stop()


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def partitions_of(admin: AIOKafkaAdminClient, topics: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the partitions of those of the topics that exist."""
    # All topics: a broker with auto.create.topics.enable creates those that are asked for by name.
    everything = await admin.describe_topics()
    return {topic["topic"]: topic["partitions"] for topic in everything if topic["topic"] in set(topics)}


async def partition_counts(connection: Connection, *topics: str) -> dict[str, int]:
    """Return the partition counts of topics, in the order given; raise `FailedError` if one does not exist."""
    async with admin_client(connection) as admin:
        found = await partitions_of(admin, topics)
    for topic in topics:
        if topic not in found:
            raise FailedError(f"no topic {topic}: create it first (adcascade topics create), or give another --prefix")
    return {topic: len(found[topic]) for topic in topics}


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_to_end(consumer: AIOKafkaConsumer, topic: str, start: int = 0) -> list[Record]:
    """Return all records of a topic with one partition, from an offset on."""
    tp = TopicPartition(topic, ONLY_PARTITION)
    if tp not in consumer.assignment():
        consumer.assign([tp])
    first = (await consumer.beginning_offsets([tp]))[tp]
    end = (await consumer.end_offsets([tp]))[tp]
    consumer.seek(tp, min(max(start, first), end))
    records: list[Record] = []
    while await consumer.position(tp) < end:
        fetched = await consumer.getmany(tp, timeout_ms=200)
        records += [plain(record) for record in fetched.get(tp, ())]
    return records


async def append(connection: Connection, topic: str, value: bytes) -> int:
    """Append a record without a key to a topic with one partition; return its offset when all replicas have it."""
    producer = AIOKafkaProducer(
        **connection.arguments(),
        acks="all",
        enable_idempotence=True,
        request_timeout_ms=REQUEST_TIMEOUT,
        max_request_size=VERSION_BYTES,  # an order may hold a version
    )
    try:
        await producer.start()
        return int((await producer.send_and_wait(topic, value, partition=ONLY_PARTITION)).offset)
    finally:
        await producer.stop()
