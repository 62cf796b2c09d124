"""The process of the run beside a demo, as seen by the demo.

A process, because Python runs one thread at a time: on two cores both runs together take as long as one.

Rules that hold in this file:

- Nothing is shown of the run beside that is later than the demo. So both have the same windows wherever they stop.
- The demo never waits for the run beside, except at its own end.
- The run beside may be ahead by as many reports as the pipe holds, and then waits for the demo to take them.
"""

from __future__ import annotations

from collections import deque

import msgspec

from worker.errors import FailedError
from worker.runtime.child import Child, ChildError, command
from worker.simulation.demo.beside import Beside, Progress
from worker.simulation.demo.run import DemoSettings

WITHOUT = "; --no-beside leaves it out"


class BesideProcess:
    """Runs the process from the beginning to the end of a `with` block."""

    def __init__(self, settings: DemoSettings) -> None:
        #: The run up to the time that was last asked for.
        self.run = Beside(settings=settings)
        self._time = -1  # of the last report that is part of `run`
        self._later: deque[Progress] = deque()  # reports that are later than the demo

    def __enter__(self) -> BesideProcess:
        settings = msgspec.json.encode(self.run.settings).decode()
        try:
            self._child = Child(command("worker.cli.child", "beside", settings), Progress, apart=True)
        except OSError as error:
            raise FailedError(f"the additive run beside cannot be started: {error}{WITHOUT}") from None
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.end()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.pid

    def follow(self, time: int, *, wait: float = 0.0) -> bool:
        """Take the reports up to an event time; return whether the run beside has come that far.

        If it has not, wait at most so many seconds for news of it. Raise `FailedError` if there will be none.
        """
        if not self._take(time):
            try:
                self._later.extend(self._child.receive(wait))
            except ChildError as error:
                raise FailedError(f"the additive run beside {error}{WITHOUT}") from None
        return self._take(time)

    def _take(self, time: int) -> bool:
        while self._later and self._later[0].time <= time:
            progress = self._later.popleft()
            self.run.add(progress)
            self._time = progress.time
        return bool(self._later) or self._time >= time
