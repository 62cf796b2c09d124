"""What a worker looks for every few seconds: the watermark; and versions that come late."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.embedded.traffic import START
from tests.transport.fake import new_partitions
from worker.kafka.monitor import PATIENCE, WorkerMonitor
from worker.metrics.observer import Metrics
from worker.metrics.troubles import TroubleLog
from worker.runtime.learner_process import LearnerStatus, count_report
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Topics


def active(troubles: TroubleLog) -> dict[str, str]:
    return {one.name: one.example for one in troubles.active()}


class Monitored:
    """A worker with version 0, and its monitor with a clock of its own."""

    def __init__(self) -> None:
        self.now, self.metrics = 0.0, Metrics()
        partitions = new_partitions(Topics(), self.metrics)
        self.learner: Any = SimpleNamespace(running=True, watermark=0, slowest=3, check=lambda: None)
        self.app: Any = SimpleNamespace(serves=True)
        self.monitor = WorkerMonitor(partitions, self.learner, self.metrics, clock=lambda: self.now)

    def look(self, *, after: float = 2.0, serves: bool = True, **learner: object) -> dict[str, str]:
        self.now, self.app.serves = self.now + after, serves
        vars(self.learner).update(learner)
        self.monitor.look(self.app)
        return active(self.metrics.troubles)


@pytest.mark.parametrize(
    ("watermark", "text"),
    [
        (1_700_000_000_000, "partition 3 stands at 2023-11-14 22:13:20 UTC, for 22 s"),
        (0, "partition 3 has not reported, for 22 s"),
        (1 << 62, "partition 3 stands at 9999-12-31 23:59:59 UTC, for 22 s"),
    ],
)
def test_a_watermark_that_stands_still_is_reported_with_the_partition_that_holds_it_back(
    watermark: int, text: str
) -> None:
    scene = Monitored()
    assert scene.look(watermark=watermark) == {}
    assert scene.look(after=PATIENCE) == {}
    assert scene.look() == {"watermark-stalled": text}
    assert scene.look(serves=False) == {}, "it begins anew"
    assert scene.look(after=PATIENCE) == {}
    assert scene.look(after=PATIENCE + 1) != {}
    assert all(scene.look(watermark=watermark + second, after=PATIENCE) == {} for second in range(1, 9))


def test_a_report_of_the_learner_reaches_the_metrics() -> None:
    metrics = Metrics()
    count_report(metrics, LearnerStatus(position=7, watermark=START, slowest=2, late=5))
    assert metrics.registry.get_sample_value("adcascade_late_records_total") == 5


# ── versions that come late ────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = LearningSettings(dim=1, window=60_000, session_timeout=60_000, lateness=5_000)
ZERO = Parameters.first(SETTINGS, (Arm(arm="a", reward=1.0),))


class Watched:
    """A monitor with a clock and a newest version that a test sets."""

    def __init__(self) -> None:
        self.now, self.error, self.metrics = 1_000_000, 0, Metrics()
        partitions = new_partitions(
            Topics(), self.metrics, clock=lambda: self.now + self.error, steady=lambda: self.now
        )
        partitions.parameters = self.published = SimpleNamespace(newest=ZERO)  # type: ignore[assignment]
        learner: Any = SimpleNamespace(running=True, watermark=0, slowest=3, check=lambda: None)
        self.monitor = WorkerMonitor(partitions, learner, self.metrics, clock=lambda: 0.0)
        self.now += 1_000_000

    def receive(self, version: int, *, late: int) -> str:
        self.published.newest = replace(ZERO, version=version, effective_at=self.now - late)
        for _ in range(2):
            self.monitor.look(SimpleNamespace(serves=False))  # type: ignore[arg-type]
        return active(self.metrics.troubles).get("late-versions", "")


def test_two_late_versions_in_a_row_are_trouble_until_one_is_in_time() -> None:
    watched = Watched()
    assert watched.receive(1, late=3_000) == ""
    assert watched.receive(2, late=900) == ""
    assert watched.receive(3, late=3_000) == ""
    assert watched.receive(4, late=4_500) == "version 4 came 4.5 s after its effective_at"
    assert watched.receive(5, late=-2_000) == ""
    assert watched.receive(6, late=78_000) == "version 6 came 78.0 s after its effective_at", "a whole window"


def test_versions_from_before_the_start_or_by_a_clock_that_is_ahead_are_not_late() -> None:
    watched = Watched()
    assert {watched.receive(version, late=1_000_001 + 60_000 * (4 - version)) for version in range(1, 5)} == {""}
    watched.error = 3_600_000
    assert [watched.receive(version, late=-1) for version in (5, 6)] == ["", ""]
