"""The supervisor of the learner process: it runs in the worker that the journal's only partition is assigned to.

However the process ends, it is started again after a pause, reloads the newest version and goes on. No end is final: an
operator can repair the cause (another learner, a trimmed journal, a topic that accepts no large record), and a learner
publishes nothing that contradicts the topic.

A rebalance that leaves the journal here does not disturb the process. Two learners at the same time, while a paused
worker has not noticed or a killed one's process has not ended, can only publish the same.

A process, because Python runs one thread at a time: in a thread of the worker, learning took a third of the time that
serving had, and decisions waited behind every fold.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, TypeAlias

import msgspec

from worker.metrics.observer import Metrics
from worker.metrics.troubles import TroubleLog
from worker.runtime.process import environment
from worker.runtime.supervision import Pauses, keep_running
from worker.stream.decoding import decode_episode
from worker.stream.events import Tag, encode_event
from worker.stream.learner import Learner, Outcome

log = logging.getLogger(__name__)

#: How much lower the priority of the learner is: users wait for decisions, not for versions. Small, because a process
#: gets a share of a busy core that falls by a fifth with every step: 39 % with 2, 10 % with 10.
NICE: Final = 2
#: Seconds without records after which the process reports all the same.
REPORT_INTERVAL: Final = 5.0
#: Records that are folded in one go.
MOST_RECORDS: Final = 5_000
#: Bytes of the longest report: a few versions of the largest model.
_LONGEST: Final = 64 << 20


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the learner process.

    `failure` is what ends it. `position` is the journal offset to be folded next. `slowest` is the partition that holds
    the watermark back.
    """

    failure: str = ""
    position: int = -1
    watermark: int = 0
    slowest: int = -1
    late: int = 0  # records for closed windows, since the last report
    episodes: tuple[msgspec.Raw, ...] = ()
    rounded: int = 0  # versions published by another kind of machine, equal except for rounding
    troubles: tuple[tuple[str, int, str], ...] = ()  # kind, number of reports, last example
    # On a state folder the parent is the only writer (see `worker.serve.learner`); offsets are those of the journal.
    versions: tuple[msgspec.Raw, ...] = ()
    tags: tuple[tuple[int, Tag], ...] = ()
    refused: tuple[tuple[int, str], ...] = ()  # orders, with the reason

    @classmethod
    def of(cls, learner: Learner, position: int, outcome: Outcome) -> LearnerStatus:
        """Return the report of a learner that has come to a position of the journal, and of an outcome on the way."""
        return cls(
            position=position,
            watermark=learner.watermark.time,
            slowest=learner.watermark.slowest,
            late=outcome.late,
            episodes=tuple(msgspec.Raw(encode_event(episode)) for episode in outcome.episodes),
            troubles=tuple(outcome.troubles),
        )


_decode = msgspec.json.Decoder(LearnerStatus).decode


def count_report(metrics: Metrics, status: LearnerStatus) -> None:
    """Count the episodes, late records and troubles of the learner, and note the watermark."""
    metrics.late(status.late)
    for kind, times, example in status.troubles:
        metrics.troubles.add(kind, example, times)
    for episode in status.episodes:
        metrics.episode(decode_episode(bytes(episode)))
    metrics.count("rounded_versions", status.rounded)
    if status.watermark:
        metrics.watermark(status.watermark)


#: Called with every report; the next one is not read, and no other process started, before it has returned.
OnStatus: TypeAlias = Callable[[LearnerStatus], Awaitable[None] | None]


class LearnerEndedError(Exception):
    """The process has ended, or has to be ended; the text continues a sentence that begins with its name."""


class LearnerProcess:
    """Runs the learner process while the journal is assigned to this worker.

    Parameters
    ----------
    command
        Its command line (see `worker.runtime.process`).
    on_status
        Called with every report.
    troubles
        Where `learner-down` is active while the process should run and does not.
    """

    #: Between the end of the process and its next start.
    pauses = Pauses()
    #: Seconds without a report after which the process counts as down. It reports every few seconds.
    silence = 60.0

    def __init__(self, command: Sequence[str], on_status: OnStatus, troubles: TroubleLog) -> None:
        self._command = tuple(command)
        self._on_status = on_status
        self._troubles = troubles
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._last_report = 0.0  # when the process was started, or reported last
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
        return self._task is not None and self._reports and monotonic() - self._last_report <= self.silence

    def check(self) -> None:
        """Report a process that should run and does not; call every few seconds."""
        if self._task is None or self.running:
            self._troubles.clear("learner-down")
        elif self.failure:
            self._troubles.set("learner-down", self.failure)
        elif (silent := monotonic() - self._last_report) > self.silence:
            self._troubles.set("learner-down", f"the learner process has reported nothing for {silent:.0f} s")

    def assign(self, mine: bool) -> None:
        """Start or end the process, after a rebalance."""
        if mine and self._task is None:
            log.info("the learner starts here")
            self._last_report, self.failure = monotonic(), ""
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
        self.failure = f"{type(error).__name__}: {error}" if unexpected else f"the learner process {error}"
        log.error("the learner is down, and starts again in %g s: %s", pause, self.failure, exc_info=unexpected)
        self.check()
        await asyncio.sleep(pause)

    async def _run_once(self) -> None:
        self._last_report = monotonic()
        process = await asyncio.create_subprocess_exec(
            *self._command, env=environment(), stdin=PIPE, stdout=PIPE, limit=_LONGEST
        )
        try:
            while True:
                await self._handle(await _next_report(process))
        finally:
            self.position, self._reports = -1, False
            # Immediately: what it was about to publish, the next one publishes the same.
            await _kill(process)

    async def _handle(self, status: LearnerStatus) -> None:
        self._last_report = monotonic()
        handling = self._on_status(status)
        if handling is not None:
            await handling
        if status.position >= 0:
            if not self._reports:
                log.info("the learner runs, from journal offset %d on", status.position)
            self.position, self.watermark, self.slowest = status.position, status.watermark, status.slowest
            self._reports, self.failure = True, ""


async def _next_report(process: Process) -> LearnerStatus:
    """Return the next report; raise `LearnerEndedError` if the process has ended, failed, or written garbage."""
    assert process.stdout is not None
    try:
        report = _decode(await process.stdout.readuntil())
    except asyncio.IncompleteReadError:
        code = await process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise LearnerEndedError(how) from None
    except msgspec.MsgspecError as error:
        raise LearnerEndedError(f"wrote a report that cannot be read: {error}") from None
    if report.failure:
        raise LearnerEndedError(f"failed: {report.failure}")
    return report


async def _kill(process: Process) -> None:
    """Kill the process and wait until it has ended, also if that is cancelled meanwhile."""
    with suppress(ProcessLookupError):
        process.kill()
    ending = asyncio.ensure_future(process.wait())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
