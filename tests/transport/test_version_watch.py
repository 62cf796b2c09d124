"""Versions that come late, or not at all, are reported within two windows; one late version alone is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from worker.metrics.troubles import TroubleLog
from worker.runtime.clock import ComparedClock
from worker.runtime.watch import VersionWatch
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings

SETTINGS = LearningSettings(dim=1, window=60_000, session_timeout=60_000, lateness=5_000)
ZERO = Parameters.first(SETTINGS, (Arm(arm="a", reward=1.0),))


class Watched:
    """A watch with a clock and traffic that a test sets."""

    def __init__(self) -> None:
        self.world = SimpleNamespace(now=1_000_000, opened=0)
        self.troubles = TroubleLog()
        self.watch = VersionWatch(self.troubles, clock=lambda: self.world.now, opened=lambda: self.world.opened)
        self.watch.received(ZERO)
        self.world.now += 1_000_000

    def receive(self, version: int, *, late: int) -> None:
        self.watch.received(replace(ZERO, version=version, effective_at=self.world.now - late))

    @property
    def trouble(self) -> str:
        self.watch.check()
        return "".join(one.example for one in self.troubles.active())


def test_two_late_versions_in_a_row_are_trouble_until_one_is_in_time() -> None:
    watched = Watched()
    watched.receive(1, late=3_000)
    assert watched.trouble == ""
    watched.receive(2, late=900)
    watched.receive(3, late=3_000)
    assert watched.trouble == ""
    watched.receive(4, late=4_500)
    assert watched.trouble == "version 4 came 4.5 s after its effective_at"
    watched.receive(5, late=-2_000)
    assert watched.trouble == ""
    watched.receive(6, late=78_000)
    assert watched.trouble == "version 6 came 78.0 s after its effective_at", "a whole window: one is enough"


def test_the_clock_of_a_worker_that_is_an_hour_ahead_makes_no_version_late() -> None:
    world = SimpleNamespace(now=1_000_000, error=0)
    clock = ComparedClock(lambda: world.now + world.error, steady=lambda: world.now)
    troubles = TroubleLog()
    watch = VersionWatch(troubles, clock=clock.earlier, opened=lambda: 0)
    world.error = 3_600_000
    watch.received(replace(ZERO, version=1, effective_at=world.now + 1))
    assert not list(troubles.active())


def test_versions_from_before_the_start_of_the_worker_are_not_late() -> None:
    watched = Watched()
    for version in range(1, 5):
        watched.receive(version, late=1_000_001 + 60_000 * (4 - version))
    assert watched.trouble == ""


def test_a_version_that_does_not_come_is_trouble_only_if_there_is_traffic() -> None:
    watched = Watched()
    watched.world.now += 10_000_000
    assert watched.trouble == ""
    watched.world.opened += 5
    assert watched.trouble == ""
    watched.world.now += 190_000  # a window more than usual
    assert watched.trouble == ""
    watched.world.now += 1
    assert "no version came after 0 for 190 s (usual: 130 s)" in watched.trouble
    watched.receive(1, late=0)
    assert watched.trouble == ""


def test_while_learning_is_frozen_no_version_is_expected() -> None:
    watched = Watched()
    watched.watch.received(replace(ZERO, version=1, frozen=True))
    watched.world.opened += 5
    assert watched.trouble == ""
    watched.world.now += 10_000_000
    assert watched.trouble == ""
