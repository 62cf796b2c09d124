"""When the loop waits for the disk, and when a thread does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from worker.embedded.steps import Step, StepWriter, remaining
from worker.serve import durable
from worker.serve.durable import FEW, QUICK, DurableSteps


class Disk:
    """A writer that takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = QUICK / 10
        self.threads: list[str] = []
        self._now = 0.0
        monkeypatch.setattr(durable, "perf_counter", lambda: self._now)

    def append_durably(self, frames: bytes) -> None:
        self.threads.append(threading.current_thread().name)
        self._now += self.seconds


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def steps(disk):
    steps = DurableSteps(disk)
    yield steps
    steps.close()


def appended(steps: DurableSteps, disk: Disk, seconds: float, times: int = 1) -> None:
    disk.seconds = seconds
    for _ in range(times):
        steps.append(b"")


def test_nothing_is_known_of_the_disk_before_the_first_step(steps, disk):
    assert not steps.is_quick(1)
    appended(steps, disk, QUICK / 10)
    assert steps.is_quick(1)


def test_a_large_batch_is_for_the_thread(steps, disk):
    appended(steps, disk, QUICK / 10)
    assert steps.is_quick(FEW)
    assert not steps.is_quick(FEW + 1)


def test_one_long_write_sends_many_to_the_thread_and_is_forgotten_then(steps, disk):
    appended(steps, disk, QUICK / 10)
    appended(steps, disk, 0.050)
    in_thread = 0
    while not steps.is_quick(1):
        in_thread += 1
        appended(steps, disk, QUICK / 10)
    assert 100 < in_thread < 200


def test_a_slow_disk_never_holds_the_loop_up(steps, disk):
    for _ in range(1_000):
        appended(steps, disk, 1.1 * QUICK)
        assert not steps.is_quick(1)


def test_the_thread_writes_while_the_loop_goes_on(steps, disk):
    asyncio.run(steps.append_in_thread(b""))
    assert disk.threads[0].startswith("steps")


def test_what_is_appended_is_in_the_folder(tmp_path):
    writer = StepWriter(tmp_path, 0)
    steps = DurableSteps(writer)
    steps.append(writer.encode(Step(time=1, journal_start=0)))
    asyncio.run(steps.append_in_thread(writer.encode(Step(time=2, journal_start=0))))
    asyncio.run(steps.synchronise())
    steps.close()
    writer.close()
    assert [step.time for step in remaining(tmp_path, 0)] == [1, 2]
