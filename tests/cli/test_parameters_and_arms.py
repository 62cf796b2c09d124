"""`adcascade parameters` and `adcascade arms`, on a state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from worker.cli.main import main
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.stream.parameters import decode_parameters


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with some versions in it."""
    folder = tmp_path_factory.mktemp("state")
    with StateFolder(folder) as state:
        runner = Embedded(settings(), ARMS, partitions=2, state=state)
        deliver(runner, arrivals(120, seconds=40), live=True)
        finish(runner)
    return folder


@pytest.fixture
def folder(learned: Path, tmp_path: Path) -> str:
    """A copy of it that a test may change."""
    for file in learned.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return str(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json", "-"]) == code
    return orjson.loads(capsys.readouterr().out)


def test_show_lists_every_arm(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parameters", "show", "--state", folder]) == 0
    shown = capsys.readouterr().out
    assert all(arm.arm in shown for arm in ARMS)
    assert "learning" in shown


def test_show_and_export_agree_on_the_hash(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details = answer(capsys, "parameters", "show", "--state", folder)
    file = tmp_path / "exported.json"
    assert main(["parameters", "export", "--state", folder, "--output", str(file)]) == 0
    assert decode_parameters(file.read_bytes()).sha256 == details["sha256"]
    capsys.readouterr()
    assert main(["explain", "--parameters", str(file), "--context", "[0.1, 0.2, 0.3]"]) == 0


def test_diff_shows_the_changes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    newest = answer(capsys, "parameters", "show", "--state", folder)["version"]
    changes = answer(capsys, "parameters", "diff", str(newest - 1), str(newest), "--state", folder)
    assert (changes["from"], changes["to"], changes["folds"]) == (newest - 1, newest, 1)
    assert any(arm["log_odds_moved"] for arm in changes["arms"])
    assert main(["parameters", "diff", str(newest - 1), "--state", folder]) == 0


def test_freeze_rollback_and_unfreeze_each_make_a_version(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = answer(capsys, "parameters", "show", "--state", folder)
    frozen = answer(capsys, "parameters", "freeze", "--state", folder)
    assert (frozen["version"], frozen["frozen"]) == (before["version"] + 1, True)
    again = answer(capsys, "parameters", "freeze", "--state", folder)
    assert again["version"] == frozen["version"]
    target = before["version"] - 1
    rolled = answer(capsys, "parameters", "rollback", str(target), "--state", folder)
    assert rolled["version"] == frozen["version"] + 1
    old = answer(capsys, "parameters", "show", "--version", str(target), "--state", folder)
    new = answer(capsys, "parameters", "show", "--state", folder)
    assert (new["theta_context"], new["frozen"]) == (old["theta_context"], True)
    assert answer(capsys, "parameters", "unfreeze", "--state", folder)["frozen"] is False


def test_a_rollback_too_far_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parameters", "rollback", "999", "--state", folder]) == 1
    assert "refused" in capsys.readouterr().err


def test_an_arm_is_added_priced_retired_and_brought_back(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def arms() -> dict[str, Any]:
        listed = answer(capsys, "arms", "list", "--state", folder)["arms"]
        return {arm["arm"]: (arm["reward"], arm["active"]) for arm in listed}

    answer(capsys, "arms", "add", "coat", "--reward", "2.5", "--state", folder)
    assert arms()["coat"] == (2.5, True)
    answer(capsys, "arms", "price", "coat", "--reward", "1.25", "--state", folder)
    assert arms()["coat"] == (1.25, True)
    answer(capsys, "arms", "retire", "coat", "--state", folder)
    assert arms()["coat"] == (1.25, False)
    answer(capsys, "arms", "add", "coat", "--state", folder)
    assert arms()["coat"] == (1.25, True)


def test_a_folder_in_use_is_not_opened(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with StateFolder(folder):
        assert main(["parameters", "show", "--state", folder]) == 1
    assert "another process" in capsys.readouterr().err
