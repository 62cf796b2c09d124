"""The thread that waits for the disk."""

from __future__ import annotations

import asyncio
import threading

import pytest

from worker.serve.disk import DiskThread


def test_functions_run_in_their_order_beside_the_loop_and_errors_come_back() -> None:
    async def run() -> None:
        thread, loop, seen = DiskThread(), asyncio.get_running_loop(), list[object]()

        def fail() -> None:
            raise OSError(28, "No space left on device")

        calls = [thread.run(loop, seen.append, number) for number in range(3)]
        failing = thread.run(loop, fail)
        last = thread.run(loop, lambda: seen.append(threading.current_thread() is threading.main_thread()))
        await asyncio.gather(*calls, last)
        assert seen == [0, 1, 2, False]
        with pytest.raises(OSError, match="No space left"):
            await failing
        thread.close()

    asyncio.run(run())


def test_at_the_end_everything_is_written_also_what_nobody_waits_for_any_more() -> None:
    async def run() -> None:
        thread, loop, seen, begun = DiskThread(), asyncio.get_running_loop(), list[int](), threading.Event()
        thread.run(loop, begun.wait, 60).cancel()  # type: ignore[arg-type]
        thread.run(loop, seen.append, 1).cancel()
        begun.set()
        thread.close()
        assert seen == [1]
        await asyncio.sleep(0)

    asyncio.run(run())
