"""The transport over Kafka: one producer, and one consumer outside of any group.

Rules that hold here:

- Kafka's default partitioner (murmur2) chooses the partition of a key. The number of partitions is the
  one that arrivals, clicks and decisions have in common while topics are extended one after the other.
- Arrivals go out at once, and feedback a few milliseconds later at most (`worker.client.sending`). Decisions are handed
  over as they come (`worker.client.reading`).
- Records may be sent twice after a lost connection, since workers take every record any number of times. So the
  producer is not idempotent: no failure makes it unusable for good.
- The consumer starts at the ends of the partitions. Partitions that appear later are read from their beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from worker.client.reading import DecisionReader
from worker.client.sending import RecordSender
from worker.client.transport import Keyed, Receive
from worker.errors import FailedError
from worker.kafka.clients import partition_counts, readable_errors, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.direct import close_if_silent
from worker.stream.partitioning import murmur2_partition
from worker.stream.topology import Topics

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 256 << 10
_REQUEST_TIMEOUT: Final = 40.0  # seconds after which a broker that does not answer a fetch is connected anew


class KafkaTransport:
    """Send to the input topics and receive decisions.

    Parameters
    ----------
    delivery_timeout : seconds after which a record that no broker took is given up
    refresh : seconds between two looks at the partitions and at the brokers
    """

    def __init__(
        self, connection: Connection, topics: Topics, *, delivery_timeout: float = 30.0, refresh: float = 5.0
    ) -> None:
        self._connection, self._topics = connection, topics
        self._delivery_timeout, self._refresh = delivery_timeout, refresh
        self._names = {"arrivals": topics.arrivals, "clicks": topics.clicks}
        self._receive: Receive = lambda _: None
        self._stack = contextlib.AsyncExitStack()
        self._producer: AIOKafkaProducer
        self._consumer: AIOKafkaConsumer
        self._sender: RecordSender
        self._reader: DecisionReader
        self.partitions = 0
        self.trouble: str | None = "not connected"

    # ── connection ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, receive: Receive) -> None:
        """Connect, and go to the ends of the decisions."""
        self._receive = receive
        topics = self._topics
        try:
            with readable_errors(self._connection):
                counts = await partition_counts(self._connection, topics.arrivals, topics.clicks, topics.decisions)
                self.partitions = _common(counts)
                await self._open_consumer(counts[topics.decisions])
                await self._open_producer()
        except BaseException:
            await self._stack.aclose()
            raise
        self.trouble = None
        for work in (self._reader.run(), self._watch()):
            self._stack.push_async_callback(_cancel, asyncio.create_task(work))

    async def stop(self) -> None:
        """Send what is left, for as long as a delivery may take, and disconnect."""
        self.trouble = "closed"
        await self._stack.aclose()

    async def _open_consumer(self, partitions: int) -> None:
        self._consumer = await self._stack.enter_async_context(
            standalone_consumer(self._connection, auto_offset_reset="latest")
        )
        self._reader = DecisionReader(self._consumer, self._topics.decisions, lambda records: self._receive(records))
        await self._reader.seek_to_end(partitions)  # every later decision will be received

    async def _open_producer(self) -> None:
        self._producer = AIOKafkaProducer(
            **self._connection.arguments(),
            acks="all",
            linger_ms=0,
            max_batch_size=_BATCH_BYTES,
            request_timeout_ms=int(1000 * self._delivery_timeout),
        )
        self._stack.push_async_callback(self._producer.stop)
        await self._producer.start()
        self._sender = RecordSender(self._producer, timeout=self._delivery_timeout, patient=(self._topics.clicks,))
        self._stack.push_async_callback(self._sender.close)
        await self._sender.load_metadata(*self._names.values(), self._topics.decisions)

    # ── records out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, record: Keyed) -> asyncio.Future[Any]:
        """Send a record; the future is that of its batch."""
        return self._write(record.topic, self._place(record), [(record.key, record.value)])[0]

    def send_all(self, records: Iterable[Keyed]) -> list[asyncio.Future[Any]]:
        """Send records together; return the futures of their batches."""
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for record in records:
            parts[record.topic, self._place(record)].append((record.key, record.value))
        return [
            future for (topic, partition), pairs in parts.items() for future in self._write(topic, partition, pairs)
        ]

    def _place(self, record: Keyed) -> int:
        return murmur2_partition(record.key, self.partitions) if record.partition is None else record.partition

    def _write(self, topic: str, partition: int, pairs: list[tuple[bytes, bytes]]) -> list[asyncio.Future[Any]]:
        return self._sender.write(self._names[topic], partition, pairs)

    # ── brokers and partitions ───────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Look from time to time whether the brokers answer, and how many partitions all three topics have."""
        while True:
            await asyncio.sleep(self._refresh)
            client, now = self._producer.client, asyncio.get_running_loop().time()
            close_if_silent(client, now - self._delivery_timeout)
            close_if_silent(self._consumer._client, now - _REQUEST_TIMEOUT)
            if not await client.force_metadata_update():
                self._report(f"no broker of {', '.join(self._connection.servers)} can be reached")
                continue
            self._report(None)
            topics = (*self._names.values(), self._topics.decisions)
            self._follow(min(len(client.cluster.partitions_for_topic(topic) or ()) for topic in topics))

    def _follow(self, found: int) -> None:
        """Read partitions that are new; only then send to them."""
        if found > self.partitions:
            log.info("the topics have %d partitions, %d before", found, self.partitions)
            self._reader.extend(found)
            self.partitions = found

    def _report(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            log.warning(trouble or "the brokers can be reached again")
            self.trouble = trouble


def _common(counts: dict[str, int]) -> int:
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{topic} has {count} partitions" for topic, count in counts.items())
        raise FailedError(f"{found}; the numbers must be equal")
    return next(iter(counts.values()))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
