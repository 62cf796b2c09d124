"""The supervisor of the versions process, which every worker has: it reads and prepares versions for the worker.

A process, because Python runs one thread at a time: a version of 1,000 ads has megabytes, and while a thread of the
worker decoded, hashed and factorised it, decisions waited. What is left for the worker is to map the arrays and put
the version together, in a thread beside the loop that serves, and to take it, in the loop.

However the process ends, it is started again after a pause, and reads the topic from its beginning. Meanwhile the
worker serves by the versions that it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec

from worker.child import environment
from worker.errors import ParametersError
from worker.kafka.channel import Channel
from worker.kafka.parameters import PublishedParameters, Received, UnfitError
from worker.kafka.shared_arrays import map_parts
from worker.kafka.supervision import Pauses, end_process, keep_running
from worker.kafka.version_messages import VersionsReport, VersionsRequest
from worker.metrics.troubles import TroubleLog
from worker.stream.handover import Assembler, Handover
from worker.stream.parameters import Parameters, republished
from worker.stream.slates import SlatePlanner

log = logging.getLogger(__name__)


_decode = msgspec.json.Decoder(VersionsReport).decode


class VersionsProcess:
    """Runs the versions process of a worker, and takes its versions.

    Parameters
    ----------
    command
        Its command line. It must end when its standard input does (see `worker.kafka.versions`).
    published
        Takes the versions.
    troubles
        Where `versions-down` is active while the process does not run.
    """

    #: Between the end of the process and its next start; never long, because a worker that takes partitions over while
    #: it does not run has to wait for it (`ready`).
    pauses = Pauses(most=4.0)
    #: Seconds without a report after which the process counts as down. It reports every few seconds.
    silence = 60.0

    def __init__(self, command: Sequence[str], published: PublishedParameters, troubles: TroubleLog) -> None:
        self._command = tuple(command)
        self._published = published
        self._troubles = troubles
        self._assembler = Assembler()
        self._position = 0
        #: How often the end was asked for, and the last answer: which question it belongs to, and the offset.
        self._asked, self._end = 0, (-1, 0)
        self._question = asyncio.Event()
        self._heard: float | None = None  # when the process was started, or reported last; None before the first start
        self._failure = ""

    @property
    def ready(self) -> bool:
        """Whether everything that was there at the last `catch_up` has been taken, and at least one version."""
        asked, end = self._end
        return asked == self._asked and end <= self._position and self._published.version >= 0

    def catch_up(self) -> None:
        """Be ready again when everything is taken that is in the topic now.

        A worker that takes a partition over has to know the versions that its last owner knew.
        """
        self._asked += 1
        self._question.set()

    def check(self) -> None:
        """Report a process that does not run; call every few seconds."""
        silent = 0.0 if self._heard is None else monotonic() - self._heard
        if self._failure:
            self._troubles.set("versions-down", self._failure)
        elif silent > self.silence:
            self._troubles.set("versions-down", f"the versions process has reported nothing for {silent:.0f} s")
        else:
            self._troubles.clear("versions-down")

    async def run(self) -> None:
        """Keep the process running until cancelled; raise `UnfitError` if this worker cannot serve by a version."""
        await keep_running(self._run_once, self.pauses, self._on_end)

    async def _on_end(self, error: Exception | None, pause: float) -> None:
        if isinstance(error, UnfitError):
            raise error
        unexpected = None if isinstance(error, VersionsEndedError | OSError) else error
        self._failure = f"{type(error).__name__}: {error}" if unexpected else str(error)
        log.error("the versions process starts again in %g s: %s", pause, self._failure, exc_info=unexpected)
        self.check()
        await asyncio.sleep(pause)

    async def _run_once(self) -> None:
        self._heard = monotonic()
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(*self._command, env=environment(), stdin=theirs.fileno())
            try:
                await self._serve(channel)
                raise VersionsEndedError(f"the versions process ended with code {await process.wait()}")
            finally:
                await end_process(process)
        finally:
            channel.close()

    async def _serve(self, channel: Channel) -> None:
        """Take what the process reports until it ends."""
        with suppress(ConnectionError):
            await self._tell_known(channel)
        self._question.set()
        asking = asyncio.get_running_loop().create_task(self._ask(channel))
        try:
            while (line := await channel.receive()) is not None:
                await self._handle(line, channel)
        except ConnectionError:
            return
        finally:
            asking.cancel()

    async def _tell_known(self, channel: Channel) -> None:
        known = {one.version: one.sha256 for one in self._published.history}
        await channel.send(msgspec.json.encode(VersionsRequest(known=known)))

    async def _ask(self, channel: Channel) -> None:
        with suppress(ConnectionError):  # it has ended, which is handled where it is read
            while True:
                await self._question.wait()
                self._question.clear()
                await channel.send(msgspec.json.encode(VersionsRequest(asked=self._asked)))

    async def _handle(self, line: bytes, channel: Channel) -> None:
        try:
            report = _decode(line)
        except msgspec.MsgspecError as error:
            raise VersionsEndedError(f"the versions process wrote what cannot be read: {error}") from None
        self._heard, self._failure = monotonic(), report.failure
        if report.failure:
            raise VersionsEndedError(report.failure)
        if report.error:
            self._take(report, error=ParametersError(report.error))
        if (again := report.again) is not None and (known := self._published.content(again.version)) is not None:
            position = {name: value for name, value in msgspec.structs.asdict(again).items() if name != "version"}
            self._take(report, parameters=republished(known, position))
        if report.parts:
            file = channel.take_file()
            if file is None:
                raise VersionsEndedError("a version came without its file: are too many files open?")
            parameters, planner = await asyncio.to_thread(self._put_together, file, report)
            self._take(report, parameters=parameters, planner=planner)
            await self._tell_known(channel)
        if report.position >= 0:
            # An older position holds as well: everything before it was taken.
            self._position = max(self._position, report.position)
        if report.end >= 0:
            self._end = report.asked, report.end

    def _take(self, report: VersionsReport, **found: Any) -> None:
        self._published.take([Received(offset=report.offset, timestamp=report.timestamp, **found)])

    def _put_together(self, file: int, report: VersionsReport) -> tuple[Parameters, SlatePlanner | None]:
        """Return the version in a file, and its planner if it is to serve: this takes milliseconds, in any thread."""
        try:
            arrays = map_parts(file, report.parts)
        finally:
            os.close(file)
        record, arms = (arrays.pop(name).tobytes() for name in ("record", "arms"))
        planner = self._assembler.put_together(Handover(record=record, arms=arms, arrays=arrays))
        if report.prepared:
            planner.prepare()  # touches the memory, so that the first decision need not wait for it
        return planner.parameters, planner if report.prepared else None


class VersionsEndedError(Exception):
    """The versions process ended, or has to be ended; the text is the reason."""
