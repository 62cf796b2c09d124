"""Features that change while two workers serve: nothing stops, all agree, and the record replays to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.embedded.traffic import SECOND, START, Sent
from tests.kafka.fleet import CommandLine, Fleet
from tests.programs import eventually
from worker.cli.main import main

#: As many columns as --dim of the fleet says.
BEFORE = '[features.context]\nage = "number"\ndevice = ["mobile", "desktop"]\n'
AFTER = '[features.context]\nyears = "number"\ndevice = ["mobile", "desktop", "watch"]\nvisits = "number"\n'


def users(count: int, second: int, **context: Any) -> list[Sent]:
    """Return arrivals at a second of users who leave without a word."""
    sent = []
    for number in range(count):
        name, at = f"user-{second}-{number}-{len(context)}", START + second * SECOND + number
        device = ("mobile", "desktop", "watch")[number % 3]
        body = {"session_id": name, "occurred_at": at, "context": {"device": device, **context}}
        sent.append(Sent(at, "arrivals", name, orjson.dumps(body)))
    return sent


def pass_time(fleet: Fleet, second: int, version: int) -> None:
    """Set the clock, and wait until all workers have a version."""
    fleet.set_clock(START + second * SECOND)
    eventually(lambda: all(worker.has_version(version) for worker in fleet.running), what=f"version {version}")


def all_answered(fleet: Fleet, count: int) -> None:
    eventually(lambda: len(fleet.answered()) == count, what=f"{count} answers")


@pytest.mark.slow
def test_features_change_under_traffic_on_two_workers(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command, before, after = CommandLine(fleet, capsys), tmp_path / "before.toml", tmp_path / "after.toml"
    before.write_text(BEFORE)
    after.write_text(AFTER)
    fleet.set_clock(START + 2 * SECOND)
    for _ in range(2):
        fleet.serving("--config", str(before))
    first = users(40, 1, age=30.5)
    fleet.send(first)
    all_answered(fleet, 40)
    pass_time(fleet, 23, version=1)  # the first window is closed: 10 s, a session of 8 s, 4 s of lateness
    shown = command.json("features", "diff", "--config", str(after), "--rename", "age=years")["changes"]
    assert [(one["sign"], one["name"]) for one in shown] == [("~", "years"), ("+", "device=watch"), ("+", "visits")]
    applied = command.json("features", "apply", "--config", str(after), "--rename", "age=years", "--yes")
    assert (applied["version"], applied["effective_at"]) == (2, START + 31 * SECOND)
    pass_time(fleet, 23, version=2)
    # Before the version serves and after, clients send the old names or the new ones.
    for number, second in enumerate((24, 32), start=2):
        fleet.set_clock(START + (second + 1) * SECOND)
        fleet.send([*users(20, second, age=25), *users(20, second, years=35, visits=2)])
        all_answered(fleet, 40 * number)
    assert fleet.dead_keys() == set()
    code, _, err = command("features", "apply", "--config", str(before), "--rename", "years=age", "--yes")
    assert (code, "sessions under the features before version 2 may be open until" in err) == (1, True)
    pass_time(fleet, 43, version=3)
    pass_time(fleet, 53, version=4)
    newest = fleet.control.history()[-1]
    assert (newest.folds, newest.settings.dim) == (3, 5)
    # A worker with the old file says what differs, and serves by what is published.
    third = fleet.serving("--config", str(before))
    (line,) = [one["message"] for one in third.lines if "declared features differ" in one["message"]]
    assert "version 4, which hold: + age, − device=watch, − years, − visits (`adcascade features apply`" in line
    for worker in fleet.workers:
        assert worker.balanced
        assert worker.terminate() == 0
    log = tmp_path / "log.jsonl"
    assert main(["record", str(log), *fleet.flags]) == 0
    capsys.readouterr()
    assert main(["replay", str(log), "--prefix", fleet.names.prefix, "--json", "-"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert (report["mismatches"], report["unverified"], report["sessions"]) == (0, 0, 120)
    assert report["versions"][-1]["sha256"] == newest.sha256
