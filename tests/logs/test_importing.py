"""`adcascade import`: tables of small files become exact records, and every bad input is one line."""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
#: s2 clicks at position 2, s1 passes all three, s3 leaves at position 2, s4 at position 1; in no order.
ROWS = """\
s2,1767225700,2,c,1,,desktop
s1,1767225600,1,a,0,31,mobile
s1,1767225610,2,b,0,31,mobile
s3,1767225800,1,a,0,,
s1,1767225620,3,c,0,31,mobile
s3,1767225790,2,b,0,,
s2,1767225690,1,a,0,,desktop
s4,1767225900,1,b,0,44,watch
"""
TABLE = f"{HEADER}\n{ROWS}"

Import = Callable[..., list[Document]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "serve.toml").write_text(CONFIG)
    (tmp_path / "ads.csv").write_text(CATALOG)
    return tmp_path


@pytest.fixture
def usual(folder: Path) -> list[str]:
    return ["--catalog", str(folder / "ads.csv"), "--config", str(folder / "serve.toml")]


@pytest.fixture
def imported(folder: Path, usual: list[str]) -> Import:
    """Import a table, declared and with a catalogue unless other arguments are given; return the log."""

    def run(content: str | bytes, *arguments: str, name: str = "table.csv") -> list[Document]:
        table, log = folder / name, folder / "log.jsonl"
        log.unlink(missing_ok=True)
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert main(["import", str(table), "--output", str(log), *(arguments or usual)]) == 0
        return lines_of(log)

    return run


def records(lines: list[Document], name: str) -> list[Document]:
    return [payload(line) for line in of(lines, name)]


# ── exact records ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_becomes_version_0_arrivals_slates_and_feedback(imported: Import) -> None:
    lines = imported(TABLE)
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
            ("s2", 1767225690000, "ac"),
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


def test_where_only_clicks_are_reported_a_shorter_session_has_passed_everything(imported: Import, usual) -> None:
    feedback = records(imported(TABLE, *usual, "--unanswered", "passed"), "clicks")
    assert [(one["session_id"], one["position"]) for one in feedback] == [("s1", 3), ("s2", 2), ("s3", 2), ("s4", 1)]


def as_objects(change: Callable[[Document], Document] = lambda row: row) -> str:
    rows = [dict(zip(HEADER.split(","), row.split(","), strict=True)) for row in ROWS.splitlines()]
    return "".join(orjson.dumps(change(row)).decode() + "\n" for row in rows)


def nested(row: Document) -> Document:
    user = {"device": row["device"] or None, "age": float(row["age"]) if row["age"] else None}
    display = {"ad": row["ad"], "position": int(row["position"]), "clicked": row["clicked"] == "1"}
    return {"visit": row["visit"], "time": int(row["time"]) * 1000, "user": [user], **display}


def dated(row: Document) -> Document:
    moment = np.datetime64(int(row["time"]), "s").item().isoformat()
    return {**row, "time": f"{moment}Z", "clicked": {"0": "false", "1": "TRUE"}[row["clicked"]]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv.gz", gzip.compress(TABLE.encode())),
        ("t.tsv", "\ufeff" + TABLE.replace(",", "\t").replace("\n", "\r\n")),
        ("t.csv", TABLE.replace(",", ";")),
        ("t.jsonl", as_objects()),
        ("t.json", as_objects(nested)),
        ("t.ndjson", as_objects(dated)),
        ("t.csv", f"{HEADER}\n" + "".join(random.Random(7).sample(ROWS.splitlines(keepends=True), 8))),
    ],
)
def test_any_format_and_any_order_of_rows_give_the_same_log(imported: Import, name: str, content: Any) -> None:
    assert imported(content, name=name) == imported(TABLE)


def test_parquet_is_read_with_pyarrow_and_refused_without_it_in_one_line(imported, folder, monkeypatch, capsys) -> None:
    rows = [nested(orjson.loads(row)) for row in as_objects().splitlines()]
    batch = SimpleNamespace(to_pylist=lambda: rows)
    pyarrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    pyarrow.ArrowException = ValueError  # type: ignore[attr-defined]
    parquet.ParquetFile = lambda path: SimpleNamespace(iter_batches=lambda: [batch])  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", pyarrow)
        patched.setitem(sys.modules, "pyarrow.parquet", parquet)
        assert imported(b"", name="t.parquet") == imported(TABLE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    capsys.readouterr()
    assert main(["import", str(folder / "t.parquet"), "--output", str(folder / "x")]) == 2
    assert "Parquet needs pyarrow: pip install pyarrow" in capsys.readouterr().err


def test_without_positions_the_order_of_time_and_rows_counts(imported: Import) -> None:
    table = "session_id,timestamp,arm,click,x,reward\ns,20,a,0,1,2\ns,30,b,1,1,4\ns,10,c,0,1,\ns,20,d,0,1,\n"
    lines = imported(table, "--context-columns", "x")
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
        "a": [index + 1, 2 - index],
        "c": {"FromUrl": [{"device": "mobile", "age": 31}], "_multi": actions},
        "p": [0.75, 0.25],
        **more,
    }


def test_events_of_personalizer_are_sessions_of_one_display(imported: Import, folder: Path, capsys) -> None:
    events = [event(1, -0.5, 0), event(2, 0, 1), event(3, -1, 1, _skipLearn=True), {"RewardValue": 1, "EventId": "e9"}]
    text = "".join(orjson.dumps(one).decode() + "\n" for one in events)
    lines = imported(text, "--config", str(folder / "serve.toml"), "--format", "dsjson", "--session-column", "EventId")
    assert [one["context"] for one in records(lines, "arrivals")] == [{"age": 31.0, "device": "mobile"}] * 2
    assert [(d["slate"], d["propensity"], d["arrived_at"]) for d in records(lines, "decisions")] == [
        (["shoes"], 0.75, 1612456281246),
        (["hats"], 0.75, 1612456282246),
    ]
    assert [(one["arm"], one["clicked"]) for one in records(lines, "clicks")] == [("shoes", True), ("hats", False)]
    assert {arm["reward"] for arm in records(lines, "parameters")[0]["arms"]} == {0.5}
    (folder / "t.dsjson").write_text('{"c": {"_multi": [{}]}, "a": [1], "_label_cost": 0}')
    assert main(["import", str(folder / "t.dsjson"), "--output", str(folder / "new")]) == 2
    assert "row 1: not an object with the fields needed (no field '_tag')" in capsys.readouterr().err


def test_a_row_of_the_open_bandit_dataset_is_a_session(imported: Import, folder: Path, capsys) -> None:
    table = (
        ",timestamp,item_id,position,click,propensity_score,user_feature_0,user-item_affinity_0\n"
        "0,2019-11-24 00:00:17.004101+00:00,14,3,0,0.029411,1.5,0.0\n"
        "1,2019-11-24 00:00:24.004101+00:00,7,1,1,0.029411,2,1.0\n"
    )
    lines = imported(table, "--format", "obp")
    assert [(d["slate"], d["propensity"]) for d in records(lines, "decisions")] == [
        (["14"], 0.029411),
        (["7"], 0.029411),
    ]
    assert [one["context"] for one in records(lines, "arrivals")] == [[1.5], [2.0]]
    assert [(arm["arm"], arm["reward"]) for arm in records(lines, "parameters")[0]["arms"]] == [("14", 1.0), ("7", 1.0)]
    assert main(["import", str(folder / "table.csv"), "--output", str(folder / "new")]) == 2
    assert "no column 'session': give --session-column" in capsys.readouterr().err


def test_the_settings_of_version_0_fit_the_history(imported: Import, usual: list[str]) -> None:
    rows = [f"s{n},{n * 3600},{at},{'ab'[at % 2]},0,1\n" for n in range(2000) for at in (1, 2, 3)]
    rows.append("long,1,1,a,0,1\nlong,7201,2,b,0,1\n")
    table = "session,time,position,ad,clicked,x\n" + "".join(rows)
    (line,) = of(imported(table, "--context-columns", "x", *usual[:2]), "parameters")
    settings = decode_parameters(line["payload"].encode()).settings
    assert (settings.horizon, settings.repeats, settings.session_timeout) == (3, True, 7_200_000)
    assert settings.window == pytest.approx(500 * 3_600_000, rel=0.01)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────

GOOD = "s1,1767225600,1,a,0,31,mobile\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("visit,tme,ad,clicked,age,device\n", "it has no usable rows"),
        (TABLE.replace("time", "tme"), "no column 'time': give --time-column; did you mean 'tme'?"),
        (TABLE.replace("age", "years"), "no column 'age': give --context-columns age=COLUMN, or age= if the history"),
        (TABLE.replace("visit", "session"), "no column 'visit': give --session-column; the table has age, device"),
        (GOOD + "s1,1767225601,2,x,0,31,mobile", "row 3: ad is not in the catalogue ('x'); add it"),
        (GOOD + "s1,1767225601,3,b,0,31,mobile", "row 3: position before it is missing (position 3 in place of 2)"),
        (GOOD + "s1,1767225601,1,b,0,31,mobile", "row 3: position is there twice (position 1 in place of 2)"),
        (GOOD + "s1,1767225601,0,b,0,31,mobile", "row 3: position is not a whole number from 1 on (0)"),
        ("s,1,1,a,1,9,mobile\ns,2,2,b,1,9,mobile", "row 3: second click of the session in row 2: a session ends with"),
        ("s,1,1,a,1,9,mobile\ns,2,2,b,0,9,mobile", "row 3: display after the click in row 2: a session ends with"),
        (GOOD + "s1,1767225601,2,b,0,32,mobile", "row 3: context differs within the session, from row 2"),
        (GOOD + "s2,1767225601,1,b,0,old,mobile", "row 3: age is not a number ('old')"),
        (GOOD + 's2,1767225601,1,b,0,"3,5",mobile', "row 3: age is not a number ('3,5'); write a decimal point"),
        (GOOD + "s2,1767225601,1,b,0,1e300,mobile", "row 3: a worker would refuse the arrival (norm: a number of"),
        (GOOD + "s2,1767225601,1,b,maybe,3,mobile", "row 3: click is neither 0 nor 1 ('maybe')"),
        (GOOD + "s2,1767225601,1,,0,3,mobile", "row 3: ad is not an id of 1 to 128 printable characters"),
        (GOOD + "s2,yesterday,1,b,0,3,mobile", "row 3: time is neither a number nor ISO 8601 ('yesterday')"),
        (GOOD + "s2,1767225601000,1,b,0,3,mobile", "row 3: time is in another unit than in the first row"),
        (GOOD + "s2,-5,1,b,0,3,mobile", "row 3: time is before 1970"),
        (GOOD + ",1767225601,1,b,0,3,mobile", "row 3: no session"),
        (
            GOOD + "s2,1767225601,1,b,0,3,5,mobile",
            "row 3: another number of cells than the header (8); a decimal comma?",
        ),
        ("s1,1767225600,1,a,0,31,\n", "no row has a value in 'device': give --context-columns device=COLUMN, or"),
        (TABLE.replace("watch", "montré").encode("latin1"), "row 9: not UTF-8; convert the file: iconv -f latin1"),
        (TABLE.encode("utf-16"), "row 1: not UTF-8; convert the file: iconv -f utf-16"),
        (gzip.compress(TABLE.encode())[:-20], "the gzip data breaks off"),
        ('[{"visit": 1}]', "an object per line is needed, not a list: jq -c '.[]'"),
        ('{"visit": "s", "time": 1, "ad": "a", "clicked": 0, "age": 3, "device": "x"}\n{"visit"', "row 2: not JSON"),
    ],
)
def test_a_bad_table_is_one_line_that_says_which_row_and_what_to_do(content, complaint, folder, usual, capsys) -> None:
    if isinstance(content, str) and not content.startswith(("visit", "session", "[", "{", HEADER)):
        content = f"{HEADER}\n{content}"
    table = folder / ("t.jsonl" if content[:1] in ("[", "{") else "t.csv")
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    log = folder / "log.gz"
    assert main(["import", str(table), "--output", str(log), *usual]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), log.exists()) == ("", 1, False)
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--output FILE is missing"),
        (("--output", "{}/ads.csv"), "this file exists"),
        (("--output", "{}/log", "--context-columns", "age"), "no revenue of a click is known: give --catalog FILE or"),
        (("--output", "{}/log", "--catalog", "{}/ads.csv"), "no features: declare [features.context] in the --config"),
        (
            ("--output", "{}/log", "--config", "{}/serve.toml", "--context-columns", "wight=x"),
            "'wight' is not declared",
        ),
        (("--output", "{}/log", "--format", "obp"), "no column 'propensity': give --propensity-column"),
        (("--output", "{}/log", "--propensity-column", "p", "--format", "obp"), "no column 'p'"),
        (("--output", "{}/log", "--context-columns", "age", "--revenue-column", "x"), "no column 'x': give --revenue"),
    ],
)
def test_wrong_options_are_one_line(arguments, complaint, folder, capsys) -> None:
    (folder / "t.csv").write_text(TABLE.replace("visit", "session").replace(",,", ",1,"))
    given = [argument.format(folder) for argument in arguments]
    (folder / "serve.toml").write_text(CONFIG.replace("visit", "session"))
    assert main(["import", str(folder / "t.csv"), *given]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert complaint in err


def test_with_skip_bad_whole_sessions_are_left_out_and_rows_counted_by_reason(imported, folder, usual, capsys) -> None:
    extra = "s5,1767226000,1,a,0,3,\ns5,1767226001,2,x,0,3,\ns6,1,1,y,0,3,\ns7,1767226001,2,a,0,3,\n"
    assert imported(TABLE + extra, *usual, "--skip-bad", "--json", str(folder / "r")) == imported(TABLE)
    report = orjson.loads((folder / "r").read_bytes())
    assert (report["rows"], report["sessions"], report["sessions_left_out"]) == (12, 4, 3)
    assert {reason: bad[:2] for reason, bad in report["bad"].items()} == {
        "ad is not in the catalogue": [2, 11],
        "position before it is missing": [1, 13],
    }
    out = capsys.readouterr().out
    assert "8 displays, 1 clicks, 3 ads, 2026-01-01 00:00:00 to 2026-01-01 00:05:00 UTC\n" in out
    assert "left out: 3 sessions" in out
    assert "2     11  ad is not in the catalogue     ('x'); add it" in out


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


def test_the_model_learned_from_a_history_finds_its_best_ads_and_can_be_written(imported, folder, capsys) -> None:
    imported(history(3000))
    log, model = str(folder / "log.jsonl"), folder / "model.json"
    assert main(["replay", log, "--relearn", "--output", str(model)]) == 0
    report, learned = relearn(log), decode_parameters(model.read_bytes())
    assert (report.sessions, report.slates_recorded, report.slates_planned) == (3000, 3000, 0)
    assert (learned.sha256, learned.folds) == (report.versions[-1].sha256, 7)
    assert learned.sha256 in capsys.readouterr().out
    contexts = learned.prepared(np.array([[25.0, 1.0, 0.0], [25.0, 0.0, 1.0]]))
    best = learned.model.log_odds(contexts).argmax(axis=1)
    assert [learned.arms[arm].arm for arm in best] == ["c", "a"]
    assert learned.answers is not None
    rates = learned.answers.rates().of_slates(np.array([[0, 1, 2]]))
    assert rates[0, :2] == pytest.approx(0.8, abs=0.05)  # a fifth of the users leave after each display


def test_replay_has_nothing_to_verify_and_evaluate_refuses(imported, folder, capsys) -> None:
    imported(TABLE)
    log = str(folder / "log.jsonl")
    assert main(["replay", log]) == 0
    out = capsys.readouterr().out
    assert "nothing to verify: 4 decisions of another system" in out
    assert "4 sessions, 1 clicks, revenue 1.00" in out
    assert main(["evaluate", log]) == 1
    assert "imported, of a policy that is not known" in capsys.readouterr().err
    assert main(["replay", log, "--output", str(folder / "m")]) == 2
    assert "--output is for --relearn" in capsys.readouterr().err
