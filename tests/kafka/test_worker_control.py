"""`adcascade parameters` and `adcascade arms` against running workers."""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace as replaced

from tests.embedded.traffic import ARMS, SECOND, START, arrivals
from tests.kafka.fleet import CommandLine, Fleet
from tests.programs import eventually
from worker.errors import FailedError
from worker.kafka.clients import durable_producer, write
from worker.runtime.process import environment
from worker.stream import version_sizes
from worker.stream.events import ArmChange, Import, encode_event
from worker.stream.settings import Arm
from worker.stream.version_records import encode_parameters, parameters_document

pytestmark = pytest.mark.slow


@pytest.fixture
def command(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(fleet, capsys)


def test_orders_are_carried_out_by_the_learner_and_shown(fleet: Fleet, command: CommandLine, tmp_path: Path) -> None:
    worker = fleet.serving()
    # Before any progress, an order takes effect at once.
    eventually(lambda: any(b'"progress"' in (record.value or b"") for record in fleet.read(fleet.names.journal)))
    added = command.json("arms", "add", "ad-new", "--reward", "2.5")
    assert added["version"] == 1
    assert {arm["arm"] for arm in command.json("arms", "list")["arms"]} == {*(arm.arm for arm in ARMS), "ad-new"}
    assert command.json("arms", "price", "ad-new", "--reward", "3")["version"] == 2
    assert command.json("arms", "retire", "ad-0")["version"] == 3
    frozen = command.json("parameters", "freeze")
    assert (frozen["version"], frozen["frozen"]) == (4, True)
    assert "nothing to do: already frozen" in command("parameters", "freeze")[1]
    assert command.json("parameters", "unfreeze")["version"] == 5
    shown = command.json("parameters", "show")
    assert (shown["version"], shown["kept"]) == (5, [0, 1, 2, 3, 4, 5])
    assert {arm["arm"]: (arm["reward"], arm["active"]) for arm in shown["arms"]}["ad-new"] == (3.0, True)
    code, _, err = command("parameters", "rollback", "77")
    assert code == 2
    assert "version 77 is not kept; the nearest is 5" in err
    eventually(lambda: worker.metric("adcascade_parameters_version") == 5)
    assert re.search(
        r"version 6 serves sessions that arrive from (now|[\d :-]+ \(in \d+\.\d s\)) on",
        command("arms", "retire", "ad-1")[1],
    )
    file = tmp_path / "arms.csv"
    file.write_text("arm;reward\nad-0;1.5\nad-new;4\ncoat;2\n")
    shown = command("arms", "sync", str(file), "--dry-run")[1]
    assert "2 added, 2 retired, 1 changed" in shown
    synced = command.json("arms", "sync", str(file), "--yes")
    assert (synced["version"], len(synced["changes"])) == (7, 5)
    assert {arm["arm"] for arm in command.json("arms", "list")["arms"] if arm["active"]} == {"ad-0", "ad-new", "coat"}
    assert "nothing to do: version 7" in command("arms", "sync", str(file))[1]
    fleet.send(arrivals(20, seconds=1))
    decisions = eventually(lambda: fleet.read(fleet.names.decisions))
    assert {orjson.loads(decision.value)["parameters_version"] for decision in decisions} <= {0, 7}


def test_a_tagged_version_is_explained_and_rolled_back_to_when_the_last_eight_are_newer(
    fleet: Fleet, command: CommandLine
) -> None:
    fleet.set_clock(START + SECOND)  # no window closes
    worker = fleet.serving()
    fleet.send(arrivals(5, seconds=1))
    decision = orjson.loads(eventually(lambda: fleet.read(fleet.names.decisions))[0].value)
    assert decision["parameters_version"] == 0
    zero = fleet.control.history()[0]
    assert command.json("parameters", "tag", "first") == {"tag": "first", "version": 0}
    garbage = [(fleet.names.parameters_history, b"recent/0", b"{"), (fleet.names.parameters_history, b"x", b"{}")]
    prices = [ArmChange(arm=ARMS[0].arm, reward=float(price), active=True) for price in range(2, 12)]
    fleet.send_raw([*garbage, *((fleet.names.journal, None, encode_event(price)) for price in prices)])
    eventually(lambda: worker.metric("adcascade_parameters_version") == 10)
    shown = command.json("parameters", "list")["versions"]
    assert [one["version"] for one in shown if one["served"]] == list(range(3, 11))
    assert [one["tags"] for one in shown if one["version"] == 0] == [["first"]]
    assert {1, 2} <= {one["version"] for one in shown}, "of the last hour"
    context = orjson.dumps([0.1, 0.2, 0.3]).decode()
    assert command.json("explain", "--version", "0", "--context", context)["slate"]
    assert command.json("parameters", "rollback", "first")["version"] == 10, "the estimate is still that of version 0"
    other = Import(parameters=parameters_document(replace(zero, observations=7)), arms=False)
    assert fleet.control.order(other).version == 11
    assert command.json("parameters", "rollback", "1")["version"] == 12
    newest = fleet.control.history()[-1]
    assert (newest.observations, newest.arms[0].reward) == (0, 11.0)
    worker.kill()
    control = ("--control-share", "0.5", "--control")
    refused = fleet.start(*control, "tag:other")
    assert refused.process.wait(60) == 2
    assert "--control tag:other: there is no tag 'other'; the tags are first; " in refused.text
    fleet.serving(*control, "tag:first")
    command.json("arms", "price", "ad-0", "--reward", "3")
    tagged = fleet.control.history()[-1].settings.tagged
    assert tagged is not None
    assert (tagged.version, tagged.sha256) == (0, zero.sha256)
    assert command.json("parameters", "tag", "first", "--remove")["version"] is None


def test_an_order_without_a_learner_waits_and_is_carried_out_later(
    fleet: Fleet, command: CommandLine, tmp_path: Path
) -> None:
    code, _, err = command("parameters", "freeze", "--wait", "1s")
    assert (code, "holds no parameters yet" in err) == (2, True), err
    fleet.serving().kill()
    code, _, err = command("parameters", "freeze", "--wait", "500ms")
    assert code == 1
    assert "no learner answered within 0.5 s" in err
    file = tmp_path / "arms.csv"
    file.write_text("arm,reward\ncoat,2\n")
    worker = fleet.serving("--catalog", str(file))
    eventually(lambda: worker.metric("adcascade_frozen") == 1)
    assert any("the catalogue file differs" in line["message"] for line in worker.lines)
    command.json("arms", "sync", str(file), "--yes")
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


#: Makes the fold of one order raise, in every process that finds this file on its path.
RAISES = """
import worker.stream.learner as learner

carry_out = learner.carry_out

def raising(current, order, history):
    if getattr(order, "arm", "") == "boom":
        raise ZeroDivisionError("as a test")
    return carry_out(current, order, history)

learner.carry_out = raising
"""


def test_the_learner_goes_on_after_a_disagreement_an_order_that_does_not_fit_and_a_record_that_raises(
    fleet: Fleet,
) -> None:
    # A catalogue that does not fit is refused at the start.
    (many := fleet.folder / "many.json").write_bytes(orjson.dumps({f"ad-{n}": 1.0 for n in range(50_000)}))
    refused = fleet.start("--dim", "32", "--catalog", str(many))
    assert refused.process.wait(300) == 2
    assert re.search(r"the catalogue is too large: 50,000 arms .* \d,\d+ such arms fit", refused.tail())
    assert "Traceback" not in refused.tail()

    (patched := fleet.folder / "patched").mkdir()
    (patched / "sitecustomize.py").write_text(RAISES, encoding="utf-8")
    fleet.set_clock(START + SECOND)
    worker = fleet.serving(PYTHONPATH=os.pathsep.join([str(patched), environment()["PYTHONPATH"]]))

    def reported(kind: str) -> bool:
        return f"trouble {kind}" in worker.text

    # Another learner, with another β, publishes version 1 first.
    (zero,) = fleet.control.history()
    theirs = replace(zero, version=1, parent_sha256=zero.sha256, settings=replace(zero.settings, beta=4.0))
    fleet.send(arrivals(20, seconds=1))
    eventually(lambda: len(fleet.answered()) == 20)
    fleet.send_raw([(fleet.names.parameters, b"1", encode_parameters(theirs))])
    # Its window closes: the learner here makes its own version 1, and reloads the published one.
    fleet.set_clock(START + 40 * SECOND)
    eventually(lambda: reported("learner-down"), what="the disagreement is known")
    assert "two learners disagree" in worker.text
    eventually(lambda: worker.has_version(2), what="the learner goes on")
    assert [version.settings.beta for version in fleet.control.history()] == [1.5, 4.0, 1.5]
    eventually(lambda: worker.metric("adcascade_learning") == 1)

    # An order that does not fit: refused by the command, and by the learner if it comes by another way.
    large = ArmChange(arm="x" * (version_sizes.VERSION_BYTES - 200_000), reward=1.0, active=True)
    with pytest.raises(FailedError, match="refused: 5 arms of 3 features take up to"):
        fleet.control.order(large)
    journal = fleet.names.journal
    with closing(durable_producer(fleet.connection)) as producer:
        for order in (large, replaced(large, arm="boom")):
            write(producer, journal, encode_event(order))
    assert fleet.control.order(replaced(large, arm="fits")).arms[-1].arm == "fits"
    eventually(lambda: reported("order-refused") and reported("fold-passed-over"))
    status, text = worker.ask("/readyz")
    assert status == 200
    assert "ZeroDivisionError" in text
    assert fleet.running == [worker]
