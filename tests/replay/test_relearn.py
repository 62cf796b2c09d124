"""Learning again from arrivals and clicks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.errors import InputError
from worker.replay.relearn import relearn
from worker.replay.verify import verify
from worker.replay.versions import LOST
from worker.stream.parameters import decode_parameters
from worker.stream.version_records import encode_parameters

from ..golden.recording import ARMS, SETTINGS, START
from .logs import Document, Recorded, Replay, change, hashes, journal, of, payload, shuffled, without


def test_slates_come_from_decisions_and_are_planned_where_none_is_recorded(plain: Recorded, replayed: Replay) -> None:
    for missing, pinned in (("journal",), 160), (("journal", "decisions"), 0):
        report = replayed(without(plain.lines, *missing), relearn)
        assert (report.slates_recorded, report.slates_planned) == (pinned, 160 - pinned)
        assert report.mismatches == 0
        assert report.versions[-1].sha256 == plain.final.sha256


def test_recorded_slates_count_and_not_those_that_would_be_planned(plain: Recorded, replayed: Replay) -> None:
    """All users were shown other slates than planned, and answered those."""
    lines = plain.copy()
    for line in of(lines, "clicks"):
        change(line, arm="ad-2")
    for line in journal(lines, "opened"):
        change(line, slate=["ad-2"] * 4)
    report = replayed(lines, relearn)
    assert report.stopped_by == "the mismatch"
    assert report.versions[-1].version == plain.final.version
    assert report.clicks == sum(payload(line)["clicked"] for line in of(lines, "clicks"))


def test_arrivals_clicks_and_settings_are_sufficient(plain: Recorded, replayed: Replay) -> None:
    bare = of(plain.lines, "arrivals", "clicks")
    with pytest.raises(InputError, match="needs --dim and --catalog"):
        replayed(bare, relearn)
    with pytest.raises(InputError, match="needs --catalog"):
        replayed(bare, relearn, changes={"dim": 3})
    report = replayed(bare, relearn, changes=SETTINGS, arms=ARMS)
    assert report.versions[-1].sha256 == plain.final.sha256
    again = replayed(shuffled(bare), relearn, changes=SETTINGS, arms=ARMS)
    assert hashes(again) == hashes(report)


def test_learning_under_other_settings_is_not_compared(plain: Recorded, replayed: Replay) -> None:
    report = replayed(plain.lines, relearn, changes={"estimator": "newton"})
    assert report.mismatches == 0
    assert report.versions[-1].version == plain.final.version
    assert report.versions[-1].sha256 != plain.final.sha256
    report = replayed(plain.lines, relearn, changes={"dim": 7})
    assert (report.sessions, len(report.versions)) == (0, 1), "contexts of another dimension are left out"


def test_time_ends_with_the_recorded_progress(plain: Recorded, replayed: Replay) -> None:
    """Without the progress after 47 s, the last of the four windows, due at 48 s, stays open."""
    late = [line for line in journal(plain.lines, "progress") if payload(line)["time"] > START + 47_000]
    report = replayed([line for line in plain.lines if line not in late], relearn)
    assert report.mismatches == 0
    assert [version.version for version in report.versions] == [0, 1, 2, 3]
    assert [version.version for version in replayed(plain.lines, relearn).versions] == [0, 1, 2, 3, 4]


def test_dead_letters_stay_dead(plain: Recorded, replayed: Replay) -> None:
    """A click with a forged token is recognised by its dead letter alone."""
    click = next(line for line in of(plain.lines, "clicks")[200:] if payload(line)["clicked"])
    forged = {**click, "offset": 90_000}
    origin = {"reason": "token", "topic": "ads.clicks", "partition": str(click["partition"]), "offset": "90000"}
    headers = [part for name, value in origin.items() for part in (f"adcascade.{name}", value)]
    letter = {**forged, "topic": "ads.dead-letters", "partition": 0, "headers": headers}
    honest = [line for line in plain.lines if line is not click]
    without_it = replayed(honest, relearn)
    assert hashes(replayed([*honest, forged, letter], relearn)) == hashes(without_it)
    assert hashes(replayed([*honest, forged], relearn)) != hashes(without_it)


def test_learning_continues_from_the_oldest_version_of_the_log(lines, final, replayed) -> None:
    report = replayed(lines[int(len(lines) * 0.3) :], relearn)
    assert report.mismatches == 0
    assert report.versions[0].version > 1
    assert report.versions[-1].sha256 == final.sha256


def test_a_rollback_to_a_version_before_the_log_is_reported(lines: list[Document], replayed: Replay) -> None:
    report = replayed(lines[int(len(lines) * 0.6) :], relearn)
    assert report.mismatches == 0
    assert (report.stopped_after, report.stopped_by) == (8, LOST)


def test_rounding_of_another_machine_is_a_mismatch_unless_tolerated(plain: Recorded, replayed: Replay) -> None:
    """Every version differs in its last digits, and the next one was made from it."""
    lines, parent, field = plain.copy(), "", list(plain.final.model.pack())[1]
    for line in of(lines, "parameters"):
        there = decode_parameters(line["payload"].encode())
        if there.version > 0 and there.parent_sha256:
            arrays = there.model.pack()
            moved = there.model.unpack({**arrays, field: arrays[field] * (1 + 1e-13)})
            there = replace(there, model=moved, parent_sha256=parent)
        line["payload"] = encode_parameters(there).decode()
        parent = there.sha256
    strict = replayed(lines)
    assert (strict.mismatches, strict.stopped_after) == (1, 1)  # version 0 is the same everywhere
    assert f"{field} by up to" in strict.findings.first[0].name
    assert replayed(lines, relearn).findings == strict.findings
    for how in (verify, relearn):
        report = replayed(lines, how, tolerance=1e-9)
        assert (report.mismatches, report.rounded) == (0, len(report.versions) - 1)
