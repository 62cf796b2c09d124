"""The supervisor of the learner process: reports, restarts, failures, and the kill when the journal is revoked."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.transport.fake import in_loop
from worker.kafka.learner_process import LearnerProcess, LearnerStatus

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


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def supervised(*command: str) -> tuple[LearnerProcess, list[LearnerStatus]]:
    reports: list[LearnerStatus] = []
    process = LearnerProcess(command, reports.append)
    process.restart_delay = 0.05
    process.assign(True)
    return process, reports


@in_loop
async def test_reports_are_passed_on_and_the_position_is_kept_until_the_journal_is_revoked() -> None:
    status = """report('{"position":7,"watermark":5,"episodes":[{"version":3}]}')"""
    process, reports = supervised(*learner(status, "time.sleep(60)"))
    process.assign(True)  # a rebalance that leaves it here
    await until(lambda: reports)
    assert process.running
    assert process.position == 7
    (report,) = reports
    assert report.watermark == 5
    assert [orjson.loads(bytes(episode)) for episode in report.episodes] == [{"version": 3}]
    process.assign(False)
    assert not process.running
    assert process.position == -1
    await process.stop()


@pytest.mark.parametrize("by", ["assign", "stop", "cancel"])
@in_loop
async def test_the_process_is_killed_when_the_journal_is_revoked_or_the_worker_stops(by: str) -> None:
    process, reports = supervised(*learner(REPORT_PID, "time.sleep(60)"))
    running = asyncio.ensure_future(process.run())
    await until(lambda: reports)
    pid = process.position
    assert alive(pid)
    if by == "assign":
        process.assign(False)
    elif by == "stop":
        await process.stop()
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: not alive(pid))


@in_loop
async def test_a_process_that_ends_is_started_again() -> None:
    process, reports = supervised(*learner(REPORT_PID, "sys.exit(3)"))
    await until(lambda: len(reports) > 2)
    assert len({report.position for report in reports}) == len(reports)
    assert process.running
    await process.stop()


@in_loop
async def test_after_a_failure_the_process_is_not_started_again() -> None:
    process, reports = supervised(*learner("""report('{"failure":"the journal was trimmed"}')""", "sys.exit(1)"))
    await until(lambda: not process.running)
    assert process.failure == "the journal was trimmed"
    assert len(reports) == 1
    await process.stop()


@in_loop
async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    process, _ = supervised("/no/such/program")
    await asyncio.sleep(0.2)
    assert process.running
    await process.stop()
