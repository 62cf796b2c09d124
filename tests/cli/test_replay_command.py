"""`adcascade replay`: output, JSON and exit codes."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from worker.cli.main import main

from ..golden.recording import ARMS, FACTS, GOLDEN, SETTINGS

Document = dict[str, Any]

# The golden log may come from another kind of machine, see tests/golden.
CLOSE = ("--tolerance", "1e-9")


@pytest.fixture
def lines() -> list[Document]:
    return [orjson.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Callable[[list[Document]], str]:
    def write(lines: list[Document]) -> str:
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        return str(path)

    return write


def spoiled(lines: list[Document], count: int) -> list[Document]:
    """Change the value of some decisions."""
    decisions = [line for line in lines if line["topic"] == "ads.decisions"]
    for line in decisions[100 : 100 + count]:
        line["payload"] = orjson.dumps({**orjson.loads(line["payload"]), "value": 99.0}).decode()
    return lines


def test_a_summary_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(GOLDEN), *CLOSE]) == 0
    out, err = capsys.readouterr()
    for text in ("2023-11-14 22:13:20", "dead-letters", "300 sessions", "881 of 881 decisions", "no mismatch"):
        assert text in out
    assert orjson.loads(FACTS.read_bytes())["sha256"] in out
    assert err == ""


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_verification_is_the_default(capsysbinary: pytest.CaptureFixture[bytes], flags: tuple[str]) -> None:
    assert main(["replay", str(GOLDEN), *flags, *CLOSE, "--json", "-"]) == 0
    report = orjson.loads(capsysbinary.readouterr().out)
    facts = orjson.loads(FACTS.read_bytes())
    assert report["mode"] == "verify"
    assert (report["mismatches"], report["unverified"], report["decisions"]) == (0, 0, 881)
    assert report["events"] == sum(report["topics"].values())
    assert {name: report["versions"][-1][name] for name in ("version", "sha256")} == {
        "version": facts["version"],
        "sha256": facts["sha256"],
    }


def test_relearn_writes_its_versions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["replay", str(GOLDEN), "--relearn", *CLOSE, "--json", str(tmp_path / "out.json")]) == 0
    report = orjson.loads((tmp_path / "out.json").read_bytes())
    assert report["mode"] == "relearn"
    assert [version["version"] for version in report["versions"]] == list(range(13))
    assert (report["sessions"], report["slates_recorded"]) == (300, 300)
    assert "slates: 300 as recorded, 0 planned here" in capsys.readouterr().out


def test_a_mismatch_is_exit_1_with_session_position_and_both_values(
    lines: list[Document], written: Callable[[list[Document]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(spoiled(lines, 1))
    assert main(["replay", path, *CLOSE]) == 1
    out = capsys.readouterr().out
    assert "1 mismatch\n" in out
    (found,) = [line for line in out.splitlines() if "found 99.0" in line]
    for text in ("line ", "session user-", "position ", "value: expected "):
        assert text in found


def test_many_mismatches_are_counted_and_the_first_are_listed(
    lines: list[Document], written: Callable[[list[Document]], str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", written(spoiled(lines, 50)), *CLOSE, "--json", "-"]) == 1
    out, err = capfd.readouterr()
    report = orjson.loads(out)
    assert report["mismatches"] == 50
    assert len(report["first_mismatches"]) == 20
    assert {mismatch["found"] for mismatch in report["first_mismatches"]} == {99.0}
    assert err.count("found 99.0") == 5
    assert "and 45 more" in err


def test_the_log_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(GOLDEN.read_bytes()))))
    assert main(["replay", "-", *CLOSE]) == 0
    assert "standard input: 3," in capsys.readouterr().out


def test_unusual_facts_are_reported(
    lines: list[Document], written: Callable[[list[Document]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [line for line in lines if line["topic"] != "ads.parameters" or '"version":3,' not in line["payload"]]
    journal = [line for line in kept if line["topic"] == "ads.journal"]
    kept.remove(journal[500])
    path = Path(written([*kept, kept[0], {**kept[0], "topic": "other"}]))
    path.write_bytes(path.read_bytes() + b"bad line\n")
    assert main(["replay", str(path), *CLOSE, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    for text in (
        "their version is not in the log",
        "the journal lacks the offsets 500 to 500",
        "not folded again: ",
        "1 bad lines skipped, the first: line ",
        "1 repeated lines",
        "1 lines of other topics ignored",
    ):
        assert text in out


def test_relearn_from_arrivals_and_clicks_needs_settings_and_arms(
    lines: list[Document],
    written: Callable[[list[Document]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written([line for line in lines if line["topic"] in ("ads.arrivals", "ads.clicks")])
    assert main(["replay", path, "--relearn"]) == 2
    assert "give --dim and --catalog" in capsys.readouterr().err
    arms = [{"arm": arm.arm, "reward": arm.reward} for arm in ARMS]
    for form in (arms, {"version": 0, "arms": arms}):
        (tmp_path / "arms.json").write_bytes(orjson.dumps(form))
        given = {**SETTINGS, "window": "10s", "session_timeout": "6s", "lateness": "2s"}
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        assert main(["replay", path, "--relearn", "--catalog", str(tmp_path / "arms.json"), *flags]) == 0
        assert "versions 0 to 8: 9 of 9 learned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        ([], "required: FILE"),
        ([str(GOLDEN), "--verify", "--relearn"], "give one of them"),
        ([str(GOLDEN), "--prefix", "shop"], "--prefix ads"),
        ([str(GOLDEN), "--prefix", "no spaces"], "prefix"),
        ([str(GOLDEN), "--tolerance", "-1"], "--tolerance"),
        ([str(GOLDEN), "--catalog", "arms.json"], "--catalog is for --relearn"),
        ([str(GOLDEN), "--json", "/nowhere/out.json"], "/nowhere"),
        ([str(GOLDEN), "--relearn", "--catalog", "missing.json"], "--catalog missing.json: No such file"),
        ([str(GOLDEN), "--relearn", "--window", "0"], "window must be"),
        ([str(GOLDEN), "--relearn", "--policy", "best"], "--policy"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "no arms"),
        (b'{"arms": {}}', "no arms"),
        (b'["a"]', "must have arm and reward"),
        (b'[{"arm": "a"}]', "must have arm and reward"),
        (b'[{"arm": "a", "reward": -1}]', "above zero"),
        (b'[{"arm": "a", "reward": 1}, {"arm": "a", "reward": 2}]', "is listed twice"),
    ],
)
def test_invalid_arms_are_refused(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arms.json").write_bytes(content)
    assert main(["replay", str(GOLDEN), "--relearn", "--catalog", str(tmp_path / "arms.json")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.decompress(GOLDEN.read_bytes()) + b'{"topic": "ads.clicks", "partition": 0\n',
            "log: line 3867: not JSON",
        ),
        (GOLDEN.read_bytes()[:-5000], "breaks off after line 3"),
    ],
    ids=["a bad line", "truncated"],
)
def test_a_damaged_log_is_one_line_and_exit_2_unless_skipped(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(content)
    assert main(["replay", str(tmp_path / "log")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert main(["replay", str(tmp_path / "log"), "--skip-bad", *CLOSE]) == 0
