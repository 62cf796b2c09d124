"""What a worker looks for every few seconds: watermark, settings, late versions, the catalogue file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.embedded.traffic import START, settings
from tests.transport.fake import new_partitions
from worker.kafka.monitor import PATIENCE, VersionWatch, WorkerMonitor
from worker.metrics import Metrics
from worker.metrics.troubles import TroubleLog
from worker.runtime.clock import ComparedClock
from worker.runtime.learner_process import LearnerStatus, count_report
from worker.runtime.watch import CatalogueCheck, different
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Topics


def active(troubles: TroubleLog) -> dict[str, str]:
    return {one.name: one.example for one in troubles.active()}


class Monitored:
    """A worker with version 0, and its monitor with a clock of its own."""

    def __init__(self, own: LearningSettings) -> None:
        self.now, self.metrics = 0.0, Metrics()
        partitions = new_partitions(Topics(), self.metrics)
        self.learner: Any = SimpleNamespace(running=True, watermark=0, slowest=3, check=lambda: None)
        self.app: Any = SimpleNamespace(serves=True)
        catalogue = CatalogueCheck((), self.metrics.troubles)
        self.monitor = WorkerMonitor(partitions, self.learner, own, catalogue, self.metrics, clock=lambda: self.now)

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
    scene = Monitored(settings())
    assert scene.look(watermark=watermark) == {}
    assert scene.look(after=PATIENCE) == {}
    assert scene.look() == {"watermark-stalled": text}
    assert scene.look(serves=False) == {}, "it begins anew"
    assert scene.look(after=PATIENCE) == {}
    assert scene.look(after=PATIENCE + 1) != {}
    assert all(scene.look(watermark=watermark + second, after=PATIENCE) == {} for second in range(1, 9))


def test_settings_that_differ_are_trouble_while_another_worker_learns() -> None:
    scene = Monitored(settings(beta=9.0, lateness=77))
    assert scene.look(running=False) == {}
    assert scene.look(after=PATIENCE) == {}, "this worker may begin to learn"
    assert scene.look() == {"settings-differ": "version 0 has other values of beta, lateness"}
    assert scene.look(running=True, watermark=START) == {}, "the next version has the settings of this worker"
    assert scene.look(running=False) == {}
    own = LearningSettings(dim=2)
    completed = replace(own, features=Features.of_table({"ads": {"price": "number"}}), standardise=False)
    assert different(own, completed) == [], "the first catalogue has completed the features"


def test_a_report_of_the_learner_reaches_the_metrics() -> None:
    metrics = Metrics()
    count_report(metrics, LearnerStatus(position=7, watermark=START, slowest=2, late=5))
    assert metrics.registry.get_sample_value("adcascade_late_records_total") == 5


# ── versions that come late, or not at all ───────────────────────────────────────────────────────────────────────────

SETTINGS = LearningSettings(dim=1, window=60_000, session_timeout=60_000, lateness=5_000)
ZERO = Parameters.first(SETTINGS, (Arm(arm="a", reward=1.0),))


class Watched:
    """A watch with a clock and traffic that a test sets."""

    def __init__(self) -> None:
        self.now, self.error, self.opened = 1_000_000, 0, 0
        self.troubles = TroubleLog()
        clock = ComparedClock(lambda: self.now + self.error, steady=lambda: self.now)
        self.watch = VersionWatch(self.troubles, clock=clock.earlier, opened=lambda: self.opened)
        self.watch.received(ZERO)
        self.now += 1_000_000

    def receive(self, version: int, *, late: int) -> str:
        self.watch.received(replace(ZERO, version=version, effective_at=self.now - late))
        return self.trouble

    @property
    def trouble(self) -> str:
        self.watch.check()
        return "".join(active(self.troubles).values())


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


def test_a_version_that_does_not_come_is_trouble_only_if_there_is_traffic_and_learning() -> None:
    watched = Watched()
    watched.now += 10_000_000
    assert watched.trouble == ""
    watched.opened += 5
    assert watched.trouble == ""
    watched.now += 190_000  # a window more than usual
    assert watched.trouble == ""
    watched.now += 1
    assert "no version came after 0 for 190 s (usual: 130 s)" in watched.trouble
    assert watched.receive(1, late=0) == ""
    watched.watch.received(replace(ZERO, version=2, frozen=True))
    watched.opened += 5
    assert watched.trouble == ""
    watched.now += 10_000_000
    assert watched.trouble == ""


# ── a catalogue file that differs from the published catalogue ───────────────────────────────────────────────────────

PUBLISHED = (Arm(arm="hat", reward=1.0), Arm(arm="shoe", reward=2.0), Arm(arm="old", reward=3.0, active=False))


def with_arms(number: int, *arms: Arm) -> Parameters:
    return replace(Parameters.first(LearningSettings(dim=1), arms or PUBLISHED), version=number)


def test_a_file_that_differs_is_reported_with_the_difference_until_a_version_has_its_arms() -> None:
    troubles = TroubleLog()
    wanted = (Arm(arm="shoe", reward=2.5), Arm(arm="coat", reward=4.0))
    check = CatalogueCheck(wanted, troubles)
    check.start(with_arms(7))
    (trouble,) = troubles.active()
    assert trouble.name == "catalogue-differs"
    assert "Against version 7" in trouble.sentence
    assert all(change in trouble.sentence for change in ("+ coat 4", "− hat 1", "~ shoe 2 → 2.5", "arms sync FILE"))
    check.again([with_arms(8)])
    check.again([with_arms(9, *PUBLISHED, wanted[1])])
    assert list(active(troubles)) == ["catalogue-differs"]
    check.again([with_arms(7), with_arms(10, replace(PUBLISHED[0], active=False), *wanted)])
    assert active(troubles) == {}
    many = tuple(Arm(arm=f"ad-{index}", reward=1.0) for index in range(1000))
    text = CatalogueCheck(many, troubles).difference(with_arms(7))
    assert "1000 added, 2 retired" in text
    assert text.endswith("and 997 more")


@pytest.mark.parametrize("wanted", [(), PUBLISHED, PUBLISHED[:2]])
@pytest.mark.parametrize("start", [None, with_arms(7)], ids=["before version 0", "later"])
def test_the_same_active_arms_or_no_file_are_no_trouble_and_later_orders_are_none(
    start: Parameters | None, wanted: tuple[Arm, ...]
) -> None:
    troubles = TroubleLog()
    check = CatalogueCheck(wanted, troubles)
    check.start(start)
    check.again([])
    for _ in range(2):
        check.again([with_arms(7), with_arms(8, *PUBLISHED[:1])])
    assert active(troubles) == {}


def test_a_worker_that_starts_before_version_0_compares_with_it_when_it_is_published() -> None:
    troubles = TroubleLog()
    check = CatalogueCheck(PUBLISHED[:1], troubles)
    check.start(None)
    check.again([with_arms(0)])
    assert list(active(troubles)) == ["catalogue-differs"]
