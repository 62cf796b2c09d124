"""Ending a running command: the first Ctrl-C or SIGTERM asks, the next one acts as usual."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stops_on_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Set `stop` at the first SIGINT or SIGTERM within; yields where its number will stand. In a running loop only."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    came: list[int] = []

    def note_down(sent: signal.Signals) -> None:
        came.append(sent)
        stop.set()
        for other in signals:
            loop.remove_signal_handler(other)

    for sent in signals:
        loop.add_signal_handler(sent, note_down, sent)
    try:
        yield came
    finally:
        for sent in signals:
            loop.remove_signal_handler(sent)
