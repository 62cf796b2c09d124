"""Steps to the disk: in the thread of the loop where that is quick, else in a thread of its own.

A hand-over to a thread and back costs two wake-ups and two changes of the interpreter's owner: 0.3 ms on a machine
where the disk itself takes as long. So a short step is written and synchronised at once. The loop stands still
meanwhile.

Rules that hold in this file:

- The loop waits for the disk only if the longest of the last writes was short. That one is forgotten slowly, so after
  one long write many follow in the thread, and a disk that is slow now and then holds the loop up rarely.
- It waits only for batches of few requests. Under a high load, the next batch gathers while the last is written.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Final

from worker.embedded.steps import StepWriter

#: Most requests of a batch that the loop waits for.
FEW: Final = 4
#: Seconds: the longest of the last writes, if the loop is to wait for the next one.
QUICK: Final = 0.003
#: What is left of the longest write with every further one: after 50 ms, the next 140 are in the thread.
_KEPT: Final = 0.98


class DurableSteps:
    """Appends steps with a writer, and waits until they are on disk; one at a time."""

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._longest = QUICK  # the first one goes to the thread: nothing is known of the disk yet

    def is_quick(self, requests: int) -> bool:
        """Return whether the loop may wait for the step of so many requests."""
        return requests <= FEW and self._longest < QUICK

    def append(self, frame: bytes) -> None:
        """Write a step, and wait until it is on disk."""
        began = perf_counter()
        self._writer.append_durably(frame)
        self._longest = max(perf_counter() - began, _KEPT * self._longest)

    async def append_in_thread(self, frame: bytes) -> None:
        """Write a step while the loop goes on."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.append, frame)

    async def synchronise(self) -> None:
        """Wait until everything that is written is on disk, while the loop goes on."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.synchronise)

    def close(self) -> None:
        """End the thread, when its work is done."""
        self._thread.shutdown()
