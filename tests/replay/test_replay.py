"""A recorded run comes out again, in any order and however often its lines are repeated; what was changed is found."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.errors import InputError
from worker.logs.format import LogReader, encode_line
from worker.logs.sorting import Sorter
from worker.replay.relearn import relearn
from worker.replay.report import ReplayReport
from worker.replay.verify import verify
from worker.replay.versions import difference
from worker.stream.parameters import Parameters, decode_parameters, encode_parameters
from worker.stream.topology import Record, Topics

from ..golden.recording import ARMS, FACTS, GOLDEN, SETTINGS, START, Run, fingerprint, record

Document = dict[str, Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Document], Parameters]:
    """The lines of a run, and the version that it ended with."""
    path = tmp_path_factory.mktemp("recorded") / "log.gz"
    runner = record(path, sessions=240)
    return lines_of(path), runner.versions.newest


@pytest.fixture
def lines(recorded: tuple[list[Document], Parameters]) -> list[Document]:
    """The lines of a run, to be changed."""
    return orjson.loads(orjson.dumps(recorded[0]))


@pytest.fixture(scope="module")
def final(recorded: tuple[list[Document], Parameters]) -> Parameters:
    """The version that the run ended with."""
    return recorded[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Document], Parameters]:
    """A run without orders and oddities: all there is to it is in its arrivals and clicks."""
    path = tmp_path_factory.mktemp("plain") / "log"
    runner = record(path, sessions=160, orders=(), oddities=False)
    return lines_of(path), runner.versions.newest


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., ReplayReport]:
    """Replay lines, by default to verify them."""

    def replay(lines: Iterable[Document], how: Callable[..., ReplayReport] = verify, **options: Any) -> ReplayReport:
        (tmp_path / "log").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        return how(str(tmp_path / "log"), **options)

    return replay


def lines_of(path: Path) -> list[Document]:
    with LogReader(path) as log:
        return [orjson.loads(encode_line(line.record, line.headers)) for line in log]


def of(lines: Iterable[Document], *names: str) -> list[Document]:
    return [line for line in lines if line["topic"].removeprefix("ads.") in names]


def without(lines: Iterable[Document], *names: str) -> list[Document]:
    return [line for line in lines if line["topic"].removeprefix("ads.") not in names]


def payload(line: Document) -> Document:
    document: Document = orjson.loads(line["payload"])
    return document


def change(line: Document, **fields: Any) -> None:
    line["payload"] = orjson.dumps({**payload(line), **fields}).decode()


def decision(lines: Iterable[Document], position: int, *, version: int | None = None) -> Document:
    """Return a decision for a position, not at the edge of the log."""
    found = [
        line
        for line in of(lines, "decisions")
        if payload(line)["position"] == position and version in (None, payload(line)["parameters_version"])
    ]
    return found[len(found) // 2]


def mingled(lines: Sequence[Document], seed: int) -> list[Document]:
    """Shuffle lines within one second of event time, and repeat a third of them."""
    generator = np.random.default_rng(seed)
    doubled = [*lines, *(line for line in lines if generator.random() < 1 / 3)]
    keys = [line["ts"] + generator.uniform(0, 1000) for line in doubled]
    return [doubled[index] for index in np.argsort(keys)]


def hashes(report: ReplayReport) -> dict[int, str]:
    return {version.version: version.sha256 for version in report.versions}


def recorded_hashes(lines: Iterable[Document]) -> dict[int, str]:
    return {payload(line)["version"]: payload(line)["sha256"] for line in of(lines, "parameters")}


# ── it comes out again ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [verify, relearn])
def test_a_recorded_run_comes_out_again(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport], how: Callable[..., ReplayReport]
) -> None:
    report = replayed(lines, how)
    assert report.mismatches == report.unverified == report.unfolded == report.stale == report.duplicates == 0
    assert report.events == len(lines)
    assert report.decisions == len(of(lines, "decisions")) > 500
    assert hashes(report) == recorded_hashes(lines)
    assert report.versions[-1].sha256 == final.sha256
    assert final.version > 8


@pytest.mark.parametrize("how", [verify, relearn])
@pytest.mark.parametrize("seed", range(3))
def test_order_and_repetition_change_nothing(
    lines: list[Document], replayed: Callable[..., ReplayReport], how: Callable[..., ReplayReport], seed: int
) -> None:
    before = replayed(lines, how).as_json()
    after = replayed(mingled(lines, seed), how).as_json()
    assert after.pop("duplicates") == after.pop("lines") - before.pop("lines") > 0
    before.pop("duplicates")
    assert after == before
    assert after["mismatches"] == 0


@pytest.mark.parametrize("how", [verify, relearn])
def test_topics_may_come_one_after_the_other(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport], how: Callable[..., ReplayReport]
) -> None:
    report = replayed(sorted(lines, key=lambda line: (line["topic"], -line["partition"], -line["offset"])), how)
    assert report.mismatches == report.unverified == 0
    assert report.versions[-1].sha256 == final.sha256


@pytest.mark.parametrize("how", [verify, relearn])
def test_what_does_not_fit_into_memory_is_sorted_on_disk(
    lines: list[Document], replayed: Callable[..., ReplayReport], how: Callable[..., ReplayReport]
) -> None:
    assert replayed(lines, how, memory=50_000).as_json() == replayed(lines, how).as_json()


def test_payloads_may_be_objects_and_kcat_adds_fields(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport]
) -> None:
    for line in lines:
        line["broker"] = 1
        if line.get("payload") and line["topic"] != "ads.dead-letters":
            line["payload"] = payload(line)
    report = replayed(lines)
    assert report.mismatches == report.unverified == 0
    assert report.versions[-1].sha256 == final.sha256


def test_a_prefix_tells_the_topics_from_others(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    for line in lines:
        line["topic"] = line["topic"].replace("ads.", "shop.eu.")
    other = {**lines[0], "topic": "ads.arrivals"}
    report = replayed([*lines, other], topics=Topics("shop.eu"))
    assert (report.mismatches, report.ignored, report.events) == (0, 1, len(lines))
    with pytest.raises(InputError, match=r"--prefix shop\.eu"):
        replayed(lines)


def test_a_log_without_records_is_wrong_input(replayed: Callable[..., ReplayReport]) -> None:
    with pytest.raises(InputError, match="no record"):
        replayed([])


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "aucbbp", "horizon_episodes": 10},
        {"policy": "epsilon-greedy"},
        {"repeats": False},
        {"beta": "theory"},
        {"unanswered": "passed", "forgetting": 0.9},
    ],
    ids=str,
)
def test_other_settings_come_out_again_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    runner = record(tmp_path / "log", sessions=160, settings=settings)
    for how in (verify, relearn):
        report = how(str(tmp_path / "log"))
        assert report.mismatches == report.unverified == report.unfolded == 0
        assert report.versions[-1].sha256 == runner.versions.newest.sha256


def test_sessions_clicks_and_revenue_are_those_of_the_run(tmp_path: Path) -> None:
    runner = record(tmp_path / "log", sessions=100)
    for how in (verify, relearn):
        report = how(str(tmp_path / "log"))
        assert report.sessions == runner.tally.opened == 100
        assert report.clicks == runner.tally.clicks.total() > 0
        assert report.revenue == pytest.approx(runner.tally.reward)
        assert report.decisions == runner.tally.decisions.total()


# ── what was changed is found ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("arm", "ad-9"),
        ("arm", None),
        ("slate", ["ad-1"]),
        ("mode", "fallback"),
        ("propensity", 0.123),
        ("value", 7.0),
        ("value", -0.0001),
    ],
)
@pytest.mark.parametrize("position", [1, 2])
def test_a_changed_decision_is_found(
    lines: list[Document], replayed: Callable[..., ReplayReport], name: str, value: Any, position: int
) -> None:
    line = decision(lines, position)
    change(line, **{name: value})
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.name, found.session, found.position) == ("decision", name, line["key"], position)
    assert found.line == lines.index(line) + 1
    assert found.found == (tuple(value) if isinstance(value, list) else value)
    assert f"{name}: expected " in str(found)


def test_a_position_before_which_nothing_was_passed_over_is_found(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    session = decision(lines, 2)["key"]
    kept = [
        line
        for line in lines
        if not (
            line["key"] == session
            and (line["topic"] == "ads.clicks" or (line["topic"] == "ads.journal" and "feedback" in line["payload"]))
        )
    ]
    report = replayed(kept)
    assert {found.name for found in report.findings.first if found.kind == "decision"} == {"feedback"}
    assert {found.session for found in report.findings.first if found.kind == "decision"} == {session}


def test_a_decision_without_an_arrival_is_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    line = decision(lines, 1)
    change(line, session_id="nobody")
    report = replayed(lines)
    assert [found.name for found in report.findings.first] == ["arrival"]
    assert report.unverified == 0


def test_a_decision_that_is_none_is_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    one, other = decision(lines, 1), decision(lines, 2)
    one["payload"] = "gone"
    change(other, propensity="high")
    report = replayed(lines)
    assert [found.name for found in report.findings.first] == ["record", "record"]
    assert report.decisions == len(of(lines, "decisions"))


def test_a_version_that_was_not_in_force_is_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    """Version 4 is said to take effect only after sessions were served by it."""
    line = next(line for line in of(lines, "parameters") if payload(line)["version"] == 4)
    change(line, effective_at=payload(line)["effective_at"] + 5_000)
    report = replayed(lines)
    names = {(found.kind, found.name) for found in report.findings.first}
    assert ("version", "effective_at") in names
    assert ("decision", "parameters_version") in names
    assert names <= {("version", "effective_at"), ("decision", "parameters_version"), ("opened", "parameters_version")}


def test_a_version_that_came_late_is_no_mismatch(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    """Version 4 is said to have been in force earlier: then it served late, and only that it says so is wrong."""
    line = next(line for line in of(lines, "parameters") if payload(line)["version"] == 4)
    change(line, effective_at=payload(line)["effective_at"] - 5_000)
    report = replayed(lines)
    assert [(found.kind, found.name) for found in report.findings.first] == [("version", "effective_at")]
    assert report.stale > 0


def test_a_damaged_version_is_found_and_what_it_served_is_unverified(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    line = next(line for line in of(lines, "parameters") if payload(line)["version"] == 3)
    change(line, observations=1)
    served = sum(payload(other)["parameters_version"] == 3 for other in of(lines, "decisions"))
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.version, found.line) == ("version", 3, lines.index(line) + 1)
    assert "sha256" in found.found
    assert report.unverified == report.unverified_because["version"] == served > 0


def test_a_forged_version_is_found_even_if_its_hash_fits(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    line = next(line for line in of(lines, "parameters") if payload(line)["version"] == 3)
    honest = decode_parameters(line["payload"].encode())
    forged = replace(honest, observations=honest.observations + 1)
    line["payload"] = encode_parameters(forged).decode()
    report = replayed(lines)
    (found,) = report.findings.first
    assert report.mismatches == 1
    assert (found.kind, found.version, found.expected, found.found) == ("version", 3, honest.sha256, forged.sha256)
    assert "observations" in found.name
    assert hashes(report)[3] == honest.sha256


def test_two_contents_of_one_version_are_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    line = next(line for line in of(lines, "parameters") if payload(line)["version"] == 3)
    honest = decode_parameters(line["payload"].encode())
    other = encode_parameters(replace(honest, observations=0)).decode()
    report = replayed([*lines, {**line, "offset": 10_000, "payload": other}])
    assert [(found.kind, found.version) for found in report.findings.first] == [("version", 3)]


def test_a_version_out_of_nowhere_is_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    line = of(lines, "parameters")[-1]
    newest = decode_parameters(line["payload"].encode())
    invented = replace(newest, version=newest.version + 1, parent_sha256=newest.sha256, journal_offset=1000)
    report = replayed([*lines, {**line, "offset": 10_000, "payload": encode_parameters(invented).decode()}])
    assert [(found.kind, found.name, found.version) for found in report.findings.first] == [
        ("version", "version", invented.version)
    ]


def test_a_version_that_is_missing_leaves_its_decisions_unverified(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport]
) -> None:
    kept = [line for line in lines if line["topic"] != "ads.parameters" or payload(line)["version"] != 3]
    served = sum(payload(line)["parameters_version"] == 3 for line in of(lines, "decisions"))
    report = replayed(kept)
    assert report.mismatches == 0
    assert report.unverified == served > 0
    assert hashes(report) == recorded_hashes(lines)  # the journal makes it again
    assert report.versions[-1].sha256 == final.sha256


def test_a_changed_fact_spoils_one_version_only(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    """The next version was made from the recorded one, so checking goes on from there."""
    lines = orjson.loads(orjson.dumps(plain[0]))
    facts = [line for line in of(lines, "journal") if payload(line)["kind"] == "feedback" and payload(line)["clicked"]]
    change(facts[len(facts) // 2], clicked=False)
    report = replayed(lines)
    assert report.mismatches == 1
    assert report.findings.first[0].kind == "version"
    assert [version.status for version in report.versions].count("differs") == 1


def test_a_changed_slate_in_the_journal_is_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    opened = [line for line in of(lines, "journal") if payload(line)["kind"] == "opened"]
    line = opened[len(opened) // 2]
    change(line, slate=["ad-2"] * len(payload(line)["slate"]))
    report = replayed(lines)
    found = [found for found in report.findings.first if found.kind == "opened"]
    assert [(mismatch.name, mismatch.session) for mismatch in found] == [("slate", line["key"])]


def test_two_records_at_one_place_are_found(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    for topic in ("decisions", "journal"):
        line = of(lines, topic)[300]
        twin = {**line, "payload": line["payload"] + " "}
        report = replayed([*lines, twin])
        assert [(found.kind, found.line) for found in report.findings.first] == [("line", len(lines) + 1)]


def test_a_journal_of_several_partitions_is_wrong_input(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    of(lines, "journal")[0]["partition"] = 1
    with pytest.raises(InputError, match=r"line \d+: ads.journal has one partition"):
        replayed(lines)


# ── logs that are not whole ──────────────────────────────────────────────────────────────────────────────────────────


def test_arrivals_may_be_missing_if_the_journal_has_them(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(without(lines, "arrivals"))
    assert report.mismatches == report.unverified == 0


def test_decisions_cannot_be_judged_without_arrivals_and_journal(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(of(lines, "decisions", "parameters"))
    assert report.mismatches == 0
    assert report.unverified == report.unverified_because["arrival"] == report.decisions > 0
    assert report.unfolded == len(report.versions) - 1  # version 0 needs no journal


def test_decisions_cannot_be_judged_without_versions(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(without(lines, "parameters"))
    assert report.mismatches == 0
    assert report.unverified == report.decisions > 0
    assert report.versions == []


def test_without_any_feedback_later_positions_are_unverified(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(of(lines, "arrivals", "decisions", "parameters"))
    later = sum(payload(line)["position"] > 1 for line in of(lines, "decisions"))
    assert report.mismatches == 0
    assert report.unverified == report.unverified_because["feedback"] == later > 0


def test_a_hole_in_the_journal_is_told_and_checking_goes_on_behind_it(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport]
) -> None:
    hole = of(lines, "journal")[400:403]
    report = replayed([line for line in lines if line not in hole])
    assert report.mismatches == 0
    assert report.holes == [(400, 402)]
    assert 0 < report.unfolded < len(report.versions) - 2
    assert report.versions[-1] == replace(report.versions[-1], status="folded", sha256=final.sha256)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_log_may_begin_in_the_middle(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport], share: float
) -> None:
    report = replayed(lines[int(len(lines) * share) :])
    assert report.mismatches == 0
    assert report.unverified == report.unverified_because["version"] + report.unverified_because["arrival"]
    assert report.unverified < report.decisions
    assert report.versions[-1].sha256 == final.sha256
    assert [version.status for version in report.versions].count("folded") >= 2


def test_learning_again_goes_on_from_the_oldest_version_of_the_log(
    lines: list[Document], final: Parameters, replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(lines[int(len(lines) * 0.3) :], relearn)
    assert report.mismatches == 0
    assert report.versions[0].version > 1
    assert report.versions[-1].sha256 == final.sha256


def test_a_rollback_to_a_version_before_the_log_cannot_be_followed_and_is_told(
    lines: list[Document], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(lines[int(len(lines) * 0.6) :], relearn)
    assert report.mismatches == 0
    assert report.lost == 8


def test_a_log_may_end_anywhere(lines: list[Document], replayed: Callable[..., ReplayReport]) -> None:
    for share in (0.1, 0.5, 0.9):
        kept = lines[: int(len(lines) * share)]
        for how in (verify, relearn):
            report = replayed(kept, how)
            assert report.mismatches == report.unverified == 0
            assert hashes(report) == recorded_hashes(kept)


def test_bad_lines_stop_or_are_skipped(tmp_path: Path, lines: list[Document]) -> None:
    written = [orjson.dumps(line) for line in lines]
    written[50:50] = [b'{"topic":']
    (tmp_path / "log").write_bytes(b"\n".join(written))
    with pytest.raises(InputError, match=r"log: line 51: not JSON"):
        verify(str(tmp_path / "log"))
    report = verify(str(tmp_path / "log"), skip_bad=True)
    assert (report.bad, report.mismatches, report.events) == (1, 0, len(lines))
    assert report.first_bad.startswith("line 51: ")


# ── learning again ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_slates_are_planned_where_none_is_recorded(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    lines, final = plain
    report = replayed(of(lines, "arrivals", "clicks", "parameters"), relearn)
    assert (report.pinned, report.planned) == (0, 160)
    assert report.mismatches == 0
    assert report.versions[-1].sha256 == final.sha256


def test_slates_may_be_known_from_decisions(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    lines, final = plain
    report = replayed(without(lines, "journal"), relearn)
    assert (report.pinned, report.planned) == (160, 0)
    assert report.versions[-1].sha256 == final.sha256


def test_slates_that_were_shown_count_and_not_those_that_would_be(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    """All users were shown something else than was planned: what they answered is about that."""
    lines, final = orjson.loads(orjson.dumps(plain[0])), plain[1]
    for line in lines:
        if line["topic"] == "ads.clicks":
            change(line, arm="ad-2")
        elif line["topic"] == "ads.journal" and payload(line)["kind"] == "opened":
            change(line, slate=["ad-2"] * 4)
    report = replayed(lines, relearn)
    newest = report.versions[-1]
    assert newest.version == final.version
    assert newest.status == "differs"
    assert report.clicks == sum(payload(line)["clicked"] for line in of(lines, "clicks"))


def test_learning_needs_nothing_but_arrivals_clicks_and_what_is_configured(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    lines, final = plain
    bare = of(lines, "arrivals", "clicks")
    with pytest.raises(InputError, match=r"give --dim and --catalog"):
        replayed(bare, relearn)
    with pytest.raises(InputError, match=r"give --catalog"):
        replayed(bare, relearn, changes={"dim": 3})
    report = replayed(bare, relearn, changes=SETTINGS, arms=ARMS)
    assert report.versions[-1].sha256 == final.sha256
    again = replayed(mingled(bare, 1), relearn, changes=SETTINGS, arms=ARMS)
    assert hashes(again) == hashes(report)


def test_learning_under_other_settings_is_not_compared(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    lines, final = plain
    report = replayed(lines, relearn, changes={"estimator": "newton"})
    assert report.mismatches == 0
    assert report.versions[-1].version == final.version
    assert report.versions[-1].sha256 != final.sha256


def test_a_wrong_dimension_teaches_nothing(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    report = replayed(plain[0], relearn, changes={"dim": 7})
    assert (report.sessions, len(report.versions)) == (0, 1)


def test_time_goes_no_further_than_the_recorded_progress(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    """Without the progress after 47 s, the last of the four windows, due at 48 s, stays open."""
    lines = plain[0]
    until = START + 47_000
    kept = [
        line
        for line in lines
        if not (
            line["topic"] == "ads.journal" and payload(line)["kind"] == "progress" and payload(line)["time"] > until
        )
    ]
    report = replayed(kept, relearn)
    assert report.mismatches == 0
    assert [version.version for version in report.versions] == [0, 1, 2, 3]
    assert [version.version for version in replayed(lines, relearn).versions] == [0, 1, 2, 3, 4]


def test_dead_letters_stay_dead(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    """A click with a forged token is known as one by its dead letter alone."""
    lines = plain[0]
    click = next(line for line in of(lines, "clicks")[200:] if payload(line)["clicked"])
    forged = {**click, "offset": 90_000}
    letter = {
        **click,
        "topic": "ads.dead-letters",
        "partition": 0,
        "offset": 90_000,
        "headers": [
            "adcascade.reason",
            "token",
            "adcascade.topic",
            "ads.clicks",
            "adcascade.partition",
            str(click["partition"]),
            "adcascade.offset",
            "90000",
        ],
    }
    honest = [line for line in lines if line is not click]
    without_it = replayed(honest, relearn)
    assert hashes(replayed([*honest, forged, letter], relearn)) == hashes(without_it)
    assert hashes(replayed([*honest, forged], relearn)) != hashes(without_it)


# ── a restart with other settings ────────────────────────────────────────────────────────────────────────────────────


def test_settings_may_change_with_a_restart(tmp_path: Path, replayed: Callable[..., ReplayReport]) -> None:
    """Each version is made again under the settings that it carries."""
    records: list[tuple[Record, Any]] = []

    def tap(record: Record, headers: Any) -> None:
        records.append((record, headers))

    with StateFolder(tmp_path / "state") as state:
        Run(sessions=120, rate=4, seed=0, oddities=False, tap=tap, state=state).go(())
    first = len(records)
    with StateFolder(tmp_path / "state") as state:
        changed = {"beta": 0.5, "ridge": 2.0}
        run = Run(sessions=400, rate=4, seed=0, oddities=False, tap=tap, state=state, settings=changed)
        later = START + 60_000
        run.agenda = [entry for entry in run.agenda if entry[0] >= later]
        runner: Embedded = run.go(())
    # The runner counts the offsets of every topic but the journal from 0 again.
    moved = [
        (r._replace(offset=r.offset + (100_000 if i >= first and r.topic != "ads.journal" else 0)), h)
        for i, (r, h) in enumerate(records)
    ]
    lines = [orjson.loads(encode_line(*one)) for one in moved]
    settings = {payload(line)["beta"] for line in of(lines, "parameters")}
    assert settings == {2.5, 0.5}
    report = replayed(lines)
    assert report.mismatches == report.unfolded == 0
    assert report.versions[-1].sha256 == runner.versions.newest.sha256


# ── other machines, the golden log ───────────────────────────────────────────────────────────────────────────────────


def test_rounding_of_another_machine_is_a_mismatch_unless_it_is_tolerated(
    plain: tuple[list[Document], Parameters], replayed: Callable[..., ReplayReport]
) -> None:
    """Every version differs in its last digits, and the next one was made from that."""
    lines = orjson.loads(orjson.dumps(plain[0]))
    parent = ""
    for line in of(lines, "parameters"):
        there = decode_parameters(line["payload"].encode())
        if there.version > 0 and there.parent_sha256:
            belief = there.posterior
            moved = replace(belief, theta_arms=belief.theta_arms * (1 + 1e-13))
            there = replace(there, posterior=moved, parent_sha256=parent)
        line["payload"] = encode_parameters(there).decode()
        parent = there.sha256
    strict = replayed(lines)
    assert strict.mismatches == len(strict.versions) - 1  # version 0 is the same everywhere
    assert {found.kind for found in strict.findings.first} == {"version"}
    assert "theta_arms by up to" in strict.findings.first[0].name
    assert replayed(lines, tolerance=1e-9).mismatches == 0
    assert replayed(lines, relearn).mismatches == strict.mismatches
    assert replayed(lines, relearn, tolerance=1e-9).mismatches == 0


def test_a_difference_is_named(final: Parameters) -> None:
    assert difference(final, final) == ("parent_sha256", 0.0)
    assert difference(final, replace(final, folds=0)) == ("folds", float("inf"))
    name, by = difference(final, replace(final, radius=final.radius + 0.5))
    assert name == "radius"
    assert 0.1 < by < 0.5


def test_the_golden_log_comes_out_again() -> None:
    """Decisions to the letter; versions to 1e-9, and to the bit on the kind of machine that recorded it."""
    facts = orjson.loads(FACTS.read_bytes())
    report = verify(str(GOLDEN), tolerance=1e-9)
    assert [str(found) for found in report.findings.first] == []
    assert report.unverified == report.unfolded == 0
    assert report.decisions > 800
    newest = report.versions[-1]
    assert (newest.version, newest.sha256) == (facts["version"], facts["sha256"])
    if fingerprint() == facts["machine"]:
        for exact in (verify(str(GOLDEN)), relearn(str(GOLDEN))):
            assert exact.mismatches == 0
            assert exact.versions[-1].sha256 == facts["sha256"]


def test_the_golden_log_has_every_topic_mode_and_order() -> None:
    report = verify(str(GOLDEN))
    assert all(report.counts.values())
    assert set(report.modes) >= {"warmup", "random", "explore"}
    lines = lines_of(GOLDEN)
    kinds = {payload(line)["kind"] for line in of(lines, "journal")}
    assert kinds == {"opened", "feedback", "progress", "arm", "command"}
    assert GOLDEN.stat().st_size < 300_000


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.binary(max_size=40)), st.integers(1, 500))
def test_a_sorter_sorts_as_often_as_asked(entries: list[bytes], memory: int) -> None:
    with Sorter(memory=memory) as sorter:
        for entry in entries:
            sorter.add(entry)
        assert list(sorter) == list(sorter) == sorted(entries)
        assert len(sorter) == len(entries)


def test_a_sorter_takes_entries_longer_than_what_it_reads_at_once() -> None:
    entries = [bytes([n]) * 100_000 for n in (3, 1, 2)]
    with Sorter(memory=1) as sorter:
        for entry in entries:
            sorter.add(entry)
        assert list(sorter) == sorted(entries)


@pytest.mark.parametrize("how", [verify, relearn])
def test_memory_does_not_grow_with_the_log(
    tmp_path: Path,
    plain: tuple[list[Document], Parameters],
    how: Callable[..., ReplayReport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same minute of traffic again and again: eight times the log, about the same memory."""
    monkeypatch.setattr("worker.replay.decisions.BATCH", 64)
    monkeypatch.setattr("worker.replay.relearn.CHUNK", 256)
    options: dict[str, Any] = {"changes": {"window": 60_000}} if how is relearn else {}
    zero = of(plain[0], "parameters")[0]
    minute = [(line, payload(line)) for line in of(plain[0], "arrivals", "clicks", "decisions")]

    def peak(minutes: int) -> int:
        path = tmp_path / "log"
        with path.open("wb") as file:
            file.write(encode_line(Record("ads.parameters", 0, 0, 0, b"0", zero["payload"].encode())))
            for number in range(minutes):
                for line, said in minute:
                    body = {**said, "session_id": f"{said['session_id']}-{number}"}
                    for name in {"occurred_at", "arrived_at"} & said.keys():
                        body[name] += 60_000 * number
                    offset = line["offset"] + 10_000 * number
                    ts = line["ts"] + 60_000 * number
                    value = orjson.dumps(body)
                    file.write(encode_line(Record(line["topic"], line["partition"], offset, ts, b"", value)))
        tracemalloc.start()
        try:
            how(str(path), memory=100_000, **options)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16) < 1.6 * peak(2)
