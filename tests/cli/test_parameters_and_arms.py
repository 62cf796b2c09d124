"""`adcascade parameters` and `adcascade arms`, on a state folder."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from worker.bandit.answers import AnswerCounts
from worker.cli.arms import in_force
from worker.cli.main import main
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm
from worker.stream.version_records import encode_parameters


@pytest.fixture(scope="module", params=["personal", "additive"])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with some versions in it, of either model."""
    folder = tmp_path_factory.mktemp("state")
    with StateFolder(folder) as state:
        runner = Embedded(settings(model=request.param), ARMS, partitions=2, state=state)
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


def test_a_version_that_is_not_kept_is_named_with_its_neighbours(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = answer(capsys, "parameters", "show", "--state", folder)["version"]
    for command in (["rollback", "999"], ["show", "--version", "999"], ["tag", "good", "999"]):
        assert main(["parameters", *command, "--state", folder]) == 2
        assert f"version 999 is not kept; the nearest is {newest}" in capsys.readouterr().err
    for command in (["rollback", "good"], ["diff", "good"], ["tag", "better", "good"]):
        assert main(["parameters", *command, "--state", folder]) == 2
        assert "'good'; there are no tags" in capsys.readouterr().err
    for command in (["tag", "7up"], ["tag", "a b"], ["tag", "good", "--remove"], ["tag", "good", "1", "--remove"]):
        assert main(["parameters", *command, "--state", folder]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_tagged_version_outlives_the_last_eight_and_is_rolled_back_to(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = answer(capsys, "parameters", "show", "--state", folder)
    assert answer(capsys, "parameters", "tag", "good", "--state", folder) == {"tag": "good", "version": old["version"]}
    for price in range(1, 12):
        answer(capsys, "arms", "price", "ad-0", "--reward", str(price), "--state", folder)
    number = str(old["version"])
    assert int(number) not in answer(capsys, "parameters", "show", "--state", folder)["kept"]
    listed = answer(capsys, "parameters", "list", "--state", folder)["versions"]
    assert [one["tags"] for one in listed if one["version"] == int(number)] == [["good"]]
    assert len([one for one in listed if one["served"]]) == 8
    answer(capsys, "arms", "add", "coat", "--reward", "2.5", "--state", folder)
    file = str(tmp_path / "good.json")
    assert main(["parameters", "export", "--version", "good", "--output", file, "--state", folder]) == 0
    for reference in ("good", number, file):
        assert answer(capsys, "parameters", "show", "--version", "good", "--state", folder)["sha256"] == old["sha256"]
        assert main(["explain", "--version", number, "--state", folder, "--context", "[0.1, 0.2, 0.3]"]) == 0
        capsys.readouterr()
        zero = answer(capsys, "parameters", "rollback", "0", "--state", folder)
        rolled = answer(capsys, "parameters", "rollback", reference, "--state", folder)
        assert rolled["version"] == zero["version"] + 1
        now = answer(capsys, "parameters", "show", "--state", folder)
        assert (now["theta_context"], now["observations"]) == (old["theta_context"], old["observations"])
        assert [arm["arm"] for arm in now["arms"]][-1] == "coat"
        assert main(["parameters", "rollback", reference, "--state", folder]) == 0
        assert "nothing to do" in capsys.readouterr().out
    assert answer(capsys, "parameters", "tag", "good", "0", "--state", folder)["version"] == 0
    assert answer(capsys, "parameters", "tag", "good", "--remove", "--state", folder)["version"] is None
    assert not any(one["tags"] for one in answer(capsys, "parameters", "list", "--state", folder)["versions"])


def test_an_import_adds_the_arms_that_are_missing_and_refuses_what_does_not_fit(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    arms = (Arm(arm="extra", reward=7.0), *reversed(ARMS[1:]))
    file = str(tmp_path / "backup.json")
    assert main(["parameters", "export", "--state", folder, "--output", file]) == 0
    exported = decode_parameters(Path(file).read_bytes())
    with StateFolder(other) as state:
        Embedded(exported.settings, arms, partitions=1, state=state)
    assert answer(capsys, "parameters", "import", file, "--state", str(other))["version"] == 1
    shown = answer(capsys, "parameters", "show", "--state", str(other))
    assert [arm["arm"] for arm in shown["arms"]] == [arm.arm for arm in (*arms, ARMS[0])]
    learned = {arm.arm: bias for arm, bias in zip(exported.arms, exported.model.biases.tolist(), strict=True)}
    base_rate = exported.model.with_arms(1, ridge=1.0).biases[-1]
    assert {arm["arm"]: arm["log_odds"] for arm in shown["arms"]} == pytest.approx({**learned, "extra": base_rate})
    # A rollback leaves the arms as they are.
    assert main(["parameters", "export", "--state", str(other), "--output", file]) == 0
    answer(capsys, "parameters", "rollback", "0", "--state", folder)
    assert answer(capsys, "parameters", "rollback", file, "--state", folder)["version"] == exported.version + 2
    assert answer(capsys, "parameters", "show", "--state", folder)["observations"] == exported.observations
    names = [arm["arm"] for arm in answer(capsys, "arms", "list", "--state", folder)["arms"]]
    assert names == [arm.arm for arm in ARMS]
    wide = tmp_path / "wide.json"
    wide.write_bytes(encode_parameters(Parameters.first(replace(exported.settings, dim=9), ARMS)))
    assert main(["parameters", "import", str(wide), "--state", folder]) == 1
    assert "refused: these parameters have dim 9, the present ones 3" in capsys.readouterr().err
    wide.write_bytes(wide.read_bytes().replace(b'"folds":0', b'"folds":1'))
    assert main(["parameters", "import", str(wide), "--state", folder]) == 2
    assert "does not fit its content" in capsys.readouterr().err


def test_show_names_the_model_and_all_that_it_has_learned(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    details = answer(capsys, "parameters", "show", "--state", folder)
    kind = details["settings"]["model"]
    assert (details["tastes"] is not None) == (kind == "personal")
    assert details["context"] == ["x[1]", "x[2]", "x[3]"]
    assert len(details["position_answer_rates"]) == details["settings"]["horizon"]
    assert details["standardisation"] is None
    assert all(0 < arm["answer_rate"] <= 1 and arm["displays"] > 0 for arm in details["arms"])
    assert main(["parameters", "show", "--state", folder]) == 0
    shown = capsys.readouterr().out
    assert f"model {kind}" in shown
    assert ("strength of tastes λ_t" in shown) == (kind == "personal")
    assert "answers learned" in shown
    assert "contexts as they come" in shown


def test_an_ad_is_shown_with_the_users_that_it_works_for(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    version = pick_newest(folder, capsys)
    profile = answer(capsys, "parameters", "show", "--arm", "ad-1", "--state", folder)
    mean, covariance = version.model.head(1)
    assert (profile["arm"], profile["version"]) == ("ad-1", version.version)
    assert profile["log_odds"] == pytest.approx(mean[0])
    assert profile["low"] < mean[0] < profile["high"]
    assert profile["displays"] == version.answers.displayed[:, 1].sum()
    assert profile["answer_rate"] == version.rates.arms[1]
    heads = np.array([version.model.head(index)[0] for index in range(len(ARMS))])
    for taste in profile["tastes"]:
        column = int(taste["feature"][2:-1])
        assert taste["coefficient"] == pytest.approx(mean[column])
        assert taste["average"] == pytest.approx(heads[:, column].mean())
        assert taste["high"] - taste["low"] == pytest.approx(2 * 1.96 * covariance[column, column] ** 0.5, rel=1e-3)
    sizes = [abs(taste["difference"]) for taste in profile["tastes"]]
    assert sizes == sorted(sizes, reverse=True)
    assert main(["parameters", "show", "--arm", "ad-1", "--state", folder]) == 0
    shown = capsys.readouterr().out
    assert "click before features count" in shown
    assert ("has no tastes" in shown) == (version.settings.model == "additive")
    assert main(["parameters", "show", "--arm", "hat", "--state", folder]) == 2
    assert "--arm hat: version" in capsys.readouterr().err


def pick_newest(folder: str, capsys: pytest.CaptureFixture[str]) -> Parameters:
    assert main(["parameters", "export", "--state", folder]) == 0
    return decode_parameters(capsys.readouterr().out.encode())


def test_the_parameters_of_another_model_are_refused(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present = pick_newest(folder, capsys)
    other = {"personal": "additive", "additive": "personal"}[present.settings.model]
    file = tmp_path / "other.json"
    file.write_bytes(encode_parameters(Parameters.first(replace(present.settings, model=other), ARMS)))
    for command in ("import", "rollback"):
        assert main(["parameters", command, str(file), "--state", folder]) == 1
        error = capsys.readouterr().err
        assert "model" in error
        assert error.count("\n") == 1
    assert pick_newest(folder, capsys).sha256 == present.sha256


def test_arms_are_listed_with_answer_rates_and_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Parameters.first(settings(), tuple(replace(arm, features={"size": k}) for k, arm in enumerate(ARMS)))
    displayed = np.full((3, 4), 50.0)
    mute = AnswerCounts(displayed=displayed, answered=displayed * [1.0, 1.0, 0.0, 1.0])
    file = tmp_path / "mute.json"
    file.write_bytes(encode_parameters(replace(first, answers=mute)))
    folder = tmp_path / "state"
    with StateFolder(folder) as state:
        Embedded(first.settings, first.arms, partitions=1, state=state)
    answer(capsys, "parameters", "import", str(file), "--state", str(folder))
    listed = answer(capsys, "arms", "list", "--state", str(folder))["arms"]
    assert [arm["features"] for arm in listed] == [{"size": float(k)} for k in range(4)]
    rates = [arm["answer_rate"] for arm in listed]
    assert min(rates) == rates[2] < 0.2
    assert {arm["displays"] for arm in listed} == {150.0}
    assert main(["arms", "list", "--state", str(folder)]) == 0
    (marked,) = [line for line in capsys.readouterr().out.splitlines() if "(lowest)" in line]
    assert marked.startswith("ad-2")


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


def test_sync_makes_the_arms_those_of_a_file_in_one_version(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answer(capsys, "arms", "list", "--state", folder)
    first, second, *gone = ARMS
    file = tmp_path / "arms.csv"
    file.write_text(f"arm;reward\n{first.arm};{first.reward}\n{second.arm};9.5\ncoat;1.5\n")
    shown = answer(capsys, "arms", "sync", str(file), "--dry-run", "--state", folder)
    assert answer(capsys, "arms", "list", "--state", folder) == before
    made = answer(capsys, "arms", "sync", str(file), "--yes", "--state", folder)
    assert made["changes"] == shown["changes"]
    assert made["version"] == before["version"] + 1
    after = answer(capsys, "arms", "list", "--state", folder)["arms"]
    active = {arm["arm"]: arm["reward"] for arm in after if arm["active"]}
    assert active == {first.arm: first.reward, second.arm: 9.5, "coat": 1.5}
    assert len(after) == len(ARMS) + 1
    assert len(gone) == sum(not arm["active"] for arm in after)
    assert main(["arms", "sync", str(file), "--state", folder]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_the_difference_is_a_table_and_every_order_says_from_when_it_serves(folder, tmp_path, capsys) -> None:
    file = tmp_path / "arms.toml"
    rest = "\n".join(f"{arm.arm} = {arm.reward}" for arm in ARMS[2:])
    file.write_text(f"[arms]\ncoat = 1.5\n{ARMS[1].arm} = 9.5\n{rest}\n")
    assert main(["arms", "sync", str(file), "--yes", "--state", folder]) == 0
    out = capsys.readouterr().out
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert {("+", "coat", "1.5"), ("−", ARMS[0].arm, f"{ARMS[0].reward:g}")} <= rows
    assert ("~", ARMS[1].arm, f"{ARMS[1].reward:g}", "→", "9.5") in rows
    assert "1 added, 1 retired, 1 changed" in out
    assert "serves sessions that arrive from " in out
    assert main(["arms", "retire", "coat", "--state", folder]) == 0
    out = capsys.readouterr().out
    assert "in force" not in out
    assert "serves sessions that arrive from " in out
    assert "open sessions keep their slates" in out
    assert main(["parameters", "rollback", "0", "--state", folder]) == 0
    out = capsys.readouterr().out
    assert "rolled back: version " in out
    assert "serves sessions that arrive from " in out


def test_a_version_in_the_future_serves_in_so_many_seconds() -> None:
    made = replace(Parameters.first(settings(), ARMS), version=7, effective_at=1_000_002_300)
    assert "(in 2.3 s)" in in_force(made, now=1_000_000_000)
    assert "from now on" in in_force(made, now=1_000_002_300)


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 2), ("", 2)])
def test_on_a_terminal_the_changes_are_confirmed(folder, tmp_path, capsys, monkeypatch, typed, code) -> None:
    file = tmp_path / "arms.csv"
    file.write_text("arm,reward\ncoat,1.5\n")
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["arms", "sync", str(file), "--state", folder]) == code
    asked = capsys.readouterr().err
    assert "coat" in asked
    assert "[y/N]" in asked
    listed = answer(capsys, "arms", "list", "--state", folder)["arms"]
    assert any(arm["arm"] == "coat" for arm in listed) == (code == 0)


class Terminal(io.StringIO):
    """A terminal with typed text."""

    def isatty(self) -> bool:
        return True


def test_a_folder_in_use_is_read_and_takes_no_orders(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with StateFolder(folder):
        assert main(["parameters", "show", "--state", folder]) == 0
        assert main(["parameters", "freeze", "--state", folder]) == 1
    assert "another process" in capsys.readouterr().err
