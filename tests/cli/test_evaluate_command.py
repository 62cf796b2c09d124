"""`adcascade evaluate`: output, JSON and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.evaluate.recording import record
from tests.replay.logs import lines_of, of, version, write
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


def test_the_table_has_a_line_for_each_answer(log: Path, adcascade: Any) -> None:
    code, out, err = adcascade(f"evaluate {log} --policy greedy")
    assert (code, err) == (0, "")
    assert out.startswith("greedy, up to 2 displays; its estimates: as served\n")
    table = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("as served", *METHODS):
        assert "…" in table[name]
    assert "95 % interval" in table["per session"]
    assert "matching" in table["snips"]
    assert "the click model" in table["direct"]


def test_the_json_has_every_number(log: Path, adcascade: Any) -> None:
    found = adcascade(f"evaluate {log} --policy greedy --confidence 0.9 --json -").json
    assert found["confidence"] == 0.9
    assert found["target"]["policy"] == "greedy"
    assert found["target"]["estimate"] == "as served"
    assert [estimate["method"] for estimate in found["estimates"]] == list(METHODS)
    for estimate in found["estimates"]:
        revenue = estimate["revenue"]
        assert revenue["low"] < revenue["estimate"] < revenue["high"]
        assert estimate["sessions"] > 0
        assert estimate["refused"] is None
    assert found["check"]["passed"] is True
    assert [group["group"] for group in found["check"]["groups"]] == ["all displays", "arms of the target"]


def test_one_answer_is_sufficient(deterministic: Path, adcascade: Any) -> None:
    """Myopic slates did not serve, and no slate was left to chance: the model alone has an answer."""
    code, out, _ = adcascade(f"evaluate {deterministic} --policy myopic-ucb --beta 0")
    assert code == 0
    for method in ("snips", "dr"):
        assert (
            f"{method} has no answer: no slate was left to chance, and another policy served: more sessions, and a "
            "random_share above 0, give an answer next time" in out
        )
    assert "not enough random sessions to check the click model" in out


def test_exit_1_if_no_method_has_an_answer(deterministic, tmp_path, adcascade) -> None:
    """A minute and a half of few users has too few clicks."""
    lines = lines_of(deterministic)
    start = min(line["ts"] for line in of(lines, "arrivals"))
    path = write(tmp_path / "short.jsonl", [line for line in lines if line["ts"] < start + 90_000])
    ended = adcascade(f"evaluate {path}")
    assert ended.code == 1
    assert "no answer" in ended.err


def test_a_version_may_be_given(log: Path, tmp_path: Path, adcascade: Any) -> None:
    path = tmp_path / "version.json"
    path.write_text(version(lines_of(log), 15)["payload"])
    found = adcascade(f"evaluate {log} --parameters {path} --policy greedy --json -").json
    assert found["target"]["estimate"].startswith("version ")
    assert found["target"]["policy"] == "greedy"
    as_served = adcascade(f"evaluate {log} --json -").json
    assert found["served"]["sessions"] == as_served["served"]["sessions"] + as_served["warmup"]
    assert any("overestimated" in note for note in found["notes"])


NUMBERS = {"context": [{"name": name, "kind": "number"} for name in "xyz"], "ads": []}


@pytest.mark.parametrize(
    ("dim", "more", "complaint"),
    [
        (1, {}, "have dim 1, the log has 3"),
        (3, {"features": NUMBERS}, "the parameters and the log have different features of contexts or ads"),
        (3, {"beta": 0.5, "policy": "aucbbp"}, ""),
    ],
    ids=["dim", "features", "fitting"],
)
def test_given_parameters_must_fit_the_log(log: Path, tmp_path: Path, adcascade: Any, dim, more, complaint) -> None:
    path = tmp_path / "version.json"
    record: dict[str, Any] = {
        "arms": [{"arm": "ad-1", "reward": 1.0}],
        "theta_context": [0.0] * dim,
        "theta_arms": [0.0],
        "precision": {"context": np.eye(dim).tolist(), "cross": [[0.0] * dim], "arms": [1.0]},
        "horizon": 2,
        **more,
    }
    path.write_bytes(orjson.dumps(record))
    code, out, err = adcascade(f"evaluate {log} --parameters {path}")
    assert (code, out == "", err.count("\n")) == ((2, True, 1) if complaint else (0, False, 0))
    assert complaint in err


def test_bad_lines_and_contradictions_are_noted(log: Path, tmp_path: Path, adcascade: Any) -> None:
    lines = lines_of(log)
    path = Path(write(tmp_path / "log.jsonl", [*lines, {**lines[0], "payload": "other"}]))
    path.write_bytes(b"{not json}\n" + path.read_bytes())
    out = adcascade(f"evaluate {path} --skip-bad").out
    assert "1 bad lines skipped" in out
    assert "1 records contradict others or are damaged" in out
