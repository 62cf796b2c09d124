"""`adcascade traffic` against real workers on the real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.kafka.fleet import ROOT, Fleet, Running
from tests.murmur2 import murmur2_partition
from tests.programs import eventually
from worker.cli.main import main
from worker.simulation.users import KINDS

pytestmark = pytest.mark.slow

SESSIONS = 1_500
PARTITIONS = 4
WORLD = ["--environment", "uniform", "--dim", "4", "--arms", "6", "--horizon", "4", "--seed", "9"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Workers on topics of their own, and the summary of the traffic they got."""

    fleet: Fleet
    worker: Running
    arms: Path
    said: dict[str, Any]


@pytest.fixture(scope="module")
def served(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("traffic")
    arms, summary = folder / "arms-of-the-world.json", folder / "summary.json"
    assert main(["traffic", *WORLD, "--write-arms", str(arms)]) == 0
    fleet = Fleet(address, f"u{uuid.uuid4().hex[:8]}", folder, partitions=PARTITIONS)
    times = ["--window", "2s", "--session-timeout", "20s", "--lateness", "2s"]
    secret = {"ADCASCADE_TOKEN_SECRET": "a secret of twenty-odd bytes"}
    worker = fleet.serving("--catalog", str(arms), "--dim", "4", "--horizon", "4", *times, **secret)
    shares = ["--poison", "0.05", "--duplicates", "0.1", "--disorder", "500ms", "--look", "0-50ms", "--patience", "15s"]
    pace = ["--rate", "500", "--sessions", str(SESSIONS)]
    code = main(["traffic", *fleet.flags, *WORLD, *shares, *pace, "--json", str(summary)])
    assert code == 0
    yield Served(fleet=fleet, worker=worker, arms=arms, said=orjson.loads(summary.read_bytes()))
    fleet.close()


def values(records: Iterable[Any]) -> list[dict[str, Any]]:
    found = []
    for record in records:
        try:
            found.append(orjson.loads(record.value))
        except orjson.JSONDecodeError:
            continue
    return found


def test_every_session_is_served_and_every_record_sent_is_in_its_topic(served: Served) -> None:
    said, names = served.said, served.fleet.names
    assert said["sessions"] == said["decided"] == SESSIONS
    assert said["undecided"] == said["forsaken"] == 0
    assert said["finished"] is True
    arrivals, clicks = served.fleet.read(names.arrivals), served.fleet.read(names.clicks)
    assert said["records"]["arrivals"] == len(arrivals) > 1.1 * SESSIONS
    assert said["records"]["clicks"] == len(clicks) > SESSIONS
    assert said["records"]["total"] == len(arrivals) + len(clicks)


def test_all_of_a_session_is_in_the_partition_of_its_key(served: Served) -> None:
    names, partitions = served.fleet.names, defaultdict(set)
    for topic in (names.arrivals, names.clicks, names.decisions):
        for record in served.fleet.read(topic):
            partitions[record.key].add(record.partition)
    assert len(partitions) == SESSIONS
    for key, found in partitions.items():
        assert found == {murmur2_partition(key, PARTITIONS)}


def test_tokens_are_accepted_and_only_poison_becomes_dead_letters(served: Served) -> None:
    decisions = values(served.fleet.read(served.fleet.names.decisions))
    assert all(len(decision["tokens"]) == len(decision["slate"]) for decision in decisions)
    letters = served.fleet.read(served.fleet.names.dead_letters)
    reasons = Counter(dict(letter.headers)["adcascade.reason"].decode() for letter in letters)
    # A click without a token is refused for that before anybody looks at its arm.
    assert set(reasons) <= {*KINDS, "token"}
    spoilt = values(letter for letter in letters if dict(letter.headers)["adcascade.reason"] == b"token")
    assert all("token" not in click for click in spoilt)
    assert 0.02 * SESSIONS < len(letters) < 0.1 * SESSIONS


def test_the_reward_is_that_of_the_metrics_of_the_workers(served: Served) -> None:
    said = served.said
    assert said["clicks"] > 100
    eventually(lambda: served.worker.metric("adcascade_reward_total") == pytest.approx(said["reward"]))
    clicks = sum(served.worker.metric(f'adcascade_clicks_total{{position="{p}"}}') for p in range(1, 5))
    assert clicks == said["clicks"]


def test_regret_and_delays_are_reported(served: Served) -> None:
    said = served.said
    assert 0 < said["served_reward"] < said["oracle_reward"]
    assert said["pseudo_regret"]["total"] == pytest.approx(said["oracle_reward"] - said["served_reward"])
    assert 0 < said["latency"]["p50"] <= said["latency"]["p99"] <= said["latency"]["longest"]
    assert said["parameters_version"] >= 0


def test_a_world_that_the_workers_do_not_serve_is_refused(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for other, complaint in (
        (["--dim", "5"], "--dim 4"),
        (["--horizon", "3"], "--horizon 4"),
        (["--repeats"], "--no-repeats"),
        (["--arms", "7"], "have no arm ad-7"),
    ):
        assert main(["traffic", *served.fleet.flags, *WORLD, *other, "--sessions", "1"]) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_summary(served: Served, tmp_path: Path, sent: signal.Signals) -> None:
    summary = tmp_path / "summary.json"
    pace = ["--rate", "100", "--look", "20ms-60ms", "--json", str(summary)]
    command = [sys.executable, "-m", "worker", "traffic", *served.fleet.flags, *WORLD, *pace]
    before = served.worker.metric("adcascade_arrivals_total")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: served.worker.metric("adcascade_arrivals_total") > before + 30)
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + sent, err
    assert "sessions" in out
    said = orjson.loads(summary.read_bytes())
    assert said["sessions"] > 20
    assert said["finished"] is False
