"""The run beside a demo: the same users are served by the additive model, to compare with.

It has a process of its own (`worker.simulation.demo.beside_process` starts and ends it). That process runs to its end
at its own pace, and reports every closed window on its standard output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from worker.errors import AdcascadeError
from worker.runtime.child import end_with_parent, report
from worker.simulation.demo.ledger import Row
from worker.simulation.demo.run import Demo, DemoSettings


@dataclass(slots=True, kw_only=True)
class Beside:
    """The run beside up to the time of the demo: closed windows, and the hash of the newest version."""

    settings: DemoSettings
    rows: list[Row] = field(default_factory=list)
    sha256: str = ""

    def add(self, progress: Progress) -> None:
        """Add what has happened since the last report."""
        self.rows += progress.rows
        self.sha256 = progress.sha256


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the run beside: the event time, the windows closed since the last report, the newest version.

    After a `failure` the process has ended.
    """

    time: int = 0
    rows: tuple[Row, ...] = ()
    sha256: str = ""
    failure: str = ""


def progress_of(settings: DemoSettings) -> Iterator[Progress]:
    """Run a demo; yield a report at the start, after every closed window, and at the end."""
    demo, reported = Demo(settings), 0
    yield Progress(time=demo.time, sha256=demo.parameters.sha256)
    while not demo.finished:
        demo.step()
        if len(demo.rows) > reported or demo.finished:
            yield Progress(time=demo.time, rows=tuple(demo.rows[reported:]), sha256=demo.parameters.sha256)
            reported = len(demo.rows)


def run_beside(settings: DemoSettings) -> int:
    """Run to the end and report; return 1 after a failure."""
    end_with_parent()
    try:
        for progress in progress_of(settings):
            report(progress)
    except AdcascadeError as error:
        report(Progress(failure=str(error)))
        return 1
    except Exception as error:
        report(Progress(failure=f"{type(error).__name__}: {error}"))
        return 1
    return 0
