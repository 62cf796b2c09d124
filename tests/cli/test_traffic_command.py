"""`adcascade traffic` without a broker."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from worker.cli.main import main
from worker.cli.options.catalog import read_arms
from worker.simulation.traffic.generator import TrafficSettings


def test_a_worker_can_read_the_arms_written(tmp_path: Path) -> None:
    path = tmp_path / "arms.json"
    assert main(["traffic", "--environment", "rare", "--arms", "11", "--seed", "4", "--write-arms", str(path)]) == 0
    assert list(read_arms(str(path))) == TrafficSettings(environment="rare", arms=11, seed=4).world().catalogue()


def test_arms_may_go_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["traffic", "--arms", "3", "--write-arms", "-"]) == 0
    assert [arm["arm"] for arm in orjson.loads(capfdbinary.readouterr().out)] == ["ad-1", "ad-2", "ad-3"]
