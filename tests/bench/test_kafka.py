"""`adcascade bench kafka`: its figures, its client and its processes without a broker; a short play of all of it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import worker
from tests.kafka.conftest import address  # noqa: F401 (a fixture)
from tests.programs import needs
from worker.bench import kafka
from worker.bench.figures import Figure
from worker.bench.kafka import NAMES, RATIOS, WINDOW, ServerRun, arrival, figures, in_turn, learned
from worker.bench.processes import ChildProcess, broker_script, running_broker
from worker.cli.main import main
from worker.errors import FailedError, InputError
from worker.stream.decoding import decode_decision
from worker.stream.serving import Serving
from worker.stream.topology import Record, Topics
from worker.stream.versions import Versions

FIGURES_OF_LATENCY = 3 * (len(NAMES) + 4)  # at each rate the servers, and ratios of the worker

# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(value: float, *, own: float = 1.0, family: float = 1.0) -> ServerRun:
    return ServerRun(value, 2 * value, own, family)


def test_the_worker_is_compared_with_the_others_round_by_round() -> None:
    runs = {
        "aiokafka": [run(4.0), run(10.0, own=2.0), run(4.0)],
        "librdkafka": [run(2.0), run(5.0), run(2.0)],
        "faust": [run(8.0)] * 3,
        "worker": [run(6.0, own=1.2), run(5.0, own=3.0), run(2.0, own=1.3, family=9.0)],
    }
    found = {figure.name: figure for figure in figures("200 arrivals/s", runs)}
    assert found["worker, 200 arrivals/s"].value == 5.0
    assert "p99 10.0 ms" in found["worker, 200 arrivals/s"].detail
    ratio = found["worker / raw aiokafka, 200 arrivals/s"]
    assert (ratio.value, ratio.detail, ratio.met) == (0.5, "0.5 to 1.5 in 3 rounds", True)
    assert found["worker / plain librdkafka, 200 arrivals/s"].value == 1.0
    processor = found["worker / raw aiokafka, 200 arrivals/s, processor"]
    assert processor.value == pytest.approx(1.3), "without the learner"


def test_servers_are_measured_in_turn() -> None:
    played: list[str] = []

    def play(kind: str) -> dict[str, ServerRun]:
        played.append(kind)
        return {part: run(5.0) for part in RATIOS if part != "backlog"}

    found = [step for step in in_turn("latency", 2, play) if isinstance(step, Figure)]
    assert played == [*NAMES] * 2
    assert len(found) == FIGURES_OF_LATENCY
    assert all("in 2 rounds" in figure.detail for figure in found)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["latency", "backlog"]),
        (["--latency"], ["latency"]),
        (["--backlog", "--latency"], ["latency", "backlog"]),
    ],
)
def test_each_part_can_be_measured_alone(
    flags: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measure(broker: str | None, partitions: int, what: list[str]) -> Iterator[Figure]:
        asked.append((broker, partitions, what))
        yield Figure("fast", 1.0, "×")

    monkeypatch.setattr(kafka, "measure", measure)
    assert main(["bench", "kafka", *flags]) == 0
    assert asked == [(None, 8, parts)]
    assert "fast" in capsys.readouterr().out


def test_the_worker_plans_every_arrival_with_the_published_version() -> None:
    parameters = learned()
    assert parameters.settings.window == WINDOW
    serving = Serving(Versions(parameters), topics=Topics())
    now = time.time_ns() // 1_000_000
    records = [Record("ads.arrivals", 0, 0, now, b"s-%d" % n, arrival(b"s-%d" % n, n)) for n in range(50)]
    emits = serving.handle(records)
    assert emits.tally.opened == 50
    decisions = [decode_decision(value) for _, value in emits.decisions]
    assert {decision.mode for decision in decisions} <= {"explore", "exploit"}
    assert len({decision.slate for decision in decisions}) > 1


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_child_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with ChildProcess("a child", ["worker", "bench", "nothing"], tmp_path) as child:
        child.process.wait(300)
        with pytest.raises(FailedError, match=r"a child ended with 2: .*nothing"):
            child.check()


def test_a_running_child_is_measured(tmp_path: Path) -> None:
    with ChildProcess("a child", ["http.server", "0"], tmp_path) as child:
        own, family = child.processor_seconds()
        assert 0 <= own == family
        child.check()
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ([], {"PATH": "/none", "JAVA_HOME": ""}, "there is no java in PATH: install Java 17 or newer"),
        ([], {"JAVA_HOME": "/none"}, "JAVA_HOME=/none has no bin/java"),
        ([], {"PATH": "{java}", "ADCASCADE_KAFKA_CACHE": "{folder}/none"}, "no Maven to fetch them"),
        ([], {"ADCASCADE_KAFKA_CACHE": "/dev/null/none"}, "/dev/null"),
        (["--broker", "127.0.0.1:1"], {}, "cannot use Kafka at 127.0.0.1:1"),
        (["--broker", "kafka"], {}, "'kafka' is not a broker address"),
        (["--json", "/none/result.json"], {}, "the folder /none does not exist"),
    ],
)
def test_wrong_surroundings_are_one_clear_line_before_any_work(
    arguments: list[str],
    variables: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_work() -> None:
        raise AssertionError("work was begun")

    (tmp_path / "java").mkdir()
    (tmp_path / "java/java").symlink_to(needs("java", package="default-jre-headless"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(java=tmp_path / "java", folder=tmp_path))
    monkeypatch.setattr(kafka, "learned", no_work)
    assert main(["bench", "kafka", *arguments]) in (1, 2)
    line = capsys.readouterr().err
    assert line.startswith("adcascade: ")
    assert reason in line
    assert line.count("\n") == 1


def test_an_installed_package_finds_its_own_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "worker"
    monkeypatch.setattr(worker, "__file__", str(package / "__init__.py"))
    assert broker_script() == tmp_path / "deploy/kafka/broker"
    with pytest.raises(InputError, match="name a running one"), running_broker(None, tmp_path):
        pass
    packaged = package / "deploy/kafka/broker"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    assert broker_script() == packaged


# ── on a real broker ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
def test_bench_kafka_measures_every_figure(
    monkeypatch: pytest.MonkeyPatch,
    address: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure: Callable[..., Iterator[Figure | str]] = partial(kafka.measure, share=0.1)
    monkeypatch.setattr(kafka, "measure", measure)
    assert main(["bench", "kafka", "--broker", address, "--json", str(tmp_path / "kafka.json")]) == 0
    result = json.loads((tmp_path / "kafka.json").read_text(encoding="utf-8"))
    names = [figure["name"] for figure in result["figures"]]
    assert len(names) == FIGURES_OF_LATENCY + len(NAMES) + 1
    assert all(figure["value"] > 0 for figure in result["figures"])
    out = capsys.readouterr().out
    assert all(name in out for name in names)
