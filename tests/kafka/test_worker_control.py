"""`adcascade parameters` and `adcascade arms` against running workers."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from tests.embedded.traffic import ARMS, SECOND, START, arrivals
from tests.kafka.fleet import Fleet
from tests.kafka.world import CommandLine, eventually
from worker.stream.parameters import encode_parameters
from worker.stream.settings import Arm

pytestmark = pytest.mark.slow


@pytest.fixture
def command(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(fleet, capsys)


def test_orders_are_carried_out_by_the_learner_and_shown(fleet: Fleet, command: CommandLine) -> None:
    worker = fleet.serving()
    added = command.json("arms", "add", "ad-new", "--reward", "2.5")
    assert added["version"] == 1
    assert [arm["arm"] for arm in command.json("arms", "list")["arms"]] == [*(arm.arm for arm in ARMS), "ad-new"]
    assert command.json("arms", "price", "ad-new", "--reward", "3")["version"] == 2
    assert command.json("arms", "retire", "ad-0")["version"] == 3
    assert command.json("parameters", "freeze") == {
        **command.json("parameters", "freeze"),
        "version": 4,
        "frozen": True,
    }
    assert "nothing to do: already frozen" in command("parameters", "freeze")[1]
    assert command.json("parameters", "unfreeze")["version"] == 5
    shown = command.json("parameters", "show")
    assert (shown["version"], shown["kept"]) == (5, [0, 1, 2, 3, 4, 5])
    assert {arm["arm"]: (arm["reward"], arm["active"]) for arm in shown["arms"]}["ad-new"] == (3.0, True)
    code, _, err = command("parameters", "rollback", "77")
    assert code == 1
    assert "refused: version 77 is not among the last 8" in err
    eventually(lambda: worker.metric("adcascade_parameters_version") == 5)
    fleet.send(arrivals(20, seconds=1))
    decisions = eventually(lambda: fleet.read(fleet.names.decisions))
    assert {orjson.loads(decision.value)["parameters_version"] for decision in decisions} <= {0, 5}


def test_an_order_without_a_learner_waits_and_is_carried_out_later(fleet: Fleet, command: CommandLine) -> None:
    code, _, err = command("parameters", "freeze", "--wait", "1s")
    assert (code, "holds no parameters yet" in err) == (2, True)
    fleet.serving().kill()
    code, _, err = command("parameters", "freeze", "--wait", "500ms")
    assert code == 1
    assert "no learner answered within 0.5 s" in err
    worker = fleet.serving()
    eventually(lambda: worker.metric("adcascade_frozen") == 1)
    assert command.json("parameters", "show")["frozen"] is True


def test_the_same_version_with_another_content_is_refused_with_an_alarm_and_serving_continues(fleet: Fleet) -> None:
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
