"""The process of the run beside a demo, as seen by the demo.

A process, because Python runs one thread at a time: on two cores both runs together take as long as one.

Rules that hold in this file:

- Nothing is shown of the run beside that is later than the demo. So both have the same windows wherever they stop.
- The demo never waits for the run beside, except at its own end.
- The run beside may be ahead by as many reports as the pipe holds, and then waits for the demo to take them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections import deque

import msgspec

from worker.errors import FailedError
from worker.runtime.child import command, environment
from worker.simulation.demo.beside import Beside, Progress
from worker.simulation.demo.run import DemoSettings

MODULE = "worker.cli.demo_beside"
WITHOUT = "; --no-beside leaves it out"
#: Bytes that are read at once.
_AT_ONCE = 1 << 16

_decode = msgspec.json.Decoder(Progress).decode


class BesideProcess:
    """Runs the process from the beginning to the end of a `with` block."""

    def __init__(self, settings: DemoSettings) -> None:
        #: The run up to the time that was last asked for.
        self.run = Beside(settings=settings)
        self._time = -1  # of the last report that is part of `run`
        self._later: deque[Progress] = deque()  # reports that are later than the demo
        self._received = bytearray()

    def __enter__(self) -> BesideProcess:
        settings = msgspec.json.encode(self.run.settings).decode()
        try:
            self._process = subprocess.Popen(
                command(MODULE, settings),
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # of its own: a Ctrl-C on the terminal is for the demo
            )
        except OSError as error:
            raise FailedError(f"the additive run beside cannot be started: {error}{WITHOUT}") from None
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._readable = select.poll()
        self._readable.register(self._output, select.POLLIN)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        with self._process:  # closes the pipes, and waits for its end
            pass

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def follow(self, time: int, *, wait: float = 0.0) -> bool:
        """Take the reports up to an event time; return whether the run beside has come that far.

        If it has not, wait at most so many seconds for news of it. Raise `FailedError` if there will be none.
        """
        if not self._take(time) and self._readable.poll(1000 * wait):
            self._receive()
        return self._take(time)

    def _take(self, time: int) -> bool:
        while self._later and self._later[0].time <= time:
            progress = self._later.popleft()
            self.run.add(progress)
            self._time = progress.time
        return bool(self._later) or self._time >= time

    def _receive(self) -> None:
        data = os.read(self._output, _AT_ONCE)
        if not data:
            raise FailedError(f"the additive run beside {self._ending()}{WITHOUT}")
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            try:
                progress = _decode(line)
            except msgspec.MsgspecError as error:
                raise FailedError(f"the additive run beside wrote what cannot be read: {error}{WITHOUT}") from None
            if progress.failure:
                raise FailedError(f"the additive run beside failed: {progress.failure}{WITHOUT}")
            self._later.append(progress)

    def _ending(self) -> str:
        code = self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended early with code {code}"
