"""`adcascade parameters` and `adcascade arms`, on a state folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.cli.conftest import Terminal
from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from tests.serve.folder import FolderTap, taking_orders
from worker.bandit.personal import PersonalModel
from worker.cli.arms import in_force
from worker.embedded.runner import Embedded
from worker.stream import accounts
from worker.stream.features import Features
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm
from worker.stream.version_records import encode_parameters

Ask = Callable[..., Any]
Say = Callable[..., str]


@pytest.fixture(scope="module", params=["personal", "additive"])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with some versions in it, of either model."""
    folder = tmp_path_factory.mktemp("state")
    with FolderTap(folder) as tap:
        runner = Embedded(settings(model=request.param), ARMS, partitions=2, tap=tap)
        deliver(runner, arrivals(120, seconds=40), live=True)
        finish(runner)
    return folder


@pytest.fixture
def folder(learned: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it that takes orders."""
    for file in learned.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with taking_orders(tmp_path):
        yield tmp_path


@pytest.fixture
def say(folder: Path, adcascade: Any) -> Say:
    """Return a function that runs a command on the folder, or on another one, and returns what it prints."""

    def run(line: str, *, state: Path = folder, code: int = 0) -> str:
        ended = adcascade(f"{line} --state {state}")
        assert ended.code == code
        return str(ended.err if code else ended.out)

    return run


@pytest.fixture
def ask(say: Say) -> Ask:
    """Return a function that does so for the JSON of a command."""
    return lambda line, **more: orjson.loads(say(f"{line} --json -", **more))


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_show_and_export_agree_on_the_hash(ask: Ask, say: Say, tmp_path: Path) -> None:
    file = tmp_path / "exported.json"
    say(f"parameters export --output {file}")
    assert decode_parameters(file.read_bytes()).sha256 == ask("parameters show")["sha256"]
    say(f"explain --parameters {file} --context '[0.1, 0.2, 0.3]'")


def test_freeze_rollback_and_unfreeze_each_make_a_version(ask: Ask) -> None:
    before = ask("parameters show")
    frozen = ask("parameters freeze")
    assert (frozen["version"], frozen["frozen"]) == (before["version"] + 1, True)
    assert ask("parameters freeze")["version"] == frozen["version"]
    target = before["version"] - 1
    assert ask(f"parameters rollback {target}")["version"] == frozen["version"] + 1
    old, new = ask(f"parameters show --version {target}"), ask("parameters show")
    assert (new["theta_context"], new["frozen"]) == (old["theta_context"], True)
    assert ask("parameters unfreeze")["frozen"] is False


def test_a_version_that_is_not_kept_is_named_with_its_neighbours(ask: Ask, say: Say) -> None:
    newest = ask("parameters show")["version"]
    for command in ("rollback 999", "show --version 999", "tag good 999"):
        assert f"version 999 is not kept; the nearest is {newest}" in say(f"parameters {command}", code=2)
    for command in ("rollback good", "show --version good", "tag better good"):
        assert "'good'; there are no tags" in say(f"parameters {command}", code=2)
    for command in ("tag 7up", "tag 'a b'", "tag good --remove", "tag good 1 --remove"):
        assert say(f"parameters {command}", code=2).count("\n") == 1


def test_a_tagged_version_outlives_the_last_eight_and_is_rolled_back_to(ask: Ask, say: Say, tmp_path: Path) -> None:
    old = ask("parameters show")
    assert ask("parameters tag good") == {"tag": "good", "version": old["version"]}
    for price in range(1, 12):
        ask(f"arms price ad-0 --reward {price}")
    number = old["version"]
    assert number not in ask("parameters show")["kept"]
    listed = ask("parameters list")["versions"]
    assert [one["tags"] for one in listed if one["version"] == number] == [["good"]]
    assert len([one for one in listed if one["served"]]) == 8
    ask("arms add coat --reward 2.5")
    file = tmp_path / "good.json"
    say(f"parameters export --version good --output {file}")
    for reference in ("good", number, file):
        assert ask("parameters show --version good")["sha256"] == old["sha256"]
        say(f"explain --version {number} --context '[0.1, 0.2, 0.3]'")
        newest = ask("parameters show")["version"]
        assert say("explain --context '[0.1, 0.2, 0.3]'").startswith(f"version {newest}: ")
        zero = ask("parameters rollback 0")
        assert ask(f"parameters rollback {reference}")["version"] == zero["version"] + 1
        now = ask("parameters show")
        assert (now["theta_context"], now["observations"]) == (old["theta_context"], old["observations"])
        assert [arm["arm"] for arm in now["arms"]][-1] == "coat"
        assert "nothing to do" in say(f"parameters rollback {reference}")
    assert ask("parameters tag good 0")["version"] == 0
    assert ask("parameters tag good --remove")["version"] is None
    assert not any(one["tags"] for one in ask("parameters list")["versions"])


def test_an_import_adds_the_arms_that_are_missing_and_refuses_what_does_not_fit(
    ask: Ask, say: Say, tmp_path: Path
) -> None:
    other, file, wide = (tmp_path / name for name in ("other", "backup.json", "wide.json"))
    arms = (Arm(arm="extra", reward=7.0), *reversed(ARMS[1:]))
    say(f"parameters export --output {file}")
    exported = decode_parameters(file.read_bytes())
    with FolderTap(other) as tap:
        Embedded(exported.settings, arms, partitions=1, tap=tap)
    with taking_orders(other):
        assert ask(f"parameters import {file}", state=other)["version"] == 1
    shown = ask("parameters show", state=other)
    assert [arm["arm"] for arm in shown["arms"]] == [arm.arm for arm in (*arms, ARMS[0])]
    learned = {arm.arm: bias for arm, bias in zip(exported.arms, exported.model.biases.tolist(), strict=True)}
    base_rate = exported.model.with_arms(1).biases[-1]
    assert {arm["arm"]: arm["log_odds"] for arm in shown["arms"]} == pytest.approx({**learned, "extra": base_rate})
    # A rollback leaves the arms as they are.
    say(f"parameters export --output {file}", state=other)
    ask("parameters rollback 0")
    assert ask(f"parameters rollback {file}")["version"] == exported.version + 2
    assert ask("parameters show")["observations"] == exported.observations
    assert {arm["arm"] for arm in ask("arms list")["arms"]} == {arm.arm for arm in ARMS}
    wide.write_bytes(encode_parameters(Parameters.first(replace(exported.settings, dim=9), ARMS)))
    refusal = say(f"parameters import {wide}", code=1)
    assert "refused: these parameters have dim 9, the present ones 3" in refusal
    wide.write_bytes(wide.read_bytes().replace(b'"folds":0', b'"folds":1'))
    assert "does not fit its content" in say(f"parameters import {wide}", code=2)


def test_show_names_the_model_and_all_that_it_has_learned(ask: Ask, say: Say) -> None:
    details, shown = ask("parameters show"), say("parameters show")
    kind = details["settings"]["model"]
    assert [(one["feature"], one["of"]) for one in details["features"]] == (
        [("x[1] … x[3]", "context")] if kind == "personal" else []
    )
    assert len(details["position_effects"]) == details["settings"]["horizon"]
    assert details["context"] == ["x[1]", "x[2]", "x[3]"]
    assert len(details["position_answer_rates"]) == details["settings"]["horizon"]
    assert details["standardisation"] is None
    assert all(0 < arm["answer_rate"] <= 1 and arm["displays"] > 0 for arm in details["arms"])
    going_on = "users without a click go on: by position ×"
    kept = "forgetting auto: the last fold kept all"
    for text in (f"model {kind}", "learning", going_on, kept, "contexts as they come", *(arm.arm for arm in ARMS)):
        assert text in shown
    assert ("what decides between ads: x[1] … x[3] " in shown) == (kind == "personal")


def test_features_are_named_with_their_strength_and_what_was_forgotten_is_said(say: Say, tmp_path: Path) -> None:
    table = {
        "context": {"age": "number", "spent": "number", "device": ["mobile", "desktop"]},
        "crosses": [["age", "spent"]],
    }
    declared = replace(settings(), dim=4, features=Features.of_table(table))
    first = Parameters.first(declared, tuple(replace(arm, features={"size": k}) for k, arm in enumerate(ARMS)))
    strong = {"context_groups.strengths": np.array([0.25, 100.0, 4.0, 4000.0]), "ad_groups.strengths": np.array([30.0])}
    model = PersonalModel.unpack({**first.model.pack(), **strong})
    model = replace(model, precision=replace(model.precision, information=np.stack([np.eye(6)] * len(ARMS))))
    file = tmp_path / "known.json"
    file.write_bytes(encode_parameters(replace(first, model=model, folds=3, kept=0.3, changed=(ARMS[1].arm,))))
    other = tmp_path / "other"
    with FolderTap(other) as tap:
        Embedded(first.settings, first.arms, partitions=1, tap=tap)
    with taking_orders(other):
        say(f"parameters import {file}", state=other)
    shown = say("parameters show", state=other)
    assert (
        "decides between ads: age strong (2.00), device clear (0.50), spent weak (0.10), age × spent negligible"
        in shown
    )
    assert "features of ads that matter: size weak (0.18)" in shown
    assert f"{ARMS[1].arm} changed and began anew; change noticed, older sessions count 0.3" in shown


def test_an_ad_is_shown_with_the_users_that_it_works_for(ask: Ask, say: Say) -> None:
    version = decode_parameters(say("parameters export").encode())
    profile = ask("parameters show --arm ad-1")
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
    shown = say("parameters show --arm ad-1")
    assert "click before features count" in shown
    assert ("has no tastes" in shown) == (version.settings.model == "additive")
    assert "--arm hat: version" in say("parameters show --arm hat", code=2)


def test_the_parameters_of_another_model_are_refused(say: Say, tmp_path: Path) -> None:
    present = decode_parameters(say("parameters export").encode())
    other = {"personal": "additive", "additive": "personal"}[present.settings.model]
    file = tmp_path / "other.json"
    file.write_bytes(encode_parameters(Parameters.first(replace(present.settings, model=other), ARMS)))
    for command in ("import", "rollback"):
        error = say(f"parameters {command} {file}", code=1)
        assert "model" in error
        assert error.count("\n") == 1
    assert decode_parameters(say("parameters export").encode()).sha256 == present.sha256


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("learned", ["additive"], indirect=True)
def test_arms_are_listed_with_figures_and_features_by_revenue(
    ask: Ask, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "DAY", 20_000)  # milliseconds
    other = tmp_path / "other"
    with FolderTap(other) as tap:
        arms = tuple(replace(arm, features={"size": k}) for k, arm in enumerate(ARMS))
        runner = Embedded(settings(), arms, partitions=1, tap=tap)
        tap.state.commit()
        assert say("arms list", state=other).startswith("no window with sessions is closed yet\narm ")
        deliver(runner, arrivals(200, seconds=40), live=True)
        finish(runner)
    listed = ask("arms list", state=other)
    assert sum(arm["total"]["displays"] for arm in listed["arms"]) == runner.versions.newest.observations
    for flag, of in (("", "total"), ("--today", "today")):
        since, header, *rows = say(f"arms list {flag}", state=other).splitlines()
        assert since.startswith("since 2023-11-14 22:13, until 2023-11-14 22:13 (UTC): 200 sessions, ")
        assert header.split()[:5] == ["arm", "reward", "state", "displays", "clicks"]
        ads = sorted(listed["arms"], key=lambda arm: -arm[of]["revenue"])
        shown = [[arm["arm"], f"{arm[of]['displays']:.0f}", f"{arm['features']['size']:g}"] for arm in ads]
        assert [[row.split()[0], row.split()[3], row.split()[-1]] for row in rows] == shown
    assert listed["arms"][0]["today"]["displays"] < listed["arms"][0]["total"]["displays"]


def test_an_arm_is_added_priced_retired_and_brought_back(ask: Ask) -> None:
    for order, expected in (
        ("add coat --reward 2.5", (2.5, True)),
        ("price coat --reward 1.25", (1.25, True)),
        ("retire coat", (1.25, False)),
        ("add coat", (1.25, True)),
    ):
        ask(f"arms {order}")
        (coat,) = [arm for arm in ask("arms list")["arms"] if arm["arm"] == "coat"]
        assert (coat["reward"], coat["active"]) == expected


def test_sync_makes_the_arms_those_of_a_file_in_one_version(ask: Ask, say: Say, tmp_path: Path) -> None:
    before = ask("arms list")
    first, second, *gone = ARMS
    file = tmp_path / "arms.csv"
    file.write_text(f"arm;reward\n{first.arm};{first.reward}\n{second.arm};9.5\ncoat;1.5\n")
    shown = ask(f"arms sync {file} --dry-run")
    assert ask("arms list") == before
    made = ask(f"arms sync {file} --yes")
    assert made["changes"] == shown["changes"]
    assert made["version"] == before["version"] + 1
    after = ask("arms list")["arms"]
    active = {arm["arm"]: arm["reward"] for arm in after if arm["active"]}
    assert active == {first.arm: first.reward, second.arm: 9.5, "coat": 1.5}
    assert len(gone) == sum(not arm["active"] for arm in after) == len(after) - 3
    assert "nothing to do" in say(f"arms sync {file}")


def test_the_difference_is_a_table_and_every_order_says_from_when_it_serves(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "arms.toml"
    rest = "\n".join(f"{arm.arm} = {arm.reward}" for arm in ARMS[2:])
    file.write_text(f"[arms]\ncoat = 1.5\n{ARMS[1].arm} = 9.5\n{rest}\n")
    out = say(f"arms sync {file} --yes")
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert {("+", "coat", "1.5"), ("−", ARMS[0].arm, f"{ARMS[0].reward:g}")} <= rows
    assert ("~", ARMS[1].arm, f"{ARMS[1].reward:g}", "→", "9.5") in rows
    assert "1 added, 1 retired, 1 changed" in out
    for text in (out, say("arms retire coat"), say("parameters rollback 0")):
        assert "serves sessions that arrive from " in text
        assert "open sessions keep their slates" in text


def test_the_time_until_a_version_serves_is_given_in_seconds() -> None:
    made = replace(Parameters.first(settings(), ARMS), version=7, effective_at=1_000_002_300)
    assert "(in 2.3 s)" in in_force(made, now=1_000_000_000)
    assert "from now on" in in_force(made, now=1_000_002_300)


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 2), ("", 2)])
def test_on_a_terminal_the_changes_are_confirmed(ask, adcascade, folder, tmp_path, monkeypatch, typed, code) -> None:
    file = tmp_path / "arms.csv"
    file.write_text("arm,reward\ncoat,1.5\n")
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ended = adcascade(f"arms sync {file} --state {folder}")
    assert ended.code == code
    assert "coat" in ended.err
    assert "[y/N]" in ended.err
    assert any(arm["arm"] == "coat" for arm in ask("arms list")["arms"]) == (code == 0)
