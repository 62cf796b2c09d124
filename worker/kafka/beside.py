"""Run a coroutine beside the loop that serves: in an event loop of its own, in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_beside(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run `work` in a thread until it ends; raise what it raises. If this is cancelled, so is `work`."""
    here = asyncio.get_running_loop()
    ended: asyncio.Future[None] = here.create_future()
    there: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> None:
        task = asyncio.current_task()
        assert task is not None
        there.append((asyncio.get_running_loop(), task))
        await work()

    def run() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(noted())
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the other loop may have ended
            here.call_soon_threadsafe(_settle, ended, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        while not there and not ended.done():  # noqa: ASYNC110 (the thread has just been started)
            await asyncio.sleep(0.001)
        for loop, task in there:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
        await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # looked at: being cancelled is what counts
        raise


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    elif isinstance(error, asyncio.CancelledError):
        ended.cancel()
    else:
        ended.set_exception(error)


async def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], _T]) -> _T:
    """Call a function in the thread of another loop; return what it returns, raise what it raises."""

    async def call() -> _T:
        return function()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))
