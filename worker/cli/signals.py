"""Stopping a command: the first SIGINT or SIGTERM requests a clean end, the next one has its usual effect."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stops_on_signals(stop: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Call `stop` at the first SIGINT or SIGTERM, and yield a list that receives its number."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request_stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        stop()

    for number in before:
        signal.signal(number, request_stop)
    try:
        yield received
    finally:
        restore()
