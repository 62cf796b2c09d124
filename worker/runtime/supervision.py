"""Supervised tasks: the end of one is reported, and the task runs again after a pause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from worker.errors import AdcascadeError
from worker.metrics.troubles import TroubleLog

log = logging.getLogger(__name__)

#: A coroutine function that runs as long as a worker does.
Background: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between the end of a task and its next run: doubled each time, anew after a run of `healthy` seconds."""

    first: float = 1.0
    most: float = 60.0
    healthy: float = 60.0

    def after(self, last: float, ran: float) -> float:
        """Return the pause after a run of `ran` seconds that came after the pause `last`.

        >>> pauses = Pauses()
        >>> pauses.after(0, ran=0.1), pauses.after(8.0, ran=0.1), pauses.after(60, ran=0.1), pauses.after(60, ran=60)
        (1.0, 16.0, 60.0, 1.0)
        """
        return self.first if ran >= self.healthy or not last else min(2 * last, self.most)


async def keep_running(
    work: Callable[[], Awaitable[None]], pauses: Pauses, on_end: Callable[[Exception | None, float], Awaitable[None]]
) -> None:
    """Run `work` again and again until cancelled.

    `on_end` is awaited after every run, with its error, if it raised one, and the pause before the next; it waits.
    """
    loop, pause = asyncio.get_running_loop(), 0.0
    while True:
        started, error = loop.time(), None
        try:
            await work()
        except Exception as raised:
            error = raised
        pause = pauses.after(pause, loop.time() - started)
        await on_end(error, pause)


def supervised(work: Background, troubles: TroubleLog, *, name: str, pauses: Pauses = Pauses()) -> Background:
    """Return a background task of a worker that runs `work` again after an unexpected error.

    An error that is raised on purpose (`AdcascadeError`) is passed on: it ends the worker.
    """

    async def on_end(error: Exception | None, pause: float) -> None:
        if isinstance(error, AdcascadeError):
            raise error
        # Reported after the pause: a worker that stops closes the clients that its tasks use, and cancels them here.
        await asyncio.sleep(pause)
        log.error("%s ended unexpectedly and runs again", name, exc_info=error)
        troubles.add("task-failed", f"{name}: {type(error).__name__}" if error else f"{name} returned")

    return lambda: keep_running(work, pauses, on_end)
