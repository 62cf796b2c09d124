"""The run beside a demo: the same figures as a run in this process, never later than the demo, and no process left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from worker.errors import FailedError
from worker.simulation.demo.beside import Beside
from worker.simulation.demo.run import TICK, Demo, DemoSettings, additive
from worker.simulation.demo.summary import summary
from worker.simulation.users import BEGINNING

SETTINGS = DemoSettings(users=20, episodes=4)
LONG = DemoSettings(users=20, episodes=100_000)


def beside(settings: DemoSettings) -> DemoSettings:
    other = additive(settings)
    assert other is not None
    return other


def follow(process: Beside, until: int) -> None:
    deadline = time.monotonic() + 300
    while not process.follow(until, wait=0.1):
        assert time.monotonic() < deadline


def state(pid: int) -> str:
    """Return the letter of a process's state, Z if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_at_every_time_it_has_the_figures_of_a_run_in_this_process():
    demo, same = Demo(SETTINGS), Demo(beside(SETTINGS))
    with Beside(same.settings) as process:
        while not demo.finished:
            demo.step()
            same.step()
            follow(process, demo.time)
            assert process.rows == same.rows
            assert process.sha256 == same.parameters.sha256
    assert len(process.rows) == 4
    assert summary(demo, process)["additive"]["sha256"] == same.parameters.sha256


def test_it_waits_for_a_demo_that_is_behind_and_shows_nothing_later_than_it():
    with Beside(beside(SETTINGS)) as process:
        follow(process, BEGINNING)
        assert process.follow(BEGINNING + TICK, wait=60)  # it has closed its first window
        assert process.rows == []
        assert len(process.sha256) == 64


def test_far_ahead_of_the_demo_it_stands_still():
    with Beside(beside(DemoSettings(users=1, episodes=100_000))) as process:
        follow(process, BEGINNING)
        deadline = time.monotonic() + 300
        while state(process.pid) != "S":  # it computes, and so never sleeps but in a write to the full pipe
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.rows == []
        follow(process, BEGINNING + 300 * 60 * TICK)
        assert len(process.rows) > 100


# ── failures and ends ────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_failure_is_one_line():
    wrong = msgspec.structs.replace(SETTINGS, environment="nowhere")
    with Beside(wrong) as process, pytest.raises(FailedError) as raised:
        follow(process, BEGINNING)
    assert str(raised.value).startswith("the additive run beside failed: ")
    assert "nowhere" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_ends_with_the_block_and_at_no_other_signal():
    with Beside(beside(LONG)) as process:
        follow(process, BEGINNING)
        for ignored in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, ignored)
        follow(process, BEGINNING + 120 * TICK)
        assert state(process.pid) != "Z"
    assert state(process.pid) == "Z"
