"""The same users served by the additive model, to compare a demo with.

The run has a separate process, because Python runs one thread at a time: on two cores both runs together take as long
as one.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from worker.bandit.additive import AdditiveModel
from worker.errors import FailedError
from worker.simulation.demo.ledger import Row
from worker.simulation.demo.run import Demo, DemoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What is kept of a run: its settings, its windows, and the hash of its last version."""

    settings: DemoSettings
    rows: Sequence[Row]
    sha256: str


def additive_run(settings: DemoSettings) -> FinishedRun:
    """Run a demo with the additive model to its end."""
    demo, parent = Demo(replace(settings, model=AdditiveModel.name)), multiprocessing.parent_process()
    while not demo.finished and (parent is None or parent.is_alive()):
        demo.step()
    return FinishedRun(settings=demo.settings, rows=demo.rows, sha256=demo.parameters.sha256)


@contextmanager
def beside(settings: DemoSettings) -> Iterator[Connection[Any, Any]]:
    """Make the additive run in a separate process, which is killed at the end of the context; yield its connection."""
    # Spawned, not forked: a fork would copy locked locks of other threads.
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_send_run, args=(settings, sent), daemon=True)
    process.start()
    sent.close()
    try:
        yield received
    finally:
        process.kill()
        process.join()
        received.close()


def _send_run(settings: DemoSettings, sent: Connection[Any, Any]) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # signals to all processes are for the demo, which ends this one
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(BrokenPipeError):  # the demo was killed
        sent.send(additive_run(settings))


def received_run(connection: Connection[Any, Any]) -> FinishedRun:
    """Wait for the run; raise `FailedError` if its process has died."""
    try:
        run: FinishedRun = connection.recv()
    except EOFError:
        raise FailedError("the additive run beside ended early; --no-beside leaves it out") from None
    return run
