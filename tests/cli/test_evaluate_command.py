"""`adcascade evaluate`: output, JSON and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.evaluate.recording import record
from tests.replay.logs import lines_of, of, version, write
from worker.cli.main import main
from worker.evaluate.estimators import METHODS


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "log.jsonl"
    record(path, random_share=0.6)
    return path


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log without chance after a short warm-up."""
    path = tmp_path_factory.mktemp("recorded") / "log.jsonl"
    record(path, random_share=0.0, users=15, episodes=12)
    return path


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["evaluate", *arguments, "--json", "-"]) == code
    found: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of error for wrong input."""
    assert main(["evaluate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_table_has_a_line_for_each_answer(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(log), "--policy", "greedy"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("greedy, laplace estimator, up to 2 displays; its estimates: as served\n")
    table = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("as served", *METHODS):
        assert "…" in table[name]
    assert "95 % interval" in table["per session"]
    assert "matching" in table["ips"]
    assert "the personal model" in table["direct"]
    assert "revenue/expected" in out
    assert "arms × features" in table
    assert err == ""


def test_the_json_has_every_number(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, str(log), "--policy", "greedy", "--confidence", "0.9")
    assert found["confidence"] == 0.9
    assert found["target"]["policy"] == "greedy"
    assert found["target"]["estimate"] == "as served"
    assert [estimate["method"] for estimate in found["estimates"]] == list(METHODS)
    for estimate in found["estimates"]:
        revenue = estimate["revenue"]
        assert revenue["low"] < revenue["estimate"] < revenue["high"]
        assert estimate["sessions"] > 0
        assert estimate["refused"] is None
    assert found["model"]["kind"] == "personal"
    assert found["model"]["clicks"] == pytest.approx(found["model"]["expected_clicks"], rel=0.05)
    assert found["sessions"] == found["served"]["sessions"]
    assert found["model_check"]["passed"] is True
    assert [group["group"] for group in found["model_check"]["groups"]][:2] == ["all displays", "arms of the target"]


def test_only_the_given_methods_answer(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, str(log), "--method", "dr", "--method", "replay")
    assert [estimate["method"] for estimate in found["estimates"]] == ["replay", "dr"]


def test_one_answer_is_sufficient(deterministic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Myopic slates did not serve, and no slate was left to chance: the model alone has an answer."""
    asked = (str(deterministic), "--policy", "myopic-ucb", "--beta", "0")
    found = {one["method"]: one for one in document(capsys, *asked)["estimates"]}
    assert found["direct"]["sessions"] > found["ips"]["sessions"] > 0
    assert main(["evaluate", *asked]) == 0
    out, _ = capsys.readouterr()
    assert "A random_share above 0 avoids this" in out
    for method in ("replay", "ips", "snips", "dr"):
        assert f"{method} has no answer: " in out
    assert "would suffice for so many sessions" in out
    assert "not enough random sessions to check the click model" in out


def test_exit_1_if_a_given_method_has_no_answer(deterministic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (str(deterministic), "--policy", "myopic-ucb", "--beta", "0", "--method", "ips", "--method", "direct")
    found = document(capsys, *asked, code=1)
    assert [estimate["refused"] is None for estimate in found["estimates"]] == [False, True]
    assert main(["evaluate", *asked]) == 1
    assert "adcascade: ips has no answer: " in capsys.readouterr().err


def test_exit_1_if_no_method_has_an_answer(deterministic, tmp_path, capsys) -> None:
    """A minute and a half of few users has too few clicks."""
    lines = lines_of(deterministic)
    start = min(line["ts"] for line in of(lines, "arrivals"))
    path = write(tmp_path / "short.jsonl", [line for line in lines if line["ts"] < start + 90_000])
    assert main(["evaluate", path]) == 1
    assert "no answer" in capsys.readouterr().err


def test_a_version_may_be_given(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "version.json"
    path.write_text(version(lines_of(log), 15)["payload"])
    found = document(capsys, str(log), "--parameters", str(path), "--policy", "greedy")
    assert found["target"]["estimate"].startswith("version ")
    assert found["target"]["policy"] == "greedy"
    as_served = document(capsys, str(log))
    assert found["sessions"] == as_served["sessions"] + as_served["warmup"]
    assert any("overestimated" in note for note in found["notes"])


def test_given_parameters_must_fit_the_log(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "version.json"
    record: dict[str, Any] = {
        "arms": [{"arm": "ad-1", "reward": 1.0}],
        "theta_context": [0.0],
        "theta_arms": [0.0],
        "precision": {"context": [[1.0]], "cross": [[0.0]], "arms": [1.0]},
        "horizon": 2,
    }
    path.write_bytes(orjson.dumps(record))
    assert "have dim 1, the log has 3" in refused(capsys, str(log), "--parameters", str(path))


def test_a_longer_horizon_than_served_is_a_failure(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(log), "--horizon", "9"]) == 1
    assert "served at most 2 displays" in capsys.readouterr().err


def test_bad_lines_and_contradictions_are_noted(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(log)
    path = Path(write(tmp_path / "log.jsonl", [*lines, {**lines[0], "payload": "other"}]))
    path.write_bytes(b"{not json}\n" + path.read_bytes())
    assert main(["evaluate", str(path), "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "1 bad lines skipped" in out
    assert "1 records contradict others or are damaged" in out
