"""Write in batches, in order, through one idempotent producer.

Records are appended to the batch that waits for its request; a new batch is opened only when that one is full or on its
way. So while a request is in flight (aiokafka has one at a time per broker) all new records collect in the next one,
and a busy worker writes few large batches without a linger time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import ProducerClosed
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.structs import TopicPartition

from worker.kafka.producing import ProduceRequests

_NO_HEADERS: list[tuple[str, bytes]] = []


class TopicWriter:
    """Writes to one partition of a topic, in the order of the calls.

    Each call returns the batches that its records are in. A batch's `future` resolves when all replicas have it.
    """

    def __init__(self, producer: AIOKafkaProducer, tp: TopicPartition, requests: ProduceRequests | None = None) -> None:
        self._accumulator = producer._message_accumulator
        self._requests = requests
        self._tp = tp
        self._batch: Any = None

    def write(self, pairs: Iterable[tuple[bytes | None, bytes | None]]) -> list[MessageBatch]:
        """Append keys with values."""
        # Calls the function below aiokafka's own `append`, in one loop: this halves the time per record, and there are
        # two or three records for each event.
        now = int(time.time() * 1000)
        used: list[MessageBatch] = []
        if (batch := self._open()) is not None:
            builder = batch._builder
            append, offset = builder._builder.append, builder._relative_offset
        for key, value in pairs:
            if batch is None or append(offset, now, key, value, _NO_HEADERS) is None:
                if batch is not None:
                    builder._relative_offset = offset
                    builder._closed = True
                batch = self._next()
                builder = batch._builder
                append, offset = builder._builder.append, 0
                append(offset, now, key, value, _NO_HEADERS)
                used.append(batch)
            elif not used:
                used.append(batch)
            offset += 1
        if batch is not None:
            builder._relative_offset = offset
        return used

    def write_with_headers(
        self, records: Iterable[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]
    ) -> list[MessageBatch]:
        """Append keys with values and headers."""
        now = int(time.time() * 1000)
        used: list[MessageBatch] = []
        batch = self._open()
        for key, value, headers in records:
            if batch is None or batch._builder.append(timestamp=now, key=key, value=value, headers=headers) is None:
                batch = self._next()
                batch._builder.append(timestamp=now, key=key, value=value, headers=headers)
            if not used or used[-1] is not batch:
                used.append(batch)
        return used

    def _open(self) -> Any:
        # The sender reserves the sequence numbers of a batch when it takes it, one turn of the loop before it closes
        # the builder. A record appended in between would have no number, and the broker would refuse all that follows.
        batch = self._batch
        if batch is None:
            return None
        is_taken = batch._drain_waiter.done() if self._requests is None else batch.is_taken
        return None if is_taken or batch._builder._closed else batch

    def _next(self) -> Any:
        accumulator = self._accumulator
        if accumulator._closed:
            raise ProducerClosed
        if accumulator._exception is not None:
            raise copy.copy(accumulator._exception)
        # As `send_batch`, but without waiting for the batch before: the queue of a partition keeps the order, and
        # `PartitionPipelines` limits the number of records in flight.
        if self._requests is None:
            self._batch = accumulator._append_batch(accumulator.create_builder(), self._tp)
        else:
            self._batch = self._requests.add(self._tp)
        return self._batch


class TopicWriters:
    """The topic writers of one producer, by topic and partition; `requests` send for it, if given."""

    def __init__(self, producer: AIOKafkaProducer, requests: ProduceRequests | None = None) -> None:
        self._producer = producer
        self._requests = requests
        self._writers: dict[tuple[str, int], TopicWriter] = {}

    async def load_metadata(self, *topics: str) -> None:
        """Load the metadata of topics before the first write to them, and keep it up to date.

        Waiting for it is not enough: the first answer of a broker is about all topics, the later ones only about those
        that were asked for, and then the leader of the others is unknown for ever.
        """
        client = self._producer.client
        for topic in topics:
            client.add_topic(topic)
        for topic in topics:
            await client._wait_on_metadata(topic)

    def flush(self) -> None:
        """Send what was written, if that is left to `requests`."""
        if self._requests is not None:
            self._requests.flush()

    def writer(self, topic: str, partition: int) -> TopicWriter:
        """Return the writer of a partition."""
        writer = self._writers.get((topic, partition))
        if writer is None:
            tp = TopicPartition(topic, partition)
            writer = self._writers[topic, partition] = TopicWriter(self._producer, tp, self._requests)
        return writer
