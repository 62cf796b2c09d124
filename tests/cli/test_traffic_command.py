"""`adcascade traffic` where no broker is needed."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from worker.cli.main import main
from worker.cli.options.catalog import read_arms
from worker.simulation.traffic.generator import TrafficSettings


def test_the_arms_of_a_world_are_written_as_a_worker_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "arms.json"
    assert main(["traffic", "--environment", "rare", "--arms", "11", "--seed", "4", "--write-arms", str(path)]) == 0
    assert list(read_arms(str(path))) == TrafficSettings(environment="rare", arms=11, seed=4).world().catalogue()


def test_they_are_also_written_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["traffic", "--arms", "3", "--write-arms", "-"]) == 0
    assert [arm["arm"] for arm in orjson.loads(capfdbinary.readouterr().out)] == ["ad-1", "ad-2", "ad-3"]


def test_another_seed_is_another_world(tmp_path: Path) -> None:
    rewards: list[list[float]] = []
    for seed in ("1", "2", "1"):
        path = tmp_path / f"{len(rewards)}.json"
        main(["traffic", "--seed", seed, "--write-arms", str(path)])
        rewards.append([arm.reward for arm in read_arms(str(path))])
    assert rewards[0] == rewards[2] != rewards[1]


@pytest.mark.parametrize(
    "given",
    [
        ["--rate", "0"],
        ["--rate", "many"],
        ["--waiting", "0"],
        ["--sessions", "0"],
        ["--duration", "soon"],
        ["--look", "5s-1s"],
        ["--look", "long"],
        ["--poison", "2"],
        ["--disorder", "-1s"],
        ["--environment", "moon"],
        ["--broker", "nonsense"],
        ["--prefix", "a b"],
        ["--json", "/nowhere/at/all.json"],
        ["--sasl-username", "me"],
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("adcascade: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["traffic", "record"])
def test_help_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "examples:" in capsys.readouterr().out
