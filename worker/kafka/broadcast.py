"""The parameters topic, read by every worker from its beginning, outside the group.

Faust's `GlobalTable` would do this too, but recovers in a loop when several workers run (faust-streaming issue 283).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition
from mode import Service

from worker.kafka.connection import Connection
from worker.kafka.records import plain
from worker.kafka.transport import ParametersSink

log = logging.getLogger(__name__)


class Broadcast(Service):
    """Feeds the sink as long as the worker runs; an error of the broker is waited out."""

    def __init__(self, *, connection: Connection, topic: str, sink: ParametersSink, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._connection = connection
        self._tp = TopicPartition(topic, 0)
        self._sink = sink
        self._consumer: AIOKafkaConsumer | None = None
        self._position = 0
        self._moved = asyncio.Event()
        #: Set when everything that was there at the start has been read.
        self.ready = asyncio.Event()

    async def on_start(self) -> None:
        """Connect and find the beginning."""
        consumer = AIOKafkaConsumer(
            **self._connection.arguments(),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            # Requests of one connection are answered in turn: a question for the end waits behind a parked fetch.
            fetch_max_wait_ms=100,
            # A record may be larger: then the broker sends it alone.
            max_partition_fetch_bytes=8 << 20,
        )
        await consumer.start()
        consumer.assign([self._tp])
        await consumer.seek_to_beginning(self._tp)
        self._consumer = consumer

    async def on_stop(self) -> None:
        """Disconnect."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()

    @Service.task
    async def _read(self) -> None:
        consumer = self._consumer
        assert consumer is not None
        end = await self._end()
        while not self.should_stop:
            try:
                fetched = await consumer.getmany(self._tp, timeout_ms=200)
                self._position = await consumer.position(self._tp)
            except KafkaError as error:
                log.warning("parameters cannot be read: %r; trying again", error)
                await self.sleep(1.0)
                continue
            records = [plain(record) for record in fetched.get(self._tp, ())]
            if records:
                self._sink.handle(records)
            if self._position >= end:
                self.ready.set()
            self._moved.set()

    async def _end(self) -> int:
        assert self._consumer is not None
        ends = await self._consumer.end_offsets([self._tp])
        return int(ends[self._tp])

    async def read_to_end(self) -> None:
        """Return when the sink has seen everything that is in the topic now."""
        end = await self._end()
        while self._position < end:
            self._moved.clear()
            await self._moved.wait()
