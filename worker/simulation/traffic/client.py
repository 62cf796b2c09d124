"""Simulated traffic over a transport: sends the records that are due, and receives the decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from worker.client.transport import ClientTransport, Keyed
from worker.simulation.traffic.generator import Traffic
from worker.stream.topology import Record

PAUSE: Final = 0.002  # seconds between two checks for records that are due
MOST_IN_FLIGHT: Final = 10_000  # records without a delivery report


async def run_traffic(
    transport: ClientTransport, traffic: Traffic, *, stop: asyncio.Event, show: Callable[[], None]
) -> None:
    """Run traffic until it is finished or `stop` is set; `show` is called after every round of sending.

    Raises `UndeliveredError` if a record cannot be delivered.
    """
    received = asyncio.Event()  # decisions, so answers may be due
    in_flight: deque[asyncio.Future[None]] = deque()

    def receive(records: Sequence[Record]) -> None:
        traffic.receive((record.value for record in records), time.time_ns())
        received.set()

    async def settle(most: int) -> None:
        """Drop what is delivered, raise failures, and wait until at most `most` records are in flight."""
        while in_flight and (len(in_flight) > most or in_flight[0].done()):
            await in_flight.popleft()

    await transport.start(receive)
    try:
        while not (traffic.finished or stop.is_set() or traffic.stalled(time.time_ns())):
            due = traffic.due(time.time_ns())
            in_flight += [transport.send(Keyed(record.topic, record.key, record.value)) for record in due]
            await settle(MOST_IN_FLIGHT)
            show()
            received.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await received.wait()
        await settle(0)
    finally:
        await transport.stop()
