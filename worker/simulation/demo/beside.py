"""The run beside a demo: the same users are served by the additive model, to compare with.

It has a process of its own (`worker.simulation.demo.beside_process` starts and ends it). That process runs to its end
at its own pace, and reports every closed window on its standard output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.runtime.child import Report, report
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


class Progress(Report, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the run beside: the event time, the windows closed since the last report, the newest version."""

    time: int = 0
    rows: tuple[Row, ...] = ()
    sha256: str = ""


def progress_of(settings: DemoSettings) -> Iterator[Progress]:
    """Run a demo; yield a report at the start, after every closed window, and at the end."""
    demo, reported = Demo(settings), 0
    yield Progress(time=demo.time, sha256=demo.parameters.sha256)
    while not demo.finished:
        demo.step()
        if len(demo.rows) > reported or demo.finished:
            yield Progress(time=demo.time, rows=tuple(demo.rows[reported:]), sha256=demo.parameters.sha256)
            reported = len(demo.rows)


def run_beside(settings: DemoSettings) -> None:
    """Run to the end and report."""
    for progress in progress_of(settings):
        report(progress)
