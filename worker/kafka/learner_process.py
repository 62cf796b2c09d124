"""The learner's seat: whoever is assigned the journal's only partition runs the process that folds it.

The group decides who sits there. A rebalance that leaves the seat here does not disturb the fold. Two learners at once,
while a paused worker has not noticed or a killed one's process has not ended, can only publish the same.

A process, because Python runs one thread at a time: in a thread of the worker, learning took a third of the time that
serving had, and decisions waited behind every fold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from mode import Service

from worker.kafka.transport import Report

log = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(Report).decode


class LearnerSeat(Service):
    """Runs the learner's process while the journal is assigned to this worker.

    Parameters
    ----------
    command
        Its command line. It must end when its standard input does (see `worker.kafka.learner`).
    heard
        Called with everything it reports.
    """

    #: Seconds between an end of the process and the next attempt.
    patience = 10.0
    #: Bytes that a line of it may have.
    longest = 16 << 20

    def __init__(self, command: Sequence[str], *, heard: Callable[[Report], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command = tuple(command)
        self._heard = heard
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        #: Why there is no learner although one should be; serving goes on.
        self.failure = ""
        #: The journal offset that is folded next, -1 while nobody sits here.
        self.position = -1

    @property
    def taken(self) -> bool:
        """Whether a learner runs here."""
        return self._task is not None and not self._task.done() and not self.failure

    def assign(self, mine: bool) -> None:
        """Sit down or get up, after a rebalance."""
        if mine and self._task is None:
            log.info("the journal is assigned to this worker: it learns")
            self._task = asyncio.get_running_loop().create_task(self._sit())
        elif not mine and self._task is not None:
            log.info("the journal went to another worker")
            self._get_up()

    def _get_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._leaving.add(self._task)
            self._task.add_done_callback(self._leaving.discard)
            self._task = None
        self.position = -1

    async def on_stop(self) -> None:
        """Get up, and wait until the process has ended."""
        self._get_up()
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _sit(self) -> None:
        # A learner that fails must not end the serving: that goes on with the versions there are.
        while True:
            self.failure = ""
            try:
                code = await self._learn()
            except OSError as error:
                code = error.errno or -1
                log.error("the learner's process cannot be started: %s", error)
            if self.failure:
                log.critical("the learner stops: %s", self.failure)
                return
            log.error("the learner's process ended with %d; another is started in %g s", code, self.patience)
            await asyncio.sleep(self.patience)

    async def _learn(self) -> int:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=self.longest)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._hear(line)
            return await process.wait()
        finally:
            # At once: whatever it was about to publish, the next one publishes the same.
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    def _hear(self, line: bytes) -> None:
        report = _decode(line)
        self.failure = report.failure
        if report.position >= 0:
            self.position = report.position
        self._heard(report)
