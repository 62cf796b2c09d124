"""`adcascade import`: tables of small files become exact records, and every bad input is one line."""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from worker.bandit.arrays import sigmoid
from worker.cli.main import main
from worker.replay.relearn import relearn
from worker.stream.parameters import decode_parameters

from ..replay.logs import Document, lines_of, of, payload

CONFIG = """
[features.context]
age = "number"
device = ["mobile", "desktop"]

[import]
session_column = "visit"
"""
CATALOG = "arm,reward\na,1.5\nb,2\nc,1\n"
HEADER = "visit,time,position,ad,clicked,age,device"
#: s2 clicks at position 2 of 3, s1 passes all three, s3 leaves at position 2, s4 at position 1; in no order.
ROWS = """\
s2,1767225700,2,c,1,,desktop
s1,1767225600,1,a,0,31,mobile
s2,1767225701,3,b,0,,desktop
s1,1767225610,2,b,0,31,mobile
s3,1767225800,1,a,0,,
s1,1767225620,3,c,0,31,mobile
s3,1767225790,2,b,0,,
s2,1767225690,1,a,0,,desktop
s4,1767225900,1,b,0,44,watch
"""
TABLE = f"{HEADER}\n{ROWS}"

USUAL = "--catalog ads.csv --config serve.toml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.toml").write_text(CONFIG)
    Path("ads.csv").write_text(CATALOG)


def run(command: str) -> int:
    return main(command.split())


def imported(content: str | bytes, arguments: str = USUAL, name: str = "t.csv") -> list[Document]:
    """Import a table; return the log."""
    log = Path("log.jsonl")
    log.unlink(missing_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(f"import {name} --output {log} {arguments}") == 0
    return lines_of(log)


def records(lines: list[Document], name: str) -> list[Document]:
    return [payload(line) for line in of(lines, name)]


# ── exact records ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_becomes_version_0_arrivals_slates_and_feedback(capsys) -> None:
    lines = imported(TABLE)
    unlisted = "  values of device that are not listed, so they count as missing: watch in 1 sessions\n"
    assert unlisted in capsys.readouterr().out
    assert [(one["session_id"], one["occurred_at"], one["context"]) for one in records(lines, "arrivals")] == [
        ("s1", 1767225600000, {"age": 31.0, "device": "mobile"}),
        ("s2", 1767225690000, {"device": "desktop"}),
        ("s3", 1767225790000, {}),
        ("s4", 1767225900000, {"age": 44.0, "device": "watch"}),
    ]
    decision = {"mode": "imported", "propensity": None, "parameters_version": 0, "value": 0.0, "position": 1}
    assert records(lines, "decisions") == [
        {**decision, "session_id": session, "arrived_at": at, "arm": slate[0], "slate": list(slate)}
        for session, at, slate in (
            ("s1", 1767225600000, "abc"),
            ("s2", 1767225690000, "acb"),
            ("s3", 1767225790000, "ab"),
            ("s4", 1767225900000, "b"),
        )
    ]
    # s3 and s4 are shorter than s1: their users left at the last display, which says nothing of it but "no click".
    assert [tuple(one.values()) for one in records(lines, "clicks")] == [
        ("s1", 1767225620000, 3, "c", False),
        ("s2", 1767225700000, 2, "c", True),
        ("s3", 1767225800000, 1, "a", False),
    ]
    (version,) = records(lines, "parameters")
    assert [(arm["arm"], arm["reward"]) for arm in version["arms"]] == [("a", 1.5), ("b", 2.0), ("c", 1.0)]
    assert [feature["name"] for feature in version["features"]["context"]] == ["age", "device"]


def test_where_only_clicks_are_reported_a_shorter_session_has_passed_everything() -> None:
    feedback = records(imported(TABLE, f"{USUAL} --unanswered passed"), "clicks")
    assert [(one["session_id"], one["position"]) for one in feedback] == [("s1", 3), ("s2", 2), ("s3", 2), ("s4", 1)]


def as_objects(change: Callable[[Document], Document] = lambda row: row) -> str:
    rows = [dict(zip(HEADER.split(","), row.split(","), strict=True)) for row in ROWS.splitlines()]
    return "".join(orjson.dumps(change(row)).decode() + "\n" for row in rows)


def nested(row: Document) -> Document:
    user = {"device": row["device"] or None, "age": float(row["age"]) if row["age"] else None}
    display = {"ad": row["ad"], "position": int(row["position"]), "clicked": row["clicked"] == "1"}
    return {"visit": row["visit"], "time": int(row["time"]) * 1000, "user": [user], **display}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv.gz", gzip.compress(TABLE.encode())),
        ("t.tsv", "\ufeff" + TABLE.replace(",", "\t").replace("\n", "\r\n")),
        ("t.csv", TABLE.replace(",", ";")),
        ("t.jsonl", as_objects()),
        ("t.json", as_objects(nested)),
        ("t.csv", f"{HEADER}\n" + "".join(random.Random(7).sample(ROWS.splitlines(keepends=True), 9))),
    ],
)
def test_any_format_and_any_order_of_rows_give_the_same_log(name: str, content: Any) -> None:
    assert imported(content, name=name) == imported(TABLE)


def test_parquet_is_read_with_pyarrow_and_refused_without_it_in_one_line(monkeypatch, capsys) -> None:
    rows = [nested(orjson.loads(row)) for row in as_objects().splitlines()]
    batch = SimpleNamespace(to_pylist=lambda: [{**row, "visit": row["visit"].encode()} for row in rows])
    reader = SimpleNamespace(ParquetFile=lambda path: SimpleNamespace(iter_batches=lambda: [batch]))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(ArrowException=ValueError))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", reader)
    assert imported(b"", name="t.parquet") == imported(TABLE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run("import t.parquet --output new") == 2
    assert "Parquet needs pyarrow: pip install pyarrow" in capsys.readouterr().err


def test_without_positions_the_order_of_time_and_rows_counts() -> None:
    table = "session_id,timestamp,arm,click,x,reward\ns,20,a,0,1,2\ns,30,b,1,1,4\ns,10,c,0,1,\ns,20,d,0,1,\n"
    lines = imported(table, "--context-columns x")
    (decision,), (version,) = records(lines, "decisions"), records(lines, "parameters")
    assert decision["slate"] == ["c", "a", "d", "b"]
    # The mean revenue of clicks, else of displays; that of the others where none is known.
    assert {arm["arm"]: arm["reward"] for arm in version["arms"]} == {"a": 2.0, "b": 4.0, "c": 3.0, "d": 3.0}


def event(number: int, cost: float, index: int, **more: Any) -> Document:
    actions = [{"_tag": "shoes"}, {"i": {"constant": 1, "id": "hats"}, "j": [{"type": "felt"}]}]
    return {
        "_label_cost": cost,
        "_label_probability": 0.75,
        "_labelIndex": index,
        "Timestamp": f"2021-02-04T16:31:2{number}.2460000Z",
        "EventId": f"e{number}",
        "c": {"FromUrl": [{"device": "mobile", "age": 31}], "_multi": actions},
        **more,
    }


def test_events_of_personalizer_are_sessions_of_one_display(capsys) -> None:
    events = [event(1, -0.5, 0), event(2, 0, 1), event(3, -1, 1, _skipLearn=True), {"RewardValue": 1, "EventId": "e9"}]
    text = "".join(orjson.dumps(one).decode() + "\n" for one in events)
    lines = imported(text, "--config serve.toml --format dsjson --session-column session")
    assert [one["context"] for one in records(lines, "arrivals")] == [{"age": 31.0, "device": "mobile"}] * 2
    assert [(d["slate"], d["propensity"], d["arrived_at"]) for d in records(lines, "decisions")] == [
        (["shoes"], 0.75, 1612456281246),
        (["hats"], 0.75, 1612456282246),
    ]
    assert [(one["arm"], one["clicked"]) for one in records(lines, "clicks")] == [("shoes", True), ("hats", False)]
    assert {arm["reward"] for arm in records(lines, "parameters")[0]["arms"]} == {0.5}
    Path("t.dsjson").write_text('{"c": {"_multi": [{}]}, "_label_cost": 0}')
    assert run("import t.dsjson --output new") == 2
    assert "row 1: not a JSON object with the fields needed ('_labelIndex')" in capsys.readouterr().err


def test_a_row_of_the_open_bandit_dataset_is_a_session(capsys) -> None:
    table = (
        ",timestamp,item_id,position,click,propensity_score,user_feature_0,user-item_affinity_0\n"
        "0,2019-11-24 00:00:17.004101+00:00,14,3,0,0.029,1.5,0.0\n"
        "1,2019-11-24 00:00:24.004101+00:00,7,1,1,0.029,2,1.0\n"
    )
    lines = imported(table, "--format obp")
    assert [(d["slate"], d["propensity"]) for d in records(lines, "decisions")] == [(["14"], 0.029), (["7"], 0.029)]
    assert [one["context"] for one in records(lines, "arrivals")] == [[1.5], [2.0]]
    assert [(arm["arm"], arm["reward"]) for arm in records(lines, "parameters")[0]["arms"]] == [("14", 1.0), ("7", 1.0)]
    assert run("import t.csv --output new") == 2
    assert "no session in session or session_id: give --session-column" in capsys.readouterr().err


def test_the_settings_of_version_0_fit_the_history() -> None:
    rows = [f"s{n},{n * 3600},{at},{'ab'[at % 2]},0,1\n" for n in range(2000) for at in (1, 2, 3)]
    rows.append("long,1,1,a,0,1\nlong,7201,2,b,0,1\n")
    table = "session,time,position,ad,clicked,x\n" + "".join(rows)
    (line,) = of(imported(table, "--context-columns x --catalog ads.csv"), "parameters")
    settings = decode_parameters(line["payload"].encode()).settings
    assert (settings.horizon, settings.repeats, settings.session_timeout) == (3, True, 7_200_000)
    assert settings.window == pytest.approx(500 * 3_600_000, rel=0.01)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────

GOOD = f"{HEADER}\ns1,1767225600,1,a,0,31,mobile\n"
CLICKED = GOOD.replace(",a,0,", ",a,1,")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (HEADER, "it has no usable rows"),
        (TABLE.replace("time", "tme"), "row 2: no time in time or timestamp or occurred_at: give --time-column; the"),
        (TABLE.replace("age", "years"), "no column 'age': give --context-columns age=COLUMN, or age= if the history"),
        (GOOD + "s1,1767225601,2,x,0,31,mobile", "row 3: ad is not in the catalogue ('x'): add it"),
        (GOOD + "s1,1767225601,3,b,0,31,mobile", "row 3: position is not the next of its session (3, not 2)"),
        (GOOD + "s1,1767225601,,b,0,31,mobile", "row 3: position is not the next of its session (none, not 1)"),
        (GOOD + "s1,1767225601,0,b,0,31,mobile", "row 3: position is not a whole number from 1 on (0)"),
        (CLICKED + "s1,1767225601,2,b,1,9,mobile", "row 3: second click of the session, after row 2: keep the first"),
        (GOOD + 's2,1767225601,1,b,0,"3,5",mobile', "row 3: age is not a number ('3,5'); write a decimal point"),
        (GOOD + "s2,1767225601,1,b,0,1e300,mobile", "row 3: a worker would refuse the arrival (norm: a number of"),
        (GOOD + "s2,1767225601,1,b,2,3,mobile", "row 3: click is neither 0 nor 1 (2.0)"),
        (f"{HEADER},propensity\ns1,1,1,a,0,3,,1.5\n", "row 2: propensity is not above 0 and at most 1 (1.5)"),
        (GOOD + "s2,1767225601,1,a\x07,0,3,mobile", "row 3: ad is not an id of 1 to"),
        (GOOD + "s2,1767225601,1,,0,3,mobile", "row 3: no ad (--skip-bad leaves"),
        (GOOD + "s2,yesterday,1,b,0,3,mobile", "row 3: time is neither a number nor ISO 8601 ('yesterday')"),
        (GOOD + "s2,-5,1,b,0,3,mobile", "row 3: time is before 1970"),
        (GOOD + "s2,1767225601,1,b,0,3,5,mobile", "row 3: another number of cells than the header (8); a decimal"),
        (GOOD + 's2,1767225601,1,b,0,3,"mobile', "row 3: not CSV: unexpected end of data"),
        (TABLE.replace("watch", "montré").encode("latin1"), "row 10: not UTF-8; convert the file: iconv -f latin1"),
        ('[{"visit": 1}]', "row 1: not a JSON object with the fields needed ("),
    ],
)
def test_a_bad_table_is_one_line_that_says_which_row_and_what_to_do(content, complaint, capsys) -> None:
    name = "t.jsonl" if content[:1] == "[" else "t.csv"
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(f"import {name} --output log.gz {USUAL}") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), Path("log.gz").exists()) == ("", 1, False)
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "--output FILE is missing"),
        ("--output ads.csv", "this file exists"),
        ("--output log --context-columns age", "no revenue of a click is known: give --catalog FILE or"),
        ("--output log --catalog ads.csv", "no number is named for the context: declare features in [feat"),
        ("--output log --context-columns agee,age", "no number in agee for the context: declare"),
        ("--output log --context-columns device", "device is not a number ('desktop'); declare it in [features"),
        ("--output log --config serve.toml --context-columns wight=x", "'wight' is not declared; declared"),
        ("--output log --format obp", "no column 'propensity_score', which obp's tables have"),
        ("--output log --context-columns age --revenue-column x", "no column 'x': give --revenue-column"),
    ],
)
def test_wrong_options_are_one_line(arguments, complaint, capsys) -> None:
    Path("t.csv").write_text(TABLE.replace("visit", "session").replace(",,", ",1,"))
    Path("serve.toml").write_text(CONFIG.replace("visit", "session"))
    assert run(f"import t.csv {arguments}") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert complaint in err


def test_a_file_whose_name_says_no_format_needs_one(capsys) -> None:
    Path("history").write_text(TABLE)
    assert run(f"import history --output log {USUAL}") == 2
    assert (
        "history: the name does not say the format: give --format csv|jsonl|parquet|dsjson|obp"
        in capsys.readouterr().err
    )
    assert run(f"import history --format csv --output log {USUAL}") == 0


def test_with_skip_bad_whole_sessions_are_left_out_and_rows_counted_by_reason(capsys) -> None:
    extra = "s5,1767226000,1,a,0,3,\ns5,1767226001,2,x,0,3,\ns6,1,1,y,0,3,\ns7,1767226001,2,a,0,3,\n"
    assert imported(TABLE + extra, f"{USUAL} --skip-bad --json r") == imported(TABLE)
    report = orjson.loads(Path("r").read_bytes())
    assert (report["rows"], report["sessions"], report["sessions_left_out"]) == (13, 4, 3)
    assert {reason: (bad["rows"], bad["example"]) for reason, bad in report["bad"].items()} == {
        "ad is not in the catalogue": (2, 12),
        "position is not the next of its session": (1, 14),
    }
    out = capsys.readouterr().out
    assert "9 displays, 1 clicks, 3 ads, 2026-01-01 00:00:00 to 2026-01-01 00:05:00 UTC\n" in out
    assert "left out: 3 sessions" in out
    assert "2       12  ad is not in the catalogue ('x'): add it" in out


# ── learning from it ─────────────────────────────────────────────────────────────────────────────────────────────────


def history(sessions: int) -> str:
    """Return a history of one fixed order, in which the last ad is the best for mobile users, the first for others."""
    rng = np.random.default_rng(5)
    odds = {"a": -1.5, "b": -2.5, "c": -1.5}
    rows = [HEADER]
    for number in range(sessions):
        mobile = rng.random() < 0.5
        for position, ad in enumerate("abc", start=1):
            taste = {"a": -1.0, "b": 0.0, "c": 1.0}[ad] * (1 if mobile else -1)
            clicked = rng.random() < sigmoid(np.array(odds[ad] + taste))
            device = "mobile" if mobile else "desktop"
            rows.append(f"s{number},{1767225600 + number * 30},{position},{ad},{int(clicked)},{number % 50},{device}")
            if clicked or rng.random() < 0.2:
                break
    return "\n".join(rows)


def test_the_model_learned_from_a_history_finds_its_best_ads_and_can_be_written(capsys) -> None:
    imported(history(3000))
    assert run("replay log.jsonl --relearn --output model.json") == 0
    report, learned = relearn("log.jsonl"), decode_parameters(Path("model.json").read_bytes())
    assert (report.sessions, report.slates_recorded, report.slates_planned) == (3000, 3000, 0)
    assert (learned.sha256, learned.folds) == (report.versions[-1].sha256, 7)
    assert learned.sha256 in capsys.readouterr().out
    again = relearn("log.jsonl", changes={"beta": 1.0}).learned
    assert learned.imported is (again is not None and again.imported) is True
    contexts = learned.prepared(np.array([[25.0, 1.0, 0.0], [25.0, 0.0, 1.0]]))
    best = learned.model.log_odds(contexts).argmax(axis=1)
    assert [learned.arms[arm].arm for arm in best] == ["c", "a"]
    assert learned.answers is not None
    rates = learned.answers.rates().of_slates(np.array([[0, 1, 2]]))
    assert rates[0, :2] == pytest.approx(0.8, abs=0.05)  # a fifth of the users leave after each display


def test_replay_has_nothing_to_verify_and_evaluate_no_estimates(capsys) -> None:
    imported(TABLE)
    assert run("replay log.jsonl") == 0
    out = capsys.readouterr().out
    assert "nothing to verify: 4 decisions of another system" in out
    assert "4 sessions, 1 clicks, revenue 1.00" in out
    assert run("evaluate log.jsonl") == 2
    assert "an imported log has no estimates for the policy aucbbp" in capsys.readouterr().err
    assert run("replay log.jsonl --output m") == 2
    assert "--output is for --relearn" in capsys.readouterr().err
