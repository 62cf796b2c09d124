"""`adcascade replay`: a recorded log gives the same decisions and the same parameters again, or it says where not."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from worker.cli.options.learning import CATALOG, LEARNING, Duration, read_arms
from worker.cli.options.parser import JSON, CommandSpec, Option, number
from worker.console import ProgressBar, check_writable, note, progress, say, table, write_json
from worker.errors import InputError
from worker.replay.relearn import relearn
from worker.replay.report import ReplayReport
from worker.replay.verify import verify
from worker.stream.topology import Topics

SHOWN: Final = 5  # mismatches told to people


#: Settings of learning, for --relearn: those recorded hold unless they are given.
SETTINGS: Final = tuple(replace(option, default=None, help=f"with --relearn: {option.help}") for option in LEARNING)

OPTIONS = (
    Option(
        name="file",
        help="the log: JSON lines as `kcat -J` writes them, also gzipped; - for standard input",
        positional=True,
    ),
    Option(
        name="verify",
        help="make every decision again under its recorded version, fold every version again from the journal; "
        "this is what happens without --relearn",
        flag=True,
    ),
    Option(
        name="relearn",
        help="learn from arrivals and clicks alone, with the recorded slates (its own where there are none), "
        "and compare the versions with the recorded ones",
        flag=True,
    ),
    Option(name="skip-bad", help="pass over lines that cannot be read, and count them", flag=True, default=False),
    Option(name="prefix", help="prefix of the topics", default="ads"),
    Option(
        name="tolerance",
        help="how much the numbers of a version may differ, for logs of another kind of machine",
        parse=number(least=0),
        default=0.0,
    ),
    JSON,
    replace(CATALOG, help=f"with --relearn: {CATALOG.help}"),
    *SETTINGS,
)


def run(options: argparse.Namespace) -> int:
    """Replay a log; exit 1 if something does not come out as it was recorded."""
    if options.verify and options.relearn:
        raise InputError("--verify and --relearn are two different replays: give one of them")
    if options.catalog is not None and not options.relearn:
        raise InputError("--catalog is for --relearn: --verify takes the arms from the recorded versions")
    check_writable(options.json)
    common: dict[str, Any] = {
        "topics": Topics(options.prefix),
        "skip_bad": options.skip_bad,
        "tolerance": options.tolerance,
        "stage": _stage,
    }
    if options.relearn:
        report = relearn(
            options.file, changes=_changes(options), arms=list(read_arms(options.catalog)) or None, **common
        )
    else:
        report = verify(options.file, **common)
    write_json(options.json, report.as_json())
    if options.json == "-":
        for text in warnings(report):
            note(text)
        for text in mismatches(report):
            note(text)
    else:
        say(summary(options.file, report))
    return 1 if report.mismatches else 0


def _stage(title: str, total: float | None) -> AbstractContextManager[ProgressBar]:
    return progress(title, total, unit="lines")


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    given = {option.attribute: getattr(options, option.attribute) for option in SETTINGS}
    return {name: _plain(value) for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Duration) else value


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(path: str, report: ReplayReport) -> str:
    """Return what was in the log and what came of it."""
    name = "standard input" if path == "-" else path
    lines = [
        f"{name}: {report.events:,} records{_span(report.span)}",
        "",
        table(["topic", "records"], [[topic, f"{count:,}"] for topic, count in report.counts.items() if count]),
        "",
        f"{report.sessions:,} sessions, {report.clicks:,} clicks, revenue {report.revenue:,.2f}",
    ]
    lines += [_versions(report), _decisions(report) if report.mode == "verify" else _slates(report)]
    told = warnings(report)
    if told:
        lines += ["", *told]
    lines += ["", *mismatches(report)] if report.mismatches else ["", "no mismatch"]
    return "\n".join(line for line in lines if line is not None)


def _span(span: tuple[int, int] | None) -> str:
    if span is None:
        return ""
    first, last = (datetime.fromtimestamp(time / 1000, tz=UTC) for time in span)
    return f", {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"


def _versions(report: ReplayReport) -> str:
    if not report.versions:
        return "no versions"
    first, last = report.versions[0], report.versions[-1]
    made = sum(version.status != "recorded" for version in report.versions)
    how = "learned" if report.mode == "relearn" else "folded again"
    return (
        f"versions {first.version} to {last.version}: {made:,} of {len(report.versions):,} {how}; "
        f"the last has sha256 {last.sha256}"
    )


def _decisions(report: ReplayReport) -> str:
    verified = report.decisions - report.unverified
    modes = ", ".join(f"{mode} {count:,}" for mode, count in sorted(report.modes.items()))
    return f"{verified:,} of {report.decisions:,} decisions made again{f' ({modes})' if modes else ''}"


def _slates(report: ReplayReport) -> str:
    return f"slates: {report.pinned or 0:,} as recorded, {report.planned or 0:,} planned here"


def warnings(report: ReplayReport) -> list[str]:
    """Return what could not be looked at, and what is unusual."""
    told = []
    for what, count in sorted(report.unverified_because.items()):
        missing = {
            "version": "their version is",
            "arrival": "their arrival is",
            "feedback": "the feedback before them is",
        }
        told.append(f"unverified: {count:,} decisions, because {missing[what]} not in the log")
    if report.unfolded and report.mode == "verify":
        told.append(
            f"not folded again: {report.unfolded:,} versions, because the journal before them is not in the log"
        )
    told += [f"the journal lacks the offsets {first} to {last}" for first, last in report.holes[:3]]
    if report.lost is not None:
        told.append(
            f"a rollback after version {report.lost} went to one that is not in the log: not compared from there"
        )
    if report.stale:
        told.append(f"{report.stale:,} decisions by an older version than the one in force, which had come late")
    if report.bad:
        told.append(f"{report.bad:,} bad lines passed over, the first: {report.first_bad}")
    if report.duplicates:
        told.append(f"{report.duplicates:,} lines were repetitions")
    if report.ignored:
        told.append(f"{report.ignored:,} lines of other topics ignored")
    return told


def mismatches(report: ReplayReport) -> list[str]:
    """Return the first mismatches, a line each."""
    if not report.mismatches:
        return []
    count = "1 mismatch" if report.mismatches == 1 else f"{report.mismatches:,} mismatches"
    told = [count, *(f"  {mismatch}" for mismatch in report.findings.first[:SHOWN])]
    if report.mismatches > SHOWN:
        told.append(f"  and {report.mismatches - SHOWN:,} more")
    return told


COMMAND = CommandSpec(
    name="replay",
    summary=(
        "Checks a recorded log: every decision is made again under the version it names, every version is folded\n"
        "again from the journal, and what does not come out as it was recorded is a mismatch (exit 1). With\n"
        "--relearn, the versions are learned again from arrivals and clicks alone. Lines may be in any order, and\n"
        "repeated; a log larger than memory is sorted in the folder for temporary files (TMPDIR)."
    ),
    examples=(
        "adcascade demo --record log.gz && adcascade replay log.gz",
        "adcascade replay log.gz --verify --json -",
        "adcascade replay log.gz --relearn",
        "adcascade replay log.gz --relearn --estimator newton --beta 2",
        "adcascade replay clicks-only.jsonl --relearn --dim 16 --catalog arms.json",
        "for t in arrivals clicks decisions journal parameters; do kcat -b localhost -C -e -J -t ads.$t; done \\",
        "  | adcascade replay -",
    ),
    options=OPTIONS,
    run=run,
)
