"""Simulated traffic on Kafka: sends the records that are due, and takes the decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from worker.client.kafka import KafkaTransport
from worker.client.transport import Keyed, Transport
from worker.kafka.connection import Connection
from worker.simulation.traffic.generator import Traffic
from worker.simulation.users import Sent
from worker.stream.topology import Record, Topics

PAUSE: Final = 0.002  # seconds between two checks for records that are due
MOST_IN_FLIGHT: Final = 64  # batches that the broker has not acknowledged


class BoundedSender:
    """Sends records, and waits while too many batches are in flight."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._in_flight: dict[asyncio.Future[Any], None] = {}  # in the order of sending

    async def send(self, records: Iterable[Sent]) -> None:
        """Send records; wait only while too many batches are in flight."""
        self._in_flight |= dict.fromkeys(
            self._transport.send_all(Keyed(record.topic, record.key, record.value) for record in records)
        )
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
    received = asyncio.Event()  # decisions, so answers may be due

    def receive(records: Sequence[Record]) -> None:
        traffic.receive((record.value for record in records), time.time_ns())
        received.set()

    transport = KafkaTransport(connection, topics)
    await transport.start(receive)
    try:
        sender = BoundedSender(transport)
        while not (traffic.finished or stop.is_set() or traffic.stalled(time.time_ns())):
            await sender.send(traffic.due(time.time_ns()))
            show()
            received.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await received.wait()
        await sender.flush()
    finally:
        await transport.stop()
