"""Verification finds every change of a log, and reports the parts of an incomplete log that cannot be checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from worker.errors import InputError
from worker.replay.relearn import relearn
from worker.replay.verify import verify
from worker.replay.versions import LOST
from worker.stream.accounts import ROWS, Sums
from worker.stream.events import Import, Tag
from worker.stream.parameters import decode_parameters
from worker.stream.version_records import encode_parameters

from ..golden.recording import ORDERS, record
from .logs import (
    Document,
    Recorded,
    Replay,
    change,
    decision,
    hashes,
    is_reproduced,
    journal,
    lines_of,
    of,
    payload,
    recorded_hashes,
    served_by,
    version,
    without,
)

# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("arm", "ad-9"),
        ("slate", ["ad-1"]),
        ("mode", "fallback"),
        ("propensity", 0.123),
        ("value", -0.0001),
    ],
)
@pytest.mark.parametrize("position", [1, 2])
def test_a_changed_decision_is_found(lines, replayed, name, value, position) -> None:
    line = decision(lines, position)
    change(line, **{name: value})
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.name, found.session, found.position) == ("decision", name, line["key"], position)
    assert found.line == lines.index(line) + 1
    assert found.found == (tuple(value) if isinstance(value, list) else value)
    assert f"{name}: expected " in str(found)


def test_a_decision_without_feedback_before_it_is_found(lines: list[Document], replayed: Replay) -> None:
    session = decision(lines, 2)["key"]
    feedback = [*of(lines, "clicks"), *journal(lines, "feedback")]
    report = replayed([line for line in lines if line["key"] != session or line not in feedback])
    found = [found for found in report.findings.first if found.kind == "decision"]
    assert {(mismatch.name, mismatch.session) for mismatch in found} == {("feedback", session)}


def orphan(lines: list[Document]) -> None:
    change(decision(lines, 1), session_id="nobody")


def make_unreadable(lines: list[Document]) -> None:
    decision(lines, 1)["payload"] = "gone"


def repeat_a_decision(lines: list[Document]) -> None:
    line = of(lines, "decisions")[300]
    lines.append({**line, "payload": line["payload"] + " "})


def repeat_a_version(lines: list[Document]) -> None:
    line = version(lines, 3)
    other = encode_parameters(replace(decode_parameters(line["payload"].encode()), observations=0)).decode()
    lines.append({**line, "offset": 10_000, "payload": other})


def invent_a_version(lines: list[Document]) -> None:
    line = of(lines, "parameters")[-1]
    newest = decode_parameters(line["payload"].encode())
    invented = replace(newest, version=newest.version + 1, parent_sha256=newest.sha256, journal_offset=1000)
    lines.append({**line, "offset": 10_000, "payload": encode_parameters(invented).decode()})


@pytest.mark.parametrize(
    ("spoil", "kind", "name"),
    [
        (orphan, "decision", "arrival"),
        (make_unreadable, "decision", "record"),
        (repeat_a_decision, "line", "topic, partition and offset"),
        (repeat_a_version, "version", "sha256 of another record of it"),
        (invent_a_version, "version", "version"),
    ],
)
def test_a_wrong_record_is_one_mismatch(lines: list[Document], replayed: Replay, spoil, kind, name) -> None:
    spoil(lines)
    report = replayed(lines)
    assert [(found.kind, found.name) for found in report.findings.first] == [(kind, name)]
    assert report.unverified == 0
    assert report.decisions == len(of(lines, "decisions")) - (spoil is repeat_a_decision)


def test_a_changed_slate_in_the_journal_is_found(lines: list[Document], replayed: Replay) -> None:
    opened = journal(lines, "opened")
    line = opened[len(opened) // 2]
    change(line, slate=["ad-2"] * len(payload(line)["slate"]))
    found = [found for found in replayed(lines).findings.first if found.kind == "opened"]
    assert [(mismatch.name, mismatch.session) for mismatch in found] == [("slate", line["key"])]


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_version_that_was_not_in_force_is_found_and_one_that_served_late_is_not(lines, replayed) -> None:
    """Version 4 takes effect after it has served sessions, or long before: then only its `effective_at` is wrong."""
    line, wrong = version(lines, 4), ("version", "effective_at")
    recorded = payload(line)["effective_at"]
    change(line, effective_at=recorded + 5_000)
    names = {(found.kind, found.name) for found in replayed(lines).findings.first}
    required = {wrong, ("decision", "parameters_version")}
    assert required <= names <= {*required, ("opened", "parameters_version")}
    change(line, effective_at=recorded - 5_000)
    report = replayed(lines)
    assert [(found.kind, found.name) for found in report.findings.first] == [wrong]
    assert report.stale > 0


def test_a_damaged_version_is_found_and_its_decisions_are_unverified(lines: list[Document], replayed: Replay) -> None:
    line = version(lines, 3)
    change(line, observations=1)
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.line) == ("version", lines.index(line) + 1)
    assert "sha256" in found.found
    assert report.unverified == report.unverified_because["version"] == served_by(lines, 3) > 0


def test_a_forged_version_with_a_valid_hash_is_found(lines: list[Document], replayed: Replay) -> None:
    line = version(lines, 3)
    honest = decode_parameters(line["payload"].encode())
    forged = replace(honest, observations=honest.observations + 1)
    line["payload"] = encode_parameters(forged).decode()
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.version, found.expected, found.found) == ("version", 3, honest.sha256, forged.sha256)
    assert "observations" in found.name
    assert hashes(report)[3] == honest.sha256


@pytest.mark.parametrize("number", [1, 3])
def test_figures_of_an_ad_that_are_not_those_of_the_journal_are_one_mismatch(lines, replayed, number) -> None:
    line = version(lines, number)
    honest = decode_parameters(line["payload"].encode())
    ads = honest.accounts.total.of(len(honest.arms)).copy()
    ads[ROWS.index("clicks"), 1] += 1
    sums = Sums(sessions=honest.accounts.total.sessions, ads=ads)
    line["payload"] = encode_parameters(replace(honest, accounts=replace(honest.accounts, total=sums))).decode()
    report = replayed(lines)
    (found,) = report.findings.first
    assert (found.kind, found.version, found.name) == ("version", number, f"clicks of {honest.arms[1].arm} (total)")
    assert found.found == found.expected + 1
    assert hashes(report)[number] == honest.sha256


def test_a_version_that_only_the_history_has_verifies_its_decisions(lines: list[Document], replayed: Replay) -> None:
    kept = version(lines, 3)
    rest = [line for line in lines if line is not kept]
    assert replayed(rest).unverified == served_by(lines, 3) > 0
    topic = "ads.parameters-history"
    slots = [("week/7", kept["payload"]), ("recent/9", "{"), ("weather", kept["payload"])]
    history = [
        {**kept, "topic": topic, "offset": n, "key": key, "payload": value} for n, (key, value) in enumerate(slots)
    ]
    report = replayed([*rest, *history])
    assert (report.unverified, report.mismatches, report.topics["parameters-history"]) == (0, 0, 3)
    forged = encode_parameters(replace(decode_parameters(kept["payload"].encode()), observations=0)).decode()
    assert replayed([*rest, {**history[0], "payload": forged}]).mismatches > 0, "and is verified itself"


def test_a_run_with_imports_and_tags_is_reproduced(lines: list[Document], replayed: Replay, tmp_path: Path) -> None:
    imported = Import(parameters=payload(version(lines, 3)), arms=True)
    orders = ((25_000, imported), (25_000, Tag(name="good", version=1)), (41_000, ORDERS[1][1]), (47_500, imported))
    record(tmp_path / "run", sessions=160, orders=orders, oddities=False)
    for report in is_reproduced(lines_of(tmp_path / "run"), replayed):
        assert len(report.versions) > 5


@pytest.mark.parametrize("how", [verify, relearn])
def test_after_the_first_version_that_differs_no_other_is_compared(plain: Recorded, replayed: Replay, how) -> None:
    lines = plain.copy()
    clicks = [line for line in journal(lines, "feedback") if payload(line)["clicked"]]
    fact = payload(clicks[len(clicks) // 2])
    for line in journal(lines, "feedback") + of(lines, "clicks"):
        if payload(line)["session_id"] == fact["session_id"]:
            change(line, clicked=False)
    report = replayed(lines, how)
    (found,) = [one for one in report.findings.first if one.kind == "version"]
    assert report.stopped_by == "the mismatch"
    assert report.stopped_after == found.version < plain.final.version
    assert [one.version for one in report.versions if one.status == "differs"] == [found.version]


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_journal_of_several_partitions_is_wrong_input(lines: list[Document], replayed: Replay) -> None:
    of(lines, "journal")[0]["partition"] = 1
    with pytest.raises(InputError, match=r"line \d+: ads.journal has one partition"):
        replayed(lines)


# ── incomplete logs ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_journal_is_sufficient_without_arrivals(lines: list[Document], replayed: Replay) -> None:
    report = replayed(without(lines, "arrivals"))
    assert report.mismatches == report.unverified == 0


@pytest.mark.parametrize(
    ("kept", "reason", "position"),
    [
        (("decisions", "parameters"), "arrival", 1),
        (("arrivals", "clicks", "decisions", "journal"), "version", 1),
        (("arrivals", "decisions", "parameters"), "feedback", 2),
    ],
)
def test_decisions_are_unverified_without_their_causes(lines, replayed, kept, reason, position) -> None:
    report = replayed(of(lines, *kept))
    concerned = sum(payload(line)["position"] >= position for line in of(lines, "decisions"))
    assert report.mismatches == 0
    assert report.unverified == report.unverified_because[reason] == concerned > 0
    assert hashes(report) == recorded_hashes(of(lines, *kept))
    assert report.unfolded == max(0, len(report.versions) - 1)  # version 0 needs no journal


def test_decisions_of_a_missing_version_are_unverified(lines, final, replayed) -> None:
    missing = version(lines, 3)
    report = replayed([line for line in lines if line is not missing])
    assert report.mismatches == 0
    assert report.unverified == served_by(lines, 3) > 0
    assert hashes(report) == recorded_hashes(lines)  # the journal gives the version
    assert report.versions[-1].sha256 == final.sha256


def test_at_a_hole_in_the_journal_comparing_ends(lines, replayed) -> None:
    hole = of(lines, "journal")[400:403]
    report = replayed([line for line in lines if line not in hole])
    assert report.mismatches == 0
    assert report.stopped_by == "offsets 400 to 402 missing in the journal"
    assert [version.status for version in report.versions].index("recorded") == report.stopped_after + 1 > 1
    assert report.unverified == 0


@pytest.mark.parametrize(("share", "stopped"), [(0.3, None), (0.6, LOST)])
def test_a_log_may_begin_in_the_middle(lines, final, replayed, share, stopped) -> None:
    """In the second one, a rollback goes to a version from before it."""
    report = replayed(lines[int(len(lines) * share) :])
    assert (report.mismatches, report.stopped_by) == (0, stopped)
    assert report.unverified == report.unverified_because["version"] + report.unverified_because["arrival"]
    assert report.unverified < report.decisions
    assert report.versions[-1].sha256 == final.sha256
    assert [version.status for version in report.versions].count("folded") >= (1 if stopped else 4)
