"""The figures of an overloaded run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.bench.kafka.overload import FIGURES, WINDOW, Overload, _slow_down, figures
from worker.stream.budget import Shares
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings

START, SECONDS = 1_700_000_000_000, 100.0
FIRST = Parameters.first(LearningSettings(dim=1), (Arm(arm="a", reward=1.0),))


def a_run(lags: list[int], delay: int, **traffic: Any) -> dict[str, bool | None]:
    """Return which targets a run meets whose versions are published `delay` after they were to serve."""
    made = [
        replace(FIRST, version=n, effective_at=START + n * WINDOW, shares=Shares(1.0, 0.1), expected_sessions=50_000)
        for n in range(20)
    ]
    numbers = {"sessions": 10**6, "seconds": SECONDS, "records": {"total": 4 * 10**6}, "latency": {"p50": 0.02}}
    run = Overload(
        lags=lags,
        versions=[(one.effective_at + delay, one) for one in made],
        facts=100_000,
        traffic={**numbers, "undecided": 0, **traffic},
    )
    found = {one.name: one.met for one in figures(run)}
    assert len(found) == FIGURES
    return {name: met for name, met in found.items() if met is False}


def test_a_learner_that_catches_up_meets_every_target() -> None:
    assert a_run([0, 90_000, 400_000, 90_000, 500, 800, 700, 600], -2_000) == {}


def test_what_is_behind_or_unanswered_misses_its_target() -> None:
    assert set(a_run([0, 90_000, 400_000, 900_000], -1)) == {"highest lag of the journal in the second half"}
    assert set(a_run([0, 0], 1)) == {"of these published after they were to serve"}
    assert set(a_run([0, 0], -1, undecided=3)) == {"arrivals without an answer"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_learner_stays_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as learner:
        status = Path(f"/proc/{learner.pid}/status")
        worker: Any = SimpleNamespace(children=lambda name: [learner.pid])

        async def for_a_moment() -> None:
            slow = asyncio.create_task(_slow_down(worker))
            await asyncio.to_thread(os.waitid, os.P_PID, learner.pid, os.WSTOPPED)
            slow.cancel()
            await asyncio.wait([slow])

        asyncio.run(for_a_moment())
        state = status.read_text()
        learner.kill()
        assert "(stopped)" not in state
