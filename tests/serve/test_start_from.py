"""`adcascade serve --start-from`: a log or a version, once; restarts go on from what is there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.serve.process import ARMS, ServeProcess
from worker.cli.main import main


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of displays, the log of its import, and the version that it teaches."""
    folder, chance = tmp_path_factory.mktemp("history"), random.Random(0)
    rows = ["session,time,position,ad,clicked,x,y"]
    for session in range(150):
        x, y = (round(chance.gauss(0, 1), 3) for _ in "xy")
        for position, ad in enumerate(sorted(ARMS, key=lambda ad: -ARMS[ad])[:3], start=1):
            clicked = chance.random() < (0.5 if x > 0 and ad == "shoe" else 0.1)
            rows.append(f"h{session},{1767225600 + 60 * session},{position},{ad},{int(clicked)},{x},{y}")
            if clicked:
                break
    (folder / "table.csv").write_text("\n".join(rows))
    (folder / "arms.json").write_text(json.dumps(ARMS))
    columns = ["--context-columns", "x,y", "--catalog", str(folder / "arms.json")]
    assert main(["import", str(folder / "table.csv"), "--output", str(folder / "log.gz"), *columns]) == 0
    learned = ["--relearn", "--output", str(folder / "learned.json")]
    assert main(["replay", str(folder / "log.gz"), *learned]) == 0
    return folder


def shown(state: Path, tmp_path: Path) -> Any:
    assert main(["parameters", "show", "--state", str(state), "--json", str(tmp_path / "shown.json")]) == 0
    return json.loads((tmp_path / "shown.json").read_text())


def test_a_server_starts_from_a_log_once_and_its_own_log_replays(history: Path, tmp_path: Path, capsys) -> None:
    start = ("--lateness", "200ms", "--start-from")
    with ServeProcess(tmp_path, *start, str(history / "log.gz")) as server:
        first = shown(server.state, tmp_path)
        assert (first["version"], first["started_from"]["trust"]) == (0, 0.3)
        assert main(["arms", "add", "glove", "--reward", "9", "--state", str(server.state)]) == 0
        assert server.stop() == 0
        assert "log.gz: 365 displays; no warm-up" in server.output
        server.start()
        assert server.stop() == 0
        assert "ignored" not in server.output
    assert main(["replay", str(server.log)]) == main(["replay", str(server.log), "--relearn"]) == 0
    with ServeProcess(tmp_path, *start, str(history / "learned.json")) as server:
        later = shown(server.state, tmp_path)
    assert later["version"] > 0
    assert later["started_from"] == first["started_from"]
    assert "is ignored: the versions that are there started from another one" in server.output
    capsys.readouterr()
    assert main(["parameters", "show", "--state", str(server.state)]) == 0
    assert f"started from a history: sha256 {first['started_from']['sha256'][:16]}…" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--start-from learned.json --trust 0", "--trust: must be above 0, not 0"),
        ("--start-from learned.json --trust 1.1", "--trust: must be at most 1, not 1.1"),
        ("--trust 0.5 --dim 2", "--trust is for --start-from FILE, which is missing"),
        ("--start-from -", "--start-from takes no standard input"),
        ("--start-from nowhere", "--start-from nowhere: No such file"),
        ("--start-from table.csv", "--start-from table.csv: neither a version nor a log, or damaged (a table"),
        ("--start-from changed.json", "--start-from changed.json: its sha256 does not fit its content"),
        ("--start-from cut.gz", "--start-from cut.gz: the gzip data breaks off"),
        ("--start-from learned.json --dim 3", "a history of other features: its contexts have 2, not 3"),
        ("--start-from learned.json --model additive", "a history of another model: its model is personal"),
    ],
)
def test_a_history_that_cannot_be_used_is_one_line(history: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(history)
    version, log = Path("learned.json").read_bytes(), Path("log.gz").read_bytes()
    Path("cut.json").write_bytes(version[: len(version) // 2])
    Path("changed.json").write_bytes(version.replace(b'"folds":', b'"folds":1', 1))
    Path("cut.gz").write_bytes(log[: len(log) // 2])
    capsys.readouterr()
    assert main(["serve", "--state", "new", "--port", "0", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
