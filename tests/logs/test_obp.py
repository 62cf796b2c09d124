"""`adcascade export --format obp`: a row per display, with its propensity; and back again by `import`."""

from __future__ import annotations

import csv
from pathlib import Path

from worker.cli.main import main

from ..golden.recording import GOLDEN
from ..replay.logs import Document, journal, lines_of, of, payload, write


def exported(log: str | Path, table: Path) -> list[dict[str, str]]:
    assert main(["export", str(log), "--format", "obp", "--output", str(table)]) == 0
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def first_decisions(lines: list[Document]) -> dict[str, Document]:
    return {one["session_id"]: one for one in map(payload, of(lines, "decisions")) if one["position"] == 1}


def test_every_display_of_a_log_of_ours_is_a_row_with_the_propensity_of_its_decision(tmp_path: Path) -> None:
    decided = {(one["session_id"], one["position"]): one for one in map(payload, of(lines_of(GOLDEN), "decisions"))}
    rows = exported(GOLDEN, tmp_path / "t.csv")
    assert [row[""] for row in rows] == [str(number) for number in range(len(rows))]
    assert {row["session_id"] for row in rows if row["click"] == "1"}
    for row in rows:
        decision = decided[row["session_id"], int(row["position"])]
        assert (decision["arm"], decision["propensity"]) == (row["arm"], float(row["propensity_score"]))
        assert row["item_id"] == row["arm"].removeprefix("ad-")


def test_a_propensity_without_its_decision_follows_from_that_of_position_1(tmp_path: Path) -> None:
    """As of a client that shows the whole slate, and reports once."""
    lines = lines_of(GOLDEN)
    kept = [line for line in lines if line not in of(lines, "decisions") or payload(line)["position"] == 1]
    assert exported(write(tmp_path / "log", kept), tmp_path / "a.csv") == exported(GOLDEN, tmp_path / "b.csv")


def test_what_is_exported_can_be_imported_with_the_same_sessions(tmp_path: Path, capsys) -> None:
    """The time of a click is not in the table, and prices are the last ones."""
    rows = exported(GOLDEN, tmp_path / "t.csv")
    assert "left out: 5 sessions, not over at the end of the log" in capsys.readouterr().out
    log = tmp_path / "log.gz"
    assert main(["import", str(tmp_path / "t.csv"), "--format", "obp", "--output", str(log)]) == 0
    before, after = lines_of(GOLDEN), lines_of(log)
    contexts = {one["session_id"]: one["context"] for one in map(payload, journal(before, "opened"))}
    arrivals = [payload(line) for line in of(after, "arrivals")]
    assert len(arrivals) == len({row["session_id"] for row in rows}) == 295
    assert all(contexts[one["session_id"]] == one["context"] for one in arrivals)
    recorded = first_decisions(before)
    for session, decision in first_decisions(after).items():
        shown = recorded[session]["slate"][: len(decision["slate"])]
        assert (decision["slate"], decision["propensity"]) == (shown, recorded[session]["propensity"])
    display = ("session_id", "timestamp", "arm", "position", "click", "propensity_score", "reward", "user_feature_0")
    assert [[row[name] for name in display] for row in exported(log, tmp_path / "again.csv")] == [
        [row[name] for name in display] for row in rows
    ]


def test_sessions_without_a_propensity_are_left_out_and_counted(tmp_path: Path, capsys) -> None:
    table = "session,time,ad,clicked,propensity,revenue,x\ns,1,a,0,0.5,,1\ns,2,b,1,,1,1\nt,3,a,1,0.5,1,1\n"
    (tmp_path / "t.csv").write_text(table)
    log = str(tmp_path / "log")
    assert main(["import", str(tmp_path / "t.csv"), "--context-columns", "x", "--output", log]) == 0
    assert [row["session_id"] for row in exported(log, tmp_path / "o.csv")] == ["t"]
    assert "left out: 1 sessions, propensity not known" in capsys.readouterr().out
