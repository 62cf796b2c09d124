"""`adcascade parameters` and `adcascade arms` against running workers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.embedded.traffic import ARMS, SECOND, START, arrivals
from tests.kafka.fleet import Fleet
from tests.kafka.world import eventually
from worker.cli.main import main
from worker.stream.parameters import Arm, encode_parameters

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(address, f"c{uuid.uuid4().hex[:8]}", tmp_path)
    yield made
    made.close()


class Desk:
    """The command line, pointed at a fleet."""

    def __init__(self, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
        self._place = ["--broker", fleet.address, "--prefix", fleet.names.prefix]
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, *self._place])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self(*arguments, "--json", "-")
        assert code == 0, err
        return dict(json.loads(out))


@pytest.fixture
def desk(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(fleet, capsys)


def test_orders_are_carried_out_by_the_learner_and_shown(fleet: Fleet, desk: Desk) -> None:
    worker = fleet.serving()
    added = desk.json("arms", "add", "ad-new", "--reward", "2.5")
    assert added["version"] == 1
    assert [arm["arm"] for arm in desk.json("arms", "list")["arms"]] == [*(arm.arm for arm in ARMS), "ad-new"]
    assert desk.json("arms", "price", "ad-new", "--reward", "3")["version"] == 2
    assert desk.json("arms", "retire", "ad-0")["version"] == 3
    assert desk.json("parameters", "freeze") == {**desk.json("parameters", "freeze"), "version": 4, "frozen": True}
    assert "nothing to do: already frozen" in desk("parameters", "freeze")[1]
    assert desk.json("parameters", "unfreeze")["version"] == 5
    shown = desk.json("parameters", "show")
    assert (shown["version"], shown["kept"]) == (5, [0, 1, 2, 3, 4, 5])
    assert {arm["arm"]: (arm["reward"], arm["active"]) for arm in shown["arms"]}["ad-new"] == (3.0, True)
    code, _, err = desk("parameters", "rollback", "77")
    assert code == 1
    assert "refused: version 77 is not among the last 8" in err
    eventually(lambda: worker.metric("adcascade_parameters_version") == 5)
    fleet.send(arrivals(20, seconds=1))
    decisions = eventually(lambda: fleet.read(fleet.names.decisions))
    assert {orjson.loads(decision.value)["parameters_version"] for decision in decisions} <= {0, 5}


def test_an_order_without_a_learner_is_said_to_wait_and_is_carried_out_later(fleet: Fleet, desk: Desk) -> None:
    code, _, err = desk("parameters", "freeze", "--wait", "1s")
    assert (code, "holds no parameters yet" in err) == (2, True)
    fleet.serving().kill()
    code, _, err = desk("parameters", "freeze", "--wait", "500ms")
    assert code == 1
    assert "no learner answered within 0.5 s" in err
    worker = fleet.serving()
    eventually(lambda: worker.metric("adcascade_frozen") == 1)
    assert desk.json("parameters", "show")["frozen"] is True


def test_the_same_version_with_another_content_is_refused_with_an_alarm_and_serving_goes_on(fleet: Fleet) -> None:
    fleet.set_clock(START + SECOND)
    worker = fleet.serving()
    (zero,) = fleet.control.history()
    forged = encode_parameters(replace(zero, arms=(*zero.arms[:-1], Arm(arm="forged", reward=9.0))))
    fleet.send_raw([(fleet.names.parameters, b"7", forged), (fleet.names.parameters, b"6", b"{ no parameters")])
    eventually(lambda: worker.metric("adcascade_refused_versions_total") == 2)
    fleet.send(arrivals(20, seconds=1))
    eventually(lambda: len(fleet.read(fleet.names.decisions)) >= 20)
    assert worker.ready
    assert "forged" not in {arm for d in fleet.read(fleet.names.decisions) for arm in orjson.loads(d.value)["slate"]}
    assert [line["message"] for line in worker.lines if line["level"] == "error" and "refused" in line["message"]]
