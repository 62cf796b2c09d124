"""`adcascade replay`: output, JSON and exit codes."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from worker.cli.options.parser import flag

from ..golden.recording import ARMS, FACTS, GOLDEN, SETTINGS
from ..replay.logs import Document, change, lines_of, of, version, write

# The golden log may come from another kind of machine, see tests/golden.
CLOSE = "--tolerance 1e-9"


@pytest.fixture
def lines() -> list[Document]:
    return lines_of(GOLDEN)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[list[Document]], str]:
    return partial(write, tmp_path / "log.jsonl")


def spoiled(lines: list[Document], count: int) -> list[Document]:
    """Change the value of some decisions."""
    for line in of(lines, "decisions")[100 : 100 + count]:
        change(line, value=99.0)
    return lines


def test_a_summary_for_people(lines: list[Document], adcascade: Any) -> None:
    code, out, err = adcascade(f"replay {GOLDEN} {CLOSE}")
    assert (code, err) == (0, "")
    count = len(of(lines, "decisions"))
    for text in ("2023-11-14 22:13:20", "dead-letters", "300 sessions", f"{count} of {count} decisions", "no mismatch"):
        assert text in out
    assert orjson.loads(FACTS.read_bytes())["sha256"] in out


def test_the_json_has_the_versions_and_the_counts(lines: list[Document], adcascade) -> None:
    report = adcascade(f"replay {GOLDEN} --verify {CLOSE} --json -").json
    facts = orjson.loads(FACTS.read_bytes())
    assert report["mode"] == "verify"
    assert (report["mismatches"], report["unverified"], report["decisions"]) == (0, 0, len(of(lines, "decisions")))
    assert report["events"] == sum(report["topics"].values())
    newest = report["versions"][-1]
    assert (newest["version"], newest["sha256"]) == (facts["version"], facts["sha256"])


def test_relearn_writes_its_versions(adcascade: Any, tmp_path: Path) -> None:
    out = adcascade(f"replay {GOLDEN} --relearn {CLOSE} --json {tmp_path}/out.json").out
    report = orjson.loads((tmp_path / "out.json").read_bytes())
    assert report["mode"] == "relearn"
    assert [version["version"] for version in report["versions"]] == list(range(13))
    assert (report["sessions"], report["slates_recorded"]) == (300, 300)
    assert "slates: 300 as recorded, 0 planned here" in out


def test_a_mismatch_is_exit_1_with_session_position_and_both_values(lines, written, adcascade) -> None:
    code, out, _ = adcascade(f"replay {written(spoiled(lines, 1))} {CLOSE}")
    assert code == 1
    assert "1 mismatch\n" in out
    (found,) = [line for line in out.splitlines() if "found 99.0" in line]
    for text in ("line ", "session user-", "position ", "value: expected "):
        assert text in found


def test_many_mismatches_are_counted_and_the_first_are_listed(lines, written, adcascade) -> None:
    ended = adcascade(f"replay {written(spoiled(lines, 50))} {CLOSE} --json -")
    report = ended.json
    assert (ended.code, report["mismatches"]) == (1, 50)
    assert len(report["first_mismatches"]) == 20
    assert {mismatch["found"] for mismatch in report["first_mismatches"]} == {99.0}
    assert ended.err.count("found 99.0") == 5
    assert "and 45 more" in ended.err


def test_the_log_may_come_from_standard_input(monkeypatch, adcascade) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(GOLDEN.read_bytes()))))
    assert "standard input: 3," in adcascade(f"replay - {CLOSE}").out


def test_unusual_facts_are_reported(lines, written, adcascade) -> None:
    lines.remove(version(lines, 3))
    lines.remove(of(lines, "journal")[500])
    path = Path(written([*lines, lines[0], {**lines[0], "topic": "other"}]))
    path.write_bytes(path.read_bytes() + b"bad line\n")
    code, out, _ = adcascade(f"replay {path} {CLOSE} --skip-bad")
    assert code == 0
    for text in (
        "their version is not in the log",
        "not compared: the versions after 2, because of offsets 500 to 500 missing in the journal",
        "1 bad lines skipped, the first: line ",
        "1 repeated lines",
        "1 lines of other topics ignored",
    ):
        assert text in out


def test_relearn_from_arrivals_and_clicks_needs_settings_and_arms(lines, written, tmp_path, adcascade) -> None:
    path = written(of(lines, "arrivals", "clicks"))
    assert "needs --dim and --catalog" in adcascade(f"replay {path} --relearn").err
    arms = [{"arm": arm.arm, "reward": arm.reward} for arm in ARMS]
    for form in (arms, {"version": 0, "arms": arms}):
        (tmp_path / "arms.json").write_bytes(orjson.dumps(form))
        given = {**SETTINGS, "window": "10s", "session_timeout": "6s", "lateness": "2s"}
        flags = [word for name, value in given.items() for word in flag(name, value).split()]
        code, out, _ = adcascade(f"replay {path} --relearn --catalog {tmp_path}/arms.json", *flags)
        assert code == 0
        assert "versions 0 to 8: 9 of 9 learned" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.decompress(GOLDEN.read_bytes()) + b'{"topic": "ads.clicks", "partition": 0\n',
            f"log: line {len(lines_of(GOLDEN)) + 1}: not JSON",
        ),
        (GOLDEN.read_bytes()[:-5000], "breaks off after line 3"),
    ],
    ids=["a bad line", "truncated"],
)
def test_a_damaged_log_is_one_line_and_exit_2_unless_skipped(tmp_path, content, message, adcascade) -> None:
    (tmp_path / "log").write_bytes(content)
    code, _, err = adcascade(f"replay {tmp_path}/log")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert "1 bad lines skipped, the first: " in adcascade(f"replay {tmp_path}/log --skip-bad {CLOSE}").out
