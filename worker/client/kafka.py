"""The transport over Kafka: one producer, and one reader of decisions outside of any group.

Rules that hold here:

- The event loop produces: that never blocks, and a record leaves immediately. One thread polls decisions and delivery
  reports, and hands both to the loop in one call per poll.
- Kafka's default partitioner (murmur2) chooses the partition of a key.
- The reader starts at the ends of the partitions that are there. Running topics are not extended (docs/operations.md).
- Records may be sent twice after a lost connection, and in another order, since workers accept every record any number
  of times. So the producer is not idempotent: no failure makes it unusable.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer

from worker.client.transport import Keyed, Receive, UndeliveredError
from worker.errors import FailedError
from worker.kafka.clients import END, TopicReader, offsets_of, partition_counts, readable_errors, record_of
from worker.kafka.connection import Connection, reason_of
from worker.stream.topology import Record, Topics

log = logging.getLogger(__name__)

#: Seconds that the thread waits for a decision. Delivery reports wait as long; an idle client takes 1 % of a core.
_POLL_WAIT: Final = 0.005
#: Records of a poll: the loop does nothing else while they are received.
_MOST_RECORDS: Final = 2_048
#: Polls that may wait for the loop. Then nothing more is read until it has caught up.
_MOST_POLLS: Final = 4
#: Records that wait for their delivery.
_MOST_UNDELIVERED: Final = 50_000
#: Seconds until the next poll after an error.
_PAUSE: Final = 0.5
#: Seconds that the brokers may take to describe topics before they count as unreachable.
_ANSWER_TIMEOUT: Final = 5.0

#: The future of a record, and the error of its delivery.
_Report: TypeAlias = tuple[asyncio.Future[None], KafkaError | None]


class KafkaTransport:
    """Sends to the input topics and receives decisions.

    Parameters
    ----------
    delivery_timeout : seconds after which a record that no broker accepted is given up
    refresh : seconds between two requests that show whether the brokers answer
    """

    def __init__(
        self, connection: Connection, topics: Topics, *, delivery_timeout: float = 30.0, refresh: float = 5.0
    ) -> None:
        self._connection, self._topics = connection, topics
        self._delivery_timeout, self._refresh = delivery_timeout, refresh
        self._receive: Receive = lambda _: None
        self._loop: asyncio.AbstractEventLoop
        self._producer: Producer
        self._reader: TopicReader
        self._thread: threading.Thread | None = None
        self._watching: asyncio.Task[None]
        self._reports: list[_Report] = []  # of the thread
        self._polls: deque[tuple[list[Record], list[_Report]]] = deque()  # appended by the thread, removed by the loop
        self._stopping = threading.Event()
        self.trouble: str | None = "not connected"

    # ── connection ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, receive: Receive) -> None:
        """Connect, and go to the ends of the decisions."""
        self._receive, self._loop = receive, asyncio.get_running_loop()
        with readable_errors(self._connection):
            await asyncio.to_thread(self._connect)
        self.trouble = None
        self._thread = threading.Thread(target=self._run, name="adcascade-client", daemon=True)
        self._thread.start()
        self._watching = asyncio.create_task(self._watch())

    def _connect(self) -> None:
        connection, topics = self._connection, self._topics
        connection.check()
        counts = partition_counts(connection, topics.arrivals, topics.clicks, topics.decisions)
        # Nobody needs the ends of partitions here, and each would wake the thread.
        self._reader = TopicReader(connection, auto_offset_reset="latest", enable_partition_eof=False)
        decisions = [(topics.decisions, number) for number in range(counts[topics.decisions])]
        self._reader.read_from(offsets_of(self._reader.admin, decisions, END))
        self._producer = Producer(
            connection.configuration(
                acks="all",
                partitioner="murmur2",
                linger_ms=0,
                max_in_flight=5,  # under load, records wait for each other instead of for the broker, in batches
                message_timeout_ms=max(1, int(1000 * self._delivery_timeout)),
                # What waits for brokers that are away; further records are given up.
                queue_buffering_max_messages=_MOST_UNDELIVERED,
                queue_buffering_max_kbytes=64 << 10,
            )
        )
        for topic in topics.inputs:  # so that the first record does not wait for it
            self._producer.list_topics(topic, timeout=_ANSWER_TIMEOUT)

    async def stop(self) -> None:
        """Wait until everything sent is delivered or given up, and disconnect."""
        self.trouble = "closed"
        if self._thread is None:
            return
        self._watching.cancel()
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)

    # ── records out, in the loop ─────────────────────────────────────────────────────────────────────────────────────

    def send(self, record: Keyed) -> asyncio.Future[None]:
        """Send a record."""
        sent: asyncio.Future[None] = self._loop.create_future()
        try:
            if self._stopping.is_set():
                raise RuntimeError("the client is closed")
            self._producer.produce(
                getattr(self._topics, record.topic),
                record.value,
                record.key,
                on_delivery=lambda error, _: self._reports.append((sent, error)),  # in the thread
            )
        except BufferError as error:
            _fail(sent, error)
        except (KafkaException, RuntimeError) as error:
            log.warning("a record cannot be sent: %s", reason_of(error))
            _fail(sent, error)
        return sent

    def _on_poll(self) -> None:
        """Accept a poll of the thread."""
        records, reports = self._polls.popleft()
        errors = []
        for sent, error in reports:
            if sent.done():  # cancelled
                continue
            if error is None:
                sent.set_result(None)
            else:
                _fail(sent, KafkaException(error))
                errors.append(error)
        if errors:
            log.warning("%d records were not delivered: %s", len(errors), reason_of(errors[-1]))
        if records:
            self._receive(records)

    # ── decisions and delivery reports, in the thread ────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """Poll until the transport is stopped and everything sent is delivered or given up."""
        while not (self._stopping.is_set() or self._loop.is_closed()) or len(self._producer):
            decisions = self._read()
            self._producer.poll(0)
            if decisions or self._reports:
                self._polls.append((decisions, self._reports))
                self._reports = []
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_poll)
        self._reader.close()
        self._producer.close()

    def _read(self) -> list[Record]:
        """Return the next decisions; wait for the first of them."""
        try:
            if len(self._polls) < _MOST_POLLS:
                return [record_of(message) for message in self._reader.poll(_POLL_WAIT, _MOST_RECORDS)]
            pause = _POLL_WAIT
        except Exception as error:  # goes on in any case: nobody would notice that it does not
            log.warning("decisions cannot be read: %s; trying again", reason_of(error))
            pause = _PAUSE
        self._producer.poll(pause)
        return []

    # ── the brokers, in the loop ─────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Ask from time to time whether the brokers answer."""
        admin = self._reader.admin
        while True:
            await asyncio.sleep(self._refresh)
            admin.poll(0)  # serves its callbacks
            try:
                with readable_errors(self._connection):
                    await asyncio.wrap_future(admin.describe_cluster(request_timeout=_ANSWER_TIMEOUT))
                trouble = None
                self._connection.errors.clear()
            except FailedError as error:
                trouble = str(error)
            if (trouble is None) != (self.trouble is None):
                log.warning(trouble or "the brokers can be reached again")
            self.trouble = trouble


def _fail(sent: asyncio.Future[None], error: Exception) -> None:
    sent.set_exception(UndeliveredError(f"no broker accepted the record ({reason_of(error)}); send it again"))
    sent.exception()  # whoever does not wait for it needs no complaint of asyncio
