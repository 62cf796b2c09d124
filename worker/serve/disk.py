"""The thread that waits for the disk, one call at a time.

An executor hands every call over through a queue, a condition, two futures and three turns of the loop. A batch of one
request pays for all of that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    function: Callable[..., None]
    arguments: tuple[Any, ...]


class DiskThread:
    """Runs functions in their order, in a thread of its own that begins with the first."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
    ) -> asyncio.Future[None]:
        """Return a future that is done when the function has returned, or has its exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
            self._thread.start()
        done: asyncio.Future[None] = loop.create_future()
        self._calls.put(_Call(loop, done, function, arguments))
        return done

    def close(self) -> None:
        """Wait until all functions have returned."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            error: BaseException | None = None
            try:
                call.function(*call.arguments)
            except BaseException as raised:
                error = raised
            call.loop.call_soon_threadsafe(_settle, call.done, error)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():  # whoever waited has gone
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
