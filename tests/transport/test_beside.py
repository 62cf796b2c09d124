"""A coroutine beside the loop: what it raises arrives, and it ends with whoever waits for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from worker.kafka.beside import call_in, run_beside


async def in_time(awaitable: object) -> None:
    async with asyncio.timeout(20):
        await awaitable  # type: ignore[misc]


def test_work_runs_in_another_thread_and_calls_back_into_the_loop() -> None:
    seen: list[threading.Thread] = []

    async def work(here: asyncio.AbstractEventLoop) -> None:
        seen.append(threading.current_thread())
        seen.append(await call_in(here, threading.current_thread))

    async def main() -> None:
        here = asyncio.get_running_loop()
        await in_time(run_beside(lambda: work(here), "beside"))

    asyncio.run(main())
    assert [one.name for one in seen] == ["beside", threading.current_thread().name]


def test_what_work_raises_is_raised_here_and_what_a_call_raises_there() -> None:
    def refuse() -> None:
        raise KeyError("refused")

    async def work(here: asyncio.AbstractEventLoop) -> None:
        try:
            await call_in(here, refuse)
        except KeyError as error:
            raise ValueError("failed") from error

    async def main() -> None:
        here = asyncio.get_running_loop()
        await in_time(run_beside(lambda: work(here), "beside"))

    with pytest.raises(ValueError, match="failed"):
        asyncio.run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_work_is_cancelled_and_cleans_up_before_the_cancelled_caller_continues(at_once: bool) -> None:
    events: list[str] = []

    async def work(begun: threading.Event) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            events.append("cleaned up")

    async def main() -> None:
        begun = threading.Event()
        running = asyncio.create_task(run_beside(lambda: work(begun), "beside"))
        await asyncio.sleep(0)
        if not at_once:
            await asyncio.to_thread(begun.wait, 20)
        running.cancel()
        await asyncio.wait([running], timeout=20)
        events.append("cancelled" if running.cancelled() else "not cancelled")

    asyncio.run(main())
    assert events[-1] == "cancelled"
    assert at_once or events == ["cleaned up", "cancelled"]
