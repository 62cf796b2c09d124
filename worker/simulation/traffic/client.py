"""Simulated traffic on Kafka: sends the records that are due, and takes the decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from worker.client.kafka import KafkaTransport
from worker.client.transport import ClientTransport, Keyed
from worker.kafka.connection import Connection
from worker.simulation.traffic.generator import Traffic
from worker.simulation.users import Sent
from worker.stream.topology import Record, Topics

PAUSE: Final = 0.002  # seconds between two checks for records that are due
MOST_IN_FLIGHT: Final = 10_000  # records without a delivery report


class BoundedSender:
    """Sends records, and waits while too many are in flight."""

    def __init__(self, transport: ClientTransport) -> None:
        self._transport = transport
        self._in_flight: deque[asyncio.Future[None]] = deque()

    async def send(self, records: Iterable[Sent]) -> None:
        """Send records; wait only while too many are in flight. Raises `UndeliveredError`."""
        self._in_flight += [self._transport.send(Keyed(record.topic, record.key, record.value)) for record in records]
        await self._settle(MOST_IN_FLIGHT)

    async def flush(self) -> None:
        """Wait until everything is delivered."""
        await self._settle(0)

    async def _settle(self, most: int) -> None:
        """Drop what is delivered, raise failures, and wait until at most `most` records are in flight."""
        in_flight = self._in_flight
        while in_flight and (len(in_flight) > most or in_flight[0].done()):
            await in_flight.popleft()


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
