"""The supervisor of the learner process: it runs in the worker that the journal's only partition is assigned to.

A rebalance that leaves the journal here does not disturb the process. Two learners at once, while a paused worker has
not noticed or a killed one's process has not ended, can only publish the same.

A process, because Python runs one thread at a time: in a thread of the worker, learning took a third of the time that
serving had, and decisions waited behind every fold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

log = logging.getLogger(__name__)


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the learner process to its worker, as a line of JSON.

    `position` is the journal offset to be folded next. After a `failure` the process has ended, and would end the same
    way again.
    """

    position: int = -1
    watermark: int = 0
    episodes: tuple[msgspec.Raw, ...] = ()
    failure: str = ""


_decode = msgspec.json.Decoder(LearnerStatus).decode


class LearnerProcess:
    """Runs the learner process while the journal is assigned to this worker.

    Parameters
    ----------
    command
        Its command line. It must end when its standard input does (see `worker.kafka.learner`).
    on_status
        Called with every report.
    """

    #: Seconds between the end of the process and its next start.
    restart_delay = 10.0
    #: Bytes of the longest line that it may write.
    longest = 16 << 20

    def __init__(self, command: Sequence[str], on_status: Callable[[LearnerStatus], None]) -> None:
        self._command = tuple(command)
        self._on_status = on_status
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        #: Why no learner runs although one should; serving continues.
        self.failure = ""
        #: The journal offset to be folded next, -1 while no learner runs here.
        self.position = -1

    @property
    def running(self) -> bool:
        """Whether the learner runs here."""
        return self._task is not None and not self._task.done() and not self.failure

    def assign(self, mine: bool) -> None:
        """Start or end the process, after a rebalance."""
        if mine and self._task is None:
            log.info("the journal is assigned to this worker: the learner starts here")
            self._task = asyncio.get_running_loop().create_task(self._supervise())
        elif not mine and self._task is not None:
            log.info("the journal is assigned to another worker: the learner ends here")
            self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._ending.add(self._task)
            self._task.add_done_callback(self._ending.discard)
            self._task = None
        self.position = -1

    async def run(self) -> None:
        """Stay until cancelled, then end the process."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the process and wait for that."""
        self._end()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _supervise(self) -> None:
        # A learner that fails must not end the serving, which continues with the versions it has.
        while True:
            self.failure = ""
            try:
                code = await self._run_once()
            except OSError as error:
                code = error.errno or -1
                log.error("the learner process cannot be started: %s", error)
            if self.failure:
                log.critical("the learner stops: %s", self.failure)
                return
            log.error("the learner process ended with %d; it is started again in %g s", code, self.restart_delay)
            await asyncio.sleep(self.restart_delay)

    async def _run_once(self) -> int:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=self.longest)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._handle(_decode(line))
            return await process.wait()
        finally:
            # At once: whatever it was about to publish, the next one publishes the same.
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    def _handle(self, status: LearnerStatus) -> None:
        self.failure = status.failure
        if status.position >= 0:
            self.position = status.position
        self._on_status(status)
