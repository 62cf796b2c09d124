"""Faust's consumer thread without the thread.

Faust runs the Kafka client in a thread and a loop of its own, so that agents which block do not keep it from sending
heartbeats. Ours do not block for longer than a poll takes to handle. Two loops in one interpreter, on the other hand,
take the lock from each other all the time, and every poll and commit has to be handed over and back: on two cores, one
loop took half as much again from a backlog, and at 23,000 events/s answered in a third of the time.

What then has to stay true: nothing in the worker holds the loop up for as long as the session lasts. A worker that does
loses its partitions, which is what should happen to one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from faust.transport.drivers import aiokafka as stock
from mode import Service
from mode.utils.futures import maybe_async


class SameLoopConsumer(stock.AIOKafkaConsumerThread):
    """A service like any other: what Faust would send to the thread is called right here."""

    wait_for_shutdown = False

    def __init__(self, consumer: Any, *, loop: asyncio.AbstractEventLoop, **kwargs: Any) -> None:
        super().__init__(consumer, loop=loop, thread_loop=loop, **kwargs)

    start = Service.start
    maybe_start = Service.maybe_start
    stop = Service.stop
    set_shutdown = Service.set_shutdown
    _stopped_set = Service._stopped_set
    _stop_children = Service._stop_children
    _stop_futures = Service._stop_futures
    _stop_exit_stacks = Service._stop_exit_stacks

    async def on_stop(self) -> None:
        """Leave the group and end the client."""
        await self.on_thread_stop()

    async def call_thread(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what belongs to the client."""
        return await maybe_async(fun(*args, **kwargs))
