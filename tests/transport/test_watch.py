"""What a worker looks for every few seconds: a watermark that stands still, and settings that differ."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.embedded.traffic import ARMS, START, settings
from tests.stream.scenes import feedback, opened
from worker.kafka.monitor import WorkerMonitor
from worker.kafka.parameters import PublishedParameters
from worker.kafka.processors import StreamProcessors
from worker.metrics import Metrics
from worker.metrics.troubles import TroubleLog
from worker.runtime.learner_process import LearnerStatus
from worker.runtime.watch import PATIENCE, CatalogueCheck, SettingsWatch, WatermarkWatch, different
from worker.stream.decoding import Limits
from worker.stream.encoding import encode_journal
from worker.stream.events import Progress
from worker.stream.features import Features
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import Topics


def examples(troubles: TroubleLog) -> dict[str, str]:
    return {active.name: active.example for active in troubles.active()}


class Stalling:
    """A watermark watch with a clock of its own."""

    def __init__(self) -> None:
        self.now, self.troubles = 0.0, TroubleLog()
        self.watch = WatermarkWatch(self.troubles, lambda: self.now)

    def look(self, watermark: int, *, after: float = 2.0) -> dict[str, str]:
        self.now += after
        self.watch.look(watermark, slowest=3)
        return examples(self.troubles)


def test_a_watermark_that_advances_is_no_trouble() -> None:
    scene = Stalling()
    assert all(scene.look(START + second) == {} for second in range(200))


def test_a_watermark_that_stands_still_is_reported_with_the_partition_that_holds_it_back() -> None:
    scene = Stalling()
    assert scene.look(1_700_000_000_000) == {}
    assert scene.look(1_700_000_000_000, after=PATIENCE) == {}
    found = scene.look(1_700_000_000_000)
    assert found == {"watermark-stalled": "partition 3 stands at 2023-11-14 22:13:20 UTC, for 22 s"}
    assert scene.look(1_700_000_000_001) == {}


@pytest.mark.parametrize(("watermark", "text"), [(0, "has not reported"), (1 << 62, "9999-12-31")])
def test_any_watermark_can_be_shown(watermark: int, text: str) -> None:
    scene = Stalling()
    scene.look(watermark)
    assert text in scene.look(watermark, after=PATIENCE + 1)["watermark-stalled"]


def test_a_pause_begins_anew() -> None:
    scene = Stalling()
    scene.look(5)
    assert scene.look(5, after=PATIENCE + 1)
    scene.watch.pause()
    assert examples(scene.troubles) == {}
    assert scene.look(5, after=PATIENCE) == {}


def test_settings_that_differ_are_trouble_while_another_worker_learns() -> None:
    now, troubles = [0.0], TroubleLog()
    watch = SettingsWatch(settings(), troubles, lambda: now[0])

    def look(*, learns: bool = False, **changes: object) -> dict[str, str]:
        now[0] += PATIENCE
        watch.look(4, settings(**changes), learns=learns)
        return examples(troubles)

    assert look(beta=9.0, lateness=77) == {}  # this worker may begin to learn
    assert look(beta=9.0, lateness=77) == {"settings-differ": "version 4 has other values of beta, lateness"}
    assert look(beta=9.0, learns=True) == {}  # the next version has the settings of this worker
    assert look(beta=9.0) == {}
    assert "beta" in look(beta=9.0)["settings-differ"]
    assert look() == {}


def test_the_learner_names_the_slowest_partition_and_counts_late_records_when_they_come() -> None:
    learner = Learner(settings(), ARMS)
    times = {0: START + 90_000, 1: START + 80_000, 2: START + 95_000}
    assert learner.slowest_partition == -1
    progress = [encode_journal(Progress(partition=one, partitions=3, time=time)) for one, time in times.items()]
    learner.handle(enumerate(progress))
    assert (learner.slowest_partition, learner.watermark) == (1, START + 80_000)
    arms = [arm.arm for arm in ARMS]
    dim = (0.5,) * settings().dim
    facts = (opened(arrived_at=START, slate=arms, context=dim), feedback(1, arms[0], True, occurred_at=START))
    outcome = learner.handle(enumerate(map(encode_journal, facts), start=3))
    assert (outcome.late, outcome.episodes) == (2, [])


def test_a_report_of_the_learner_reaches_the_metrics() -> None:
    metrics = Metrics()
    zero = Parameters.first(settings(), ARMS)
    published = PublishedParameters(zero, [zero], metrics)
    processors = StreamProcessors(published, Topics(), metrics, limits=Limits())
    processors.on_learner_status(LearnerStatus(position=7, watermark=START, slowest=2, late=5))
    assert metrics.registry.get_sample_value("adcascade_late_records_total") == 5


@pytest.mark.parametrize(
    ("serves", "learns", "expected"),
    [
        (True, True, {"watermark-stalled": "Partition 2 has not reported"}),
        (True, False, {"settings-differ": "Version 0 has other values of beta"}),
        (False, True, {}),
    ],
)
def test_the_monitor_of_a_worker_looks_at_both(
    monkeypatch: pytest.MonkeyPatch, serves: bool, learns: bool, expected: dict[str, str]
) -> None:
    monkeypatch.setattr("worker.runtime.watch.PATIENCE", -1.0)
    metrics = Metrics()
    zero = Parameters.first(settings(), ARMS)
    published = PublishedParameters(zero, [zero], metrics)
    processors = StreamProcessors(published, Topics(), metrics, limits=Limits())
    learner: Any = SimpleNamespace(running=learns, watermark=0, slowest=2, check=lambda: None)
    app: Any = SimpleNamespace(serves=serves, partitions=SimpleNamespace(progress={}))
    catalogue = CatalogueCheck((), metrics.troubles)
    monitor = WorkerMonitor(processors, learner, settings(beta=9.0), catalogue, metrics)
    for _ in range(2):
        monitor.look(app)
    found = {active.name: active.detail for active in metrics.troubles.active()}
    assert found.keys() == expected.keys()
    assert all(found[kind].startswith(text) for kind, text in expected.items())


def test_features_that_the_first_catalogue_completed_are_no_difference() -> None:
    own = LearningSettings(dim=2)
    completed = Features.of_table({"ads": {"price": "number"}})
    assert different(own, replace(own, features=completed, standardise=False)) == []
