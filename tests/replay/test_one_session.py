"""A session from a log or a state folder: its slate is the recorded one, and so is what was learned from it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.recording import ORDERS, Run
from tests.report.shop import run
from tests.serve.folder import FolderTap
from worker.cli.options.source import add_state
from worker.errors import InputError
from worker.logs.findings import Findings
from worker.logs.format import LogWriter, encode_line
from worker.logs.ordered import about, empty_log, read_log
from worker.replay.one_session import ServedSession, find_session
from worker.serve.state import StateView
from worker.stream.explanation import explain
from worker.stream.parameters import Parameters
from worker.stream.topology import Record, Topics

from .logs import Document, change, journal, lines_of, of, payload, version, without, write

SAMPLE = 60


def found(path: Path | str, session: str) -> ServedSession:
    with read_log(path, Findings(), session=session) as log:
        return find_session(log, session, "the log")


def explained(served: ServedSession) -> Any:
    return explain(served.parameters, served.arrival, served=served.planned)


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    return lambda lines, session: found(write(tmp_path / "log", lines), session)


def test_every_explained_slate_is_the_recorded_decision(lines: list[Document], tmp_path: Path) -> None:
    """Sessions of a run with warm-up, random slates, orders, a freeze, rollbacks and odd records."""
    path, modes = write(tmp_path / "log", lines), Counter[str]()
    versions = [payload(line) for line in of(lines, "parameters")]
    first = [payload(line) for line in of(lines, "decisions") if payload(line)["position"] == 1]
    for decision in first[:: len(first) // SAMPLE]:
        served = found(path, decision["session_id"])
        reasons = explained(served)
        assert (served.differences, reasons.slate) == ((), tuple(decision["slate"]))
        assert reasons.modes[0] == decision["mode"]
        modes[decision["mode"]] += 1
        learned = served.learning
        closing = next(one for one in versions if (one["window_end"] or 0) >= learned.window_end)
        frozen = learned.reason is not None and "frozen" in learned.reason
        assert learned.version == (None if frozen else closing["version"])
        answered = [payload(line) for line in of(lines, "clicks") if line["key"] == decision["session_id"]]
        assert bool(served.clicked) == any(one.get("clicked") and one["arm"] in served.slate for one in answered)
        assert learned.displays == (
            0 if frozen else served.clicked or min(len(served.reactions) + 1, len(served.slate))
        )
    assert {"warmup", "random", "explore"} <= modes.keys()


def a_session(lines: list[Document], number: int = 70) -> str:
    return str(journal(lines, "opened")[number]["key"])


def test_a_changed_decision_is_a_difference(lines: list[Document], ask: Any) -> None:
    session = a_session(lines)
    line = next(line for line in of(lines, "decisions") if line["key"] == session)
    change(line, arm="ad-9")
    (difference,) = ask(lines, session).differences
    assert difference.startswith("decision for position 1: arm is ad-9, planned again ad-")


def late(lines: list[Document], session: str) -> None:
    for line in journal(lines, "opened"):
        line["offset"] += 100_000 * (line["key"] == session)


def uncertain(lines: list[Document], session: str) -> None:
    change(next(line for line in journal(lines, "opened") if line["key"] == session), uncertain=True)


def open_still(lines: list[Document], session: str) -> None:
    served = next(payload(line)["parameters_version"] for line in of(lines, "decisions") if line["key"] == session)
    lines[:] = [line for line in lines if line not in of(lines, "parameters") or payload(line)["version"] <= served]


def unrecorded(lines: list[Document], session: str) -> None:
    lines[:] = without(lines, "journal")


def without_room(lines: list[Document], session: str) -> None:
    """Make it one of those that a full table answers and does not remember."""
    line = next(line for line in of(lines, "decisions") if line["key"] == session)
    lines[:] = [one for one in lines if one["key"] != session or one is line or one in of(lines, "arrivals")]
    served = version(lines, payload(line)["parameters_version"])
    ads = sorted((arm for arm in payload(served)["arms"] if arm["active"]), key=lambda arm: -arm["reward"])
    slate = [ads[0]["arm"]] * 4
    change(line, arm=slate[0], slate=slate, mode="fallback", propensity=1.0, value=0.0)


def imported(lines: list[Document], session: str) -> None:
    for line in of(lines, "decisions"):
        if line["key"] == session:
            change(line, mode="imported", propensity=None)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (late, "late: version "),
        (uncertain, "uncertain: "),
        (open_still, "its window is not closed yet"),
        (unrecorded, "its journal is not there"),
        (without_room, "not remembered: there was no room"),
    ],
)
def test_the_reason_why_nothing_was_learned_is_named(lines: list[Document], ask: Any, spoil: Any, reason: str) -> None:
    session = a_session(lines)
    spoil(lines, session)
    served = ask(lines, session)
    assert served.learning.version is None
    assert served.learning.reason.startswith(reason)
    assert served.differences == ()
    assert explained(served).slate == served.slate


def test_sessions_that_wait_for_the_first_fold_are_learned_with_it(ask: Any, tmp_path: Path) -> None:
    run(tmp_path / "shop", hours=6, per_hour=40)
    lines = lines_of(tmp_path / "shop")
    session, number = of(lines, "arrivals")[0]["key"], 2
    while not (first := payload(version(lines, number)))["folds"]:
        number += 1
    assert ask(lines, session).learning.version == first["version"]
    lines[:] = [line for line in lines if line not in of(lines, "parameters") or payload(line)["version"] < number]
    assert ask(lines, session).learning.reason == "it waits for more sessions, by which numbers are standardised"


def test_a_session_that_another_system_served_has_facts_and_no_plan(lines: list[Document], ask: Any) -> None:
    session = a_session(lines)
    imported(lines, session)
    served = ask(lines, session)
    assert (served.planned, served.differences) == (None, ())
    assert len(served.slate) == 4


def test_late_answers_are_counted_apart(lines: list[Document], ask: Any) -> None:
    groups = groupby(sorted(journal(lines, "feedback"), key=lambda line: line["key"]), key=lambda line: line["key"])
    session, facts = next((key, some) for key, some in ((key, list(some)) for key, some in groups) if len(some) == 3)
    before = ask(lines, session).learning
    facts[-1]["offset"] += 100_000
    after = ask(lines, session).learning
    assert (before.late, after.late, before.version) == (0, 1, after.version)


@pytest.mark.parametrize(
    ("session", "names", "message"),
    [
        ("nobody", (), "session nobody is not there"),
        ("user-00070", ("parameters", "parameters-history"), r"has no versions of this release \(topic parameters\)"),
        ("user-00070", ("arrivals", "journal"), "the arrival of session user-00070 is not there"),
        ("user-00070", ("decisions", "journal"), "has an arrival there, but no decision"),
    ],
)
def test_what_cannot_be_explained_is_one_line(lines: list[Document], ask: Any, session, names, message) -> None:
    with pytest.raises(InputError, match=message):
        ask(without(lines, *names), session)


def test_a_version_that_the_log_lacks_is_named(lines: list[Document], ask: Any) -> None:
    session = a_session(lines)
    served = ask(lines, session).parameters.version
    lines = [line for line in lines if line not in of(lines, "parameters") or payload(line)["version"] != served]
    with pytest.raises(InputError, match=f"lacks version {served}, which served session {session}; it has "):
        ask(lines, session)


def test_a_state_folder_says_the_same_as_the_log(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log") as log, FolderTap(tmp_path / "state", log, keep=86_400_000) as tap:
        Run(sessions=120, rate=4, seed=0, oddities=False, tap=tap).go(ORDERS)
    lines = lines_of(tmp_path / "log")
    for line in journal(lines, "opened")[::30]:
        session = line["key"]
        with StateView(tmp_path / "state") as view, empty_log(Topics(), Findings(), session=session) as log:
            add_state(view, Topics(), log)
            ours, theirs = find_session(log, session, "the folder"), found(tmp_path / "log", session)
        assert (ours.slate, ours.planned, ours.differences) == (theirs.slate, theirs.planned, ())
        assert (ours.learning, ours.clicked) == (theirs.learning, theirs.clicked)


@given(session=st.text(min_size=1, max_size=12), ascii_only=st.booleans(), text=st.booleans())
def test_no_line_about_a_session_is_passed_over_however_it_is_escaped(
    session: str, ascii_only: bool, text: bool
) -> None:
    value = json.dumps({"session_id": session}, ensure_ascii=ascii_only)
    try:
        line = encode_line(Record("ads.clicks", 0, 0, 0, None, value.encode()))
    except UnicodeEncodeError:
        return  # half a character
    if text:
        line = json.dumps(json.loads(line), ensure_ascii=ascii_only).encode(errors="replace")
    assert about(session, Topics())(line)


def test_the_parameters_of_other_versions_are_not_decoded(lines: list[Document], ask: Any, monkeypatch: Any) -> None:
    decoded = list[Parameters]()
    from worker.logs import versions

    original = versions.decode_parameters
    monkeypatch.setattr(versions, "decode_parameters", lambda value: decoded.append(original(value)) or decoded[-1])
    served = ask(lines, a_session(lines))
    assert [one.version for one in decoded] == [served.parameters.version]
