"""The run beside a demo: the same users are served by the additive model, to compare with.

It has a separate process, because Python runs one thread at a time: on two cores both runs together take as long as
one. The process runs to its end at its own pace, and sends every closed window through a pipe.

Rules that hold in this file:

- Nothing is shown of the run beside that is later than the demo: no more windows are received than it has closed.
- The demo never waits for the run beside, except at its own end.
- The run beside may be ahead by as many windows as the pipe holds, and then waits.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

from worker.errors import FailedError
from worker.simulation.demo.ledger import Row
from worker.simulation.demo.run import Demo, DemoSettings

WITHOUT = "; --no-beside leaves it out"


class Beside:
    """The run beside, as far as the demo is; its process runs during a `with` block.

    `rows` are its closed windows, `sha256` is the hash of the version of the last one.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self.sha256 = ""

    def __enter__(self) -> Beside:
        # Spawned, not forked: a fork would copy locked locks of other threads.
        context = multiprocessing.get_context("spawn")
        self._reports, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self.settings, sending), daemon=True)
        self._process.start()
        sending.close()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()
        self._reports.close()

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return self._process.pid

    def follow(self, windows: int, *, wait: float = 0.0) -> bool:
        """Receive a window if there are fewer than the demo has closed; return whether there are as many then.

        Wait at most `wait` seconds for it. Raise `FailedError` if there will be none.
        """
        if len(self.rows) < windows and self._reports.poll(wait):
            try:
                received = self._reports.recv()
            except EOFError:
                raise FailedError(f"the additive run beside {self._ending()}{WITHOUT}") from None
            if isinstance(received, str):
                raise FailedError(f"the additive run beside failed: {received}{WITHOUT}")
            row, self.sha256 = received
            self.rows.append(row)
        return len(self.rows) >= windows

    def _ending(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended early with code {code}"


def _run(settings: DemoSettings, reports: Connection[Any, Any]) -> None:
    """Run to the end in the other process; send every closed window with its hash, or the text of a failure."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # signals to all processes are for the demo, which ends this one
        signal.signal(ignored, signal.SIG_IGN)
    try:
        demo, sent = Demo(settings), 0
        while not demo.finished:
            demo.step()
            for row in demo.rows[sent:]:
                reports.send((row, demo.parameters.sha256))
            sent = len(demo.rows)
    except BrokenPipeError:
        pass  # the demo has ended
    except Exception as error:
        reports.send(f"{type(error).__name__}: {error}")
