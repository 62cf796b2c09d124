"""Stopping a command: the first SIGINT or SIGTERM requests a clean end, the next one has its usual effect."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stops_on_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Set `stop` at the first SIGINT or SIGTERM, and yield a list that receives its number; needs a running loop."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []

    def request_stop(number: signal.Signals) -> None:
        received.append(number)
        stop.set()
        for other in signals:
            loop.remove_signal_handler(other)

    for number in signals:
        loop.add_signal_handler(number, request_stop, number)
    try:
        yield received
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
