"""Looking at topics from outside any group."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer

from worker.errors import FailedError
from worker.kafka.clients import administrator, partitions_of
from worker.kafka.connection import Connection


async def partition_counts(connection: Connection, *topics: str) -> dict[str, int]:
    """Return how many partitions topics have, in the order given; one that does not exist is a `FailedError`."""
    async with administrator(connection) as admin:
        found = await partitions_of(admin, topics)
    for topic in topics:
        if topic not in found:
            raise FailedError(f"no topic {topic}: create it first (adcascade topics create), or give another --prefix")
    return {topic: len(found[topic]) for topic in topics}


def outsider(connection: Connection) -> AIOKafkaConsumer:
    """Return a consumer in no group, which commits nothing; it sees what the workers see, so committed records only."""
    return AIOKafkaConsumer(
        **connection.arguments(),
        group_id=None,
        enable_auto_commit=False,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        # Requests of one connection are answered in turn: a question for the end waits behind a parked fetch.
        fetch_max_wait_ms=100,
    )
