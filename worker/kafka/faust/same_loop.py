"""Faust's consumer thread without the thread.

Faust runs the Kafka client in a thread and a loop of its own, so that agents which block do not delay its heartbeats.
Ours block no longer than it takes to handle a poll. Two loops in one interpreter compete for its lock, and every poll
and commit crosses between them: on two cores, one loop read a backlog half as fast again, and at 23,000 events/s
answered in a third of the time.

So nothing in the worker may block the loop for as long as the session timeout. A worker that does loses its partitions,
as one that hangs should.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from faust.transport.drivers import aiokafka as stock
from mode import Service
from mode.utils.futures import maybe_async


class SameLoopConsumer(stock.AIOKafkaConsumerThread):
    """A service like any other: calls to the thread are made in place."""

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
        """Leave the group and stop the client."""
        await self.on_thread_stop()

    async def call_thread(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the client."""
        return await maybe_async(fun(*args, **kwargs))
