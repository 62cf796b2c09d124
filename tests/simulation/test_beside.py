"""The run beside a demo: the same figures as a run in this process, never later than the demo, and no process left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from worker.errors import FailedError
from worker.simulation.demo.beside import Beside, progress_of
from worker.simulation.demo.beside_process import BesideProcess
from worker.simulation.demo.run import TICK, Demo, DemoSettings, additive
from worker.simulation.demo.summary import summary
from worker.simulation.users import BEGINNING

SETTINGS = DemoSettings(users=20, episodes=4)
LONG = DemoSettings(users=20, episodes=100_000)


def beside(settings: DemoSettings) -> DemoSettings:
    other = additive(settings)
    assert other is not None
    return other


def follow(process: BesideProcess, until: int) -> None:
    deadline = time.monotonic() + 60
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
    with BesideProcess(same.settings) as process:
        while not demo.finished:
            demo.step()
            same.step()
            follow(process, demo.time)
            assert process.run.rows == same.rows
            assert process.run.sha256 == same.parameters.sha256
    assert len(process.run.rows) == 4
    in_process = Beside(settings=same.settings, rows=list(same.rows), sha256=same.parameters.sha256)
    assert summary(demo, process.run) == summary(demo, in_process)


def test_reports_survive_the_way_through_the_pipe():
    reports = list(progress_of(beside(SETTINGS)))
    assert [len(one.rows) for one in reports] == [0, 1, 1, 1, 1]
    for one in reports:
        assert msgspec.json.decode(msgspec.json.encode(one), type=type(one)) == one


def test_it_waits_for_a_demo_that_is_behind_and_shows_nothing_later_than_it():
    with BesideProcess(beside(SETTINGS)) as process:
        follow(process, BEGINNING)
        deadline = time.monotonic() + 60
        while state(process.pid) != "Z":  # it is at its end
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.follow(BEGINNING + TICK)
        assert process.run.rows == []
        assert len(process.run.sha256) == 64


def test_far_ahead_of_the_demo_it_stands_still():
    with BesideProcess(beside(DemoSettings(users=1, episodes=100_000))) as process:
        follow(process, BEGINNING)
        deadline = time.monotonic() + 60
        while state(process.pid) != "S":  # it computes, and so never sleeps but in a write to the full pipe
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.run.rows == []
        follow(process, BEGINNING + 300 * 60 * TICK)
        assert len(process.run.rows) > 100


# ── failures and ends ────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_failure_is_one_line():
    wrong = msgspec.structs.replace(SETTINGS, environment="nowhere")
    with BesideProcess(wrong) as process, pytest.raises(FailedError) as raised:
        follow(process, BEGINNING)
    assert str(raised.value).startswith("the additive run beside failed: ")
    assert "nowhere" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_its_death_is_an_error_that_names_the_signal():
    with BesideProcess(beside(LONG)) as process:
        follow(process, BEGINNING)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(FailedError, match="was ended by SIGKILL; --no-beside leaves it out"):
            follow(process, BEGINNING + 10**12)


def test_it_ends_with_the_block_and_at_no_other_signal():
    with BesideProcess(beside(LONG)) as process:
        follow(process, BEGINNING)
        for ignored in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, ignored)
        follow(process, BEGINNING + 120 * TICK)
        assert state(process.pid) != "Z"
    assert state(process.pid) == "Z"
