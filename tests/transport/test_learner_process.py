"""The learner's seat: a process that reports, ends, fails, and is killed when its time is over."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import orjson
import pytest

from worker.kafka.learner_process import LearnerSeat
from worker.kafka.transport import Report


def learner(*lines: str) -> tuple[str, ...]:
    """Return the command line of a process that does what the lines say."""
    start = "import os, sys, time\ntell = lambda line: (print(line), sys.stdout.flush())"
    return (sys.executable, "-c", "\n".join([start, *lines]))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Scene:
    """A seat, and what it heard."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.heard: list[Report] = []
        self.seat = LearnerSeat(command, heard=self.heard.append)
        self.seat.patience = 0.05

    async def until(self, condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def test_what_the_process_reports_is_heard_and_a_position_stays_until_it_gets_up() -> None:
    async def run() -> None:
        lines = ("""tell('{"position":7,"watermark":5,"episodes":[{"version":3}]}')""", "time.sleep(60)")
        scene = Scene(learner(*lines))
        scene.seat.assign(True)
        scene.seat.assign(True)  # a rebalance that leaves it here
        await scene.until(lambda: scene.heard)
        assert scene.seat.taken
        assert scene.seat.position == 7
        (report,) = scene.heard
        assert report.watermark == 5
        assert [orjson.loads(bytes(episode)) for episode in report.episodes] == [{"version": 3}]
        scene.seat.assign(False)
        assert not scene.seat.taken
        assert scene.seat.position == -1
        await scene.seat.on_stop()

    asyncio.run(run())


@pytest.mark.parametrize("by", ["assign", "stop"])
def test_the_process_is_killed_when_the_seat_goes(by: str) -> None:
    async def run() -> None:
        scene = Scene(learner("""tell('{"position":%d}' % os.getpid())""", "time.sleep(60)"))
        scene.seat.assign(True)
        await scene.until(lambda: scene.heard)
        pid = scene.seat.position
        assert alive(pid)
        if by == "assign":
            scene.seat.assign(False)
        else:
            await scene.seat.on_stop()
        await scene.until(lambda: not alive(pid))
        await scene.seat.on_stop()

    asyncio.run(run())


def test_a_process_that_ends_is_followed_by_another() -> None:
    async def run() -> None:
        scene = Scene(learner("""tell('{"position":%d}' % os.getpid())""", "sys.exit(3)"))
        scene.seat.assign(True)
        await scene.until(lambda: len(scene.heard) > 2)
        assert len({report.position for report in scene.heard}) == len(scene.heard)
        assert scene.seat.taken
        await scene.seat.on_stop()

    asyncio.run(run())


def test_after_a_failure_nobody_learns_and_it_says_why() -> None:
    async def run() -> None:
        scene = Scene(learner("""tell('{"failure":"the journal was trimmed"}')""", "sys.exit(1)"))
        scene.seat.assign(True)
        await scene.until(lambda: not scene.seat.taken)
        assert scene.seat.failure == "the journal was trimmed"
        assert len(scene.heard) == 1
        await scene.seat.on_stop()

    asyncio.run(run())


def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    async def run() -> None:
        scene = Scene(("/no/such/program",))
        scene.seat.assign(True)
        await asyncio.sleep(0.2)
        assert scene.seat.taken
        await scene.seat.on_stop()

    asyncio.run(run())
