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
from worker.simulation.demo.run import Demo, DemoSettings, additive

SETTINGS = DemoSettings(users=20, episodes=4)


def follow(process: Beside, windows: int) -> None:
    deadline = time.monotonic() + 300
    while not process.follow(windows, wait=0.1):
        assert time.monotonic() < deadline


def is_gone(pid: int) -> bool:
    """Return whether there is no such process, or only the entry that its parent has not removed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_has_the_figures_of_a_run_in_this_process_and_none_later_than_the_demo():
    same = Demo(additive(SETTINGS))
    with Beside(same.settings) as process:
        assert process.follow(0, wait=60)
        while not same.finished:
            same.step()
            follow(process, len(same.rows))
            assert process.rows == same.rows
            assert process.sha256 == (same.parameters.sha256 if same.rows else "")
    assert len(process.rows) == 4


def test_its_failure_is_one_line():
    wrong = msgspec.structs.replace(SETTINGS, environment="nowhere")
    with Beside(wrong) as process, pytest.raises(FailedError) as raised:
        follow(process, 1)
    assert str(raised.value).startswith("the additive run beside failed: ")
    assert "nowhere" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_ends_with_the_block_and_at_no_other_signal():
    with Beside(additive(DemoSettings(users=20, episodes=100_000))) as process:
        follow(process, 1)
        for ignored in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, ignored)
        follow(process, 3)
        assert not is_gone(process.pid)
    assert is_gone(process.pid)
