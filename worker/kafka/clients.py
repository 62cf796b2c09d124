"""Short conversations with Kafka, for commands: ask, read a topic to its end, append a record.

Each ends with a value or with one line that says why not; what the client library has to say meanwhile is kept back.
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
from worker.stream.topology import Record

T = TypeVar("T")

#: Milliseconds that a broker may take for one answer.
PATIENCE = 10_000


def converse(connection: Connection, conversation: Coroutine[Any, Any, T]) -> T:
    """Run a conversation; raise `FailedError` with one line if the brokers cannot be reached or refuse."""
    with _kept_back() as said:
        try:
            return asyncio.run(conversation)
        except (KafkaError, OSError) as error:
            # What went wrong with a broker is only logged; the error says that none could be used.
            reason = said[-1] if said else f"{type(error).__name__} {error}".strip()
            raise FailedError(f"cannot use Kafka at {', '.join(connection.servers)}: {reason}") from None


@contextmanager
def _kept_back() -> Iterator[list[str]]:
    """Collect what the client library logs, in place of showing it."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    logger, keeper = logging.getLogger("aiokafka"), Keeper(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(keeper)
    try:
        yield said
    finally:
        logger.removeHandler(keeper)
        logger.propagate = propagated


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def administrator(connection: Connection) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yield a client that asks about topics and creates them."""
    admin = AIOKafkaAdminClient(**connection.arguments(), request_timeout_ms=PATIENCE)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def reader(connection: Connection) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield a consumer outside of any group."""
    consumer = AIOKafkaConsumer(
        **connection.arguments(),
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
        max_partition_fetch_bytes=8 << 20,
        request_timeout_ms=PATIENCE,
    )
    try:
        await consumer.start()
        yield consumer
    finally:
        await consumer.stop()


async def partitions_of(admin: AIOKafkaAdminClient, topics: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the partitions of those of the topics that exist."""
    # Asked for by name, a broker that creates topics by itself would create them.
    everything = await admin.describe_topics()
    return {topic["topic"]: topic["partitions"] for topic in everything if topic["topic"] in set(topics)}


async def read_to_end(consumer: AIOKafkaConsumer, topic: str, start: int = 0) -> list[Record]:
    """Return what partition 0 of a topic holds now, from an offset on."""
    tp = TopicPartition(topic, 0)
    if tp not in consumer.assignment():
        consumer.assign([tp])
    first = (await consumer.beginning_offsets([tp]))[tp]
    end = (await consumer.end_offsets([tp]))[tp]
    consumer.seek(tp, min(max(start, first), end))
    records: list[Record] = []
    while await consumer.position(tp) < end:
        fetched = await consumer.getmany(tp, timeout_ms=200)
        # The fields of an aiokafka record that matter; Faust has its own way, and half a second of imports.
        records += [Record(topic, 0, r.offset, r.timestamp, r.key, r.value) for r in fetched.get(tp, ())]
    return records


async def append(connection: Connection, topic: str, value: bytes) -> int:
    """Append a record without a key to partition 0 of a topic; return its offset when all replicas have it."""
    producer = AIOKafkaProducer(
        **connection.arguments(), acks="all", enable_idempotence=True, request_timeout_ms=PATIENCE
    )
    try:
        await producer.start()
        return int((await producer.send_and_wait(topic, value, partition=0)).offset)
    finally:
        await producer.stop()
