"""The supervisor of the learner process: reports, restarts, failures, and the kill when the journal is revoked.

Also the supervision of all other tasks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from tests.programs import until
from worker.errors import FailedError
from worker.metrics.troubles import TroubleLog
from worker.runtime import supervision
from worker.runtime.learner_process import LearnerProcess, LearnerStatus
from worker.runtime.supervision import Pauses

REPORT_PID = """report('{"position":%d}' % os.getpid())"""


def learner(*lines: str) -> tuple[str, ...]:
    """Return the command line of a process that runs these lines."""
    start = "import os, sys, time\nreport = lambda line: (print(line), sys.stdout.flush())"
    return (sys.executable, "-c", "\n".join([start, *lines]))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Supervised(LearnerProcess):
    """A learner process that is started again soon, with the reports and the troubles of its worker."""

    pauses = Pauses(first=0.02, most=0.1)

    def __init__(self, *command: str, on_status: Callable[[LearnerStatus], None] = lambda _: None) -> None:
        self.reports: list[LearnerStatus] = []
        self.troubles = TroubleLog()

        def take(status: LearnerStatus) -> None:
            self.reports.append(status)
            on_status(status)

        super().__init__(command, take, self.troubles)
        self.assign(True)

    @property
    def trouble(self) -> str:
        """The example of `learner-down`, empty while it is not active."""
        self.check()
        return next((one.example for one in self.troubles.active() if one.name == "learner-down"), "")


async def test_reports_are_passed_on_and_the_position_is_kept_until_the_journal_is_revoked() -> None:
    status = """report('{"position":7,"watermark":5,"episodes":[{"version":3}]}')"""
    process = Supervised(*learner(status, "time.sleep(60)"))
    process.assign(True)  # a rebalance that leaves it here
    await until(lambda: process.reports)
    assert process.running
    assert process.position == 7
    (report,) = process.reports
    assert report.watermark == 5
    assert [orjson.loads(bytes(episode)) for episode in report.episodes] == [{"version": 3}]
    process.assign(False)
    assert not process.running
    assert process.position == -1
    await process.stop()


@pytest.mark.parametrize("by", ["assign", "stop", "cancel"])
async def test_the_process_is_killed_when_the_journal_is_revoked_or_the_worker_stops(by: str) -> None:
    process = Supervised(*learner(REPORT_PID, "time.sleep(60)"))
    running = asyncio.ensure_future(process.run())
    await until(lambda: process.reports)
    pid = process.position
    assert alive(pid)
    if by == "assign":
        process.assign(False)
    elif by == "stop":
        await process.stop()
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit(3)", "the learner process ended with code 3"),
        ("""report('{"failure":"two learners disagree"}'); time.sleep(60)""", "two learners disagree"),
        ("report('{\"position\":7,'); time.sleep(60)", "wrote a report that cannot be read"),
        ("sys.stdout.write('{\"position\"'); sys.stdout.flush(); os._exit(4)", "ended with code 4"),
        ('report(\'{"position": 5, "watermark": 13}\'); time.sleep(60)', "ValueError: as a test"),
    ],
    ids=["exit", "failure", "garbage", "half a line", "a report that cannot be handled"],
)
async def test_however_the_process_ends_it_is_started_again_and_the_trouble_is_known(end: str, reason: str) -> None:
    def on_status(status: LearnerStatus) -> None:
        if status.watermark == 13:
            raise ValueError("as a test")

    process = Supervised(*learner(REPORT_PID, end), on_status=on_status)
    await until(lambda: reason in process.trouble)
    assert not process.running
    assert process.position == -1
    await until(lambda: len({report.position for report in process.reports if report.position > 9}) > 2)
    await process.stop()
    assert process.trouble == ""  # the journal is elsewhere


async def test_a_process_that_recovers_ends_the_trouble(tmp_path: Path) -> None:
    once, recovered = tmp_path / "once", tmp_path / "recovered"
    lines = (f"first = not os.path.exists({str(once)!r}); open({str(once)!r}, 'w')", "first and sys.exit(1)")
    wait = f"while not os.path.exists({str(recovered)!r}): time.sleep(0.01)"
    process = Supervised(*learner(*lines, wait, REPORT_PID, "time.sleep(60)"))
    await until(lambda: process.trouble)
    assert not process.running
    recovered.touch()
    await until(lambda: process.running)
    assert process.trouble == ""
    assert process.failure == ""
    process.silence = 0.0
    assert not process.running
    assert "has reported nothing for" in process.trouble
    await process.stop()


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    process = Supervised("/no/such/program")
    await until(lambda: "No such file" in process.trouble)
    assert not process.running
    await process.stop()


# ── other tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_task_that_fails_or_returns_is_reported_and_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    troubles = TroubleLog()

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise ZeroDivisionError("as a test")
        if len(runs) > 2:
            await asyncio.Event().wait()

    task = asyncio.ensure_future(supervision.supervised(work, troubles, name="work", pauses=Pauses(first=0.01))())
    await until(lambda: len(runs) == 3)
    (trouble,) = troubles.active()
    assert (trouble.name, trouble.times) == ("task-failed", 2)
    assert "ZeroDivisionError" in caplog.text
    task.cancel()
    await asyncio.wait([task])


async def test_a_task_that_fails_on_purpose_ends_the_worker() -> None:
    async def work() -> None:
        raise FailedError("as a test")

    with pytest.raises(FailedError, match="as a test"):
        await supervision.supervised(work, TroubleLog(), name="work")()
