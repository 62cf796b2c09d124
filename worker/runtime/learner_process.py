"""The supervisor of the learner process: it runs in the worker that the journal's only partition is assigned to.

However the process ends, it is started again after a pause, reloads the newest version and goes on. No end is for good:
whatever was wrong (another learner, a trimmed journal, a topic that takes no large record) an operator can repair, and
a learner publishes nothing that contradicts the topic.

A rebalance that leaves the journal here does not disturb the process. Two learners at once, while a paused worker has
not noticed or a killed one's process has not ended, can only publish the same.

A process, because Python runs one thread at a time: in a thread of the worker, learning took a third of the time that
serving had, and decisions waited behind every fold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec

from worker.metrics.troubles import TroubleLog
from worker.runtime.child import environment
from worker.runtime.supervision import Pauses, end_process, keep_running

log = logging.getLogger(__name__)


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the learner process to its worker, as a line of JSON.

    `position` is the journal offset to be folded next. `slowest` is the partition that holds the watermark back. After
    a `failure` the process has ended.
    """

    position: int = -1
    watermark: int = 0
    slowest: int = -1
    late: int = 0  # records for closed windows, since the last report
    episodes: tuple[msgspec.Raw, ...] = ()
    failure: str = ""
    rounded: int = 0  # versions published by another kind of machine, equal except for rounding
    troubles: tuple[tuple[str, int, str], ...] = ()  # kind, number of reports, last example
    # Of a state folder (see `worker.serve.learner`): the newest version, the steps that are kept, orders refused.
    version: int = -1
    kept: int = -1
    refused: tuple[tuple[int, str], ...] = ()  # offset in the journal, reason


_decode = msgspec.json.Decoder(LearnerStatus).decode


class LearnerProcess:
    """Runs the learner process while the journal is assigned to this worker.

    Parameters
    ----------
    command
        Its command line. It must end when its standard input does (see `worker.kafka.learner`).
    on_status
        Called with every report.
    troubles
        Where `learner-down` is active while the process should run and does not.
    files
        Open files that it inherits.
    """

    #: Between the end of the process and its next start.
    pauses = Pauses()
    #: Seconds without a report after which the process counts as down. It reports every few seconds.
    silence = 60.0
    #: Bytes of the longest line that it may write.
    longest = 16 << 20

    def __init__(
        self,
        command: Sequence[str],
        on_status: Callable[[LearnerStatus], None],
        troubles: TroubleLog,
        files: Sequence[int] = (),
    ) -> None:
        self._command = tuple(command)
        self._on_status = on_status
        self._troubles = troubles
        self._files = tuple(files)
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._heard = 0.0  # when the process was started, or reported last
        self._reports = False  # whether the present process has reported
        #: Why the process ended last; empty once the next one has reported.
        self.failure = ""
        #: The journal offset to be folded next, -1 while no learner runs here.
        self.position = -1
        #: The watermark, and the partition that holds it back.
        self.watermark, self.slowest = 0, -1

    @property
    def running(self) -> bool:
        """Whether the process runs here, has reported, and still does."""
        return self._task is not None and self._reports and monotonic() - self._heard <= self.silence

    def check(self) -> None:
        """Report a process that should run and does not; call every few seconds."""
        if self._task is None or self.running:
            self._troubles.clear("learner-down")
        elif self.failure:
            self._troubles.set("learner-down", self.failure)
        elif (silent := monotonic() - self._heard) > self.silence:
            self._troubles.set("learner-down", f"the learner process has reported nothing for {silent:.0f} s")

    def assign(self, mine: bool) -> None:
        """Start or end the process, after a rebalance."""
        if mine and self._task is None:
            log.info("the learner starts here")
            self._heard, self.failure = monotonic(), ""
            self._task = asyncio.get_running_loop().create_task(
                keep_running(self._run_once, self.pauses, self._on_end), name="learner"
            )
        elif not mine and self._task is not None:
            log.info("the learner ends here")
            self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._ending.add(self._task)
            self._task.add_done_callback(self._ending.discard)
            self._task = None
        self.position, self._reports = -1, False

    async def run(self) -> None:
        """Stay until cancelled, then end the process."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the process and wait for that."""
        self._end()
        while self._ending:
            await asyncio.wait(self._ending)

    async def _on_end(self, error: Exception | None, pause: float) -> None:
        # A learner that fails must not end the serving, which continues with the versions it has.
        unexpected = None if isinstance(error, LearnerEndedError | OSError) else error
        self.failure = f"{type(error).__name__}: {error}" if unexpected else str(error)
        log.error("the learner is down, and starts again in %g s: %s", pause, self.failure, exc_info=unexpected)
        self.check()
        await asyncio.sleep(pause)

    async def _run_once(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._heard = monotonic()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=environment(),
            stdin=pipe,
            stdout=pipe,
            limit=self.longest,
            pass_fds=self._files,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                if line.endswith(b"\n"):  # else it died while it wrote
                    self._handle(line)
            raise LearnerEndedError(f"the learner process ended with code {await process.wait()}")
        finally:
            self.position, self._reports = -1, False
            # At once: whatever it was about to publish, the next one publishes the same.
            await end_process(process)

    def _handle(self, line: bytes) -> None:
        try:
            status = _decode(line)
        except msgspec.MsgspecError as error:
            raise LearnerEndedError(f"the learner process wrote a report that cannot be read: {error}") from None
        self._heard = monotonic()
        self._on_status(status)
        if status.failure:
            raise LearnerEndedError(status.failure)
        if status.position >= 0:
            if not self._reports:
                log.info("the learner runs, from journal offset %d on", status.position)
            self.position, self.watermark, self.slowest = status.position, status.watermark, status.slowest
            self._reports, self.failure = True, ""


class LearnerEndedError(Exception):
    """The learner process ended, or has to be ended; the text is the reason."""
