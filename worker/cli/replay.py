"""`adcascade replay`: check that a recorded log gives the same decisions and parameters again."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

from worker.cli.options.brokers import PREFIX
from worker.cli.options.catalog import CATALOG, read_arms
from worker.cli.options.learning import LEARNING, check_fixed, context_dim, declared_ads
from worker.cli.options.parser import JSON, CommandSpec, Option, number
from worker.cli.options.times import time_span
from worker.console import note, table, write_file, write_result
from worker.errors import InputError
from worker.replay.relearn import relearn
from worker.replay.report import ReplayReport
from worker.replay.verify import verify
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import ROUNDING

SHOWN: Final = 5  # mismatches in the report for people

#: Settings of learning, for --relearn; the recorded ones by default.
SETTINGS: Final = tuple(replace(option, default=None, help=f"with --relearn: {option.help}") for option in LEARNING)

OPTIONS = (
    Option(
        "file", "recorded log: JSON lines as `kcat -J` writes them, also gzipped; - for standard input", positional=True
    ),
    Option(
        "verify",
        "check of every decision under its recorded version, and of every version from the journal (the default)",
        flag=True,
    ),
    Option(
        "relearn",
        "learning from arrivals and clicks alone, with the recorded slates (planned ones where there are none); "
        "its versions are compared with the recorded ones",
        flag=True,
    ),
    Option("skip-bad", "whether unreadable lines are skipped and counted", flag=True, default=False),
    PREFIX,
    Option(
        "tolerance",
        "largest relative difference between numbers of equal versions: machines of different kinds round differently",
        parse=number(least=0),
        default=ROUNDING,
    ),
    Option(
        "output",
        "with --relearn: file for the newest version, as `adcascade parameters export` writes it",
        metavar="FILE",
    ),
    JSON,
    replace(CATALOG, help=f"with --relearn: {CATALOG.help}"),
    *SETTINGS,
)


def run(options: argparse.Namespace) -> int:
    """Replay a log; exit 1 if there are mismatches."""
    if options.verify and options.relearn:
        raise InputError("--verify and --relearn are two different replays: give one of them")
    if options.catalog is not None and not options.relearn:
        raise InputError("--catalog is for --relearn: --verify uses the arms of the recorded versions")
    if options.output is not None and not options.relearn:
        raise InputError("--output is for --relearn: --verify makes no version that is not in the log")
    common: dict[str, Any] = {
        "topics": Topics(options.prefix),
        "skip_bad": options.skip_bad,
        "tolerance": options.tolerance,
    }
    if options.relearn:
        arms = read_arms(options.catalog, declared=declared_ads(options))
        report = relearn(options.file, changes=_changes(options), arms=list(arms) or None, **common)
        if options.output is not None and report.learned is not None:
            write_file(options.output, encode_parameters(report.learned) + b"\n")
            note(f"wrote {options.output}: version {report.learned.version}, sha256 {report.learned.sha256}")
    else:
        report = verify(options.file, **common)
    notes = [*warnings(report), *mismatches(report)]
    write_result(options.json, report.as_json(), summary(options.file, report), notes)
    return 1 if report.mismatches else 0


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    given = {option.attribute: getattr(options, option.attribute) for option in SETTINGS}
    given["dim"] = context_dim(options)
    check_fixed(options)
    return {name: value for name, value in given.items() if value is not None}


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(path: str, report: ReplayReport) -> str:
    """Return the content of the log and the results."""
    name = "standard input" if path == "-" else path
    lines = [
        f"{name}: {report.events:,} records{time_span(report.first_at, report.last_at)}",
        "",
        table(["topic", "records"], [[topic, f"{count:,}"] for topic, count in report.topics.items() if count]),
        "",
        f"{report.sessions:,} sessions, {report.clicks:,} clicks, revenue {report.revenue:,.2f}",
    ]
    lines += [_versions(report), _decisions(report) if report.mode == "verify" else _slates(report)]
    if found := warnings(report):
        lines += ["", *found]
    return "\n".join([*lines, "", *(mismatches(report) or ["no mismatch"])])


def _versions(report: ReplayReport) -> str:
    if not report.versions:
        return "no versions"
    first, last = report.versions[0], report.versions[-1]
    made = sum(version.status != "recorded" for version in report.versions)
    how = "learned" if report.mode == "relearn" else "folded again"
    rounded = f" ({report.rounded:,} of them equal except for rounding)" if report.rounded else ""
    return (
        f"versions {first.version} to {last.version}: {made:,} of {len(report.versions):,} {how}{rounded}; "
        f"the last has sha256 {last.sha256}"
    )


def _decisions(report: ReplayReport) -> str:
    verified = report.decisions - report.unverified
    modes = ", ".join(f"{mode} {count:,}" for mode, count in sorted(report.modes.items()))
    return f"{verified:,} of {report.decisions:,} decisions made again{f' ({modes})' if modes else ''}"


def _slates(report: ReplayReport) -> str:
    return f"slates: {report.slates_recorded:,} as recorded, {report.slates_planned:,} planned here"


def warnings(report: ReplayReport) -> list[str]:
    """Return what could not be checked, and what is unusual."""
    missing = {"version": "their version is", "arrival": "their arrival is", "feedback": "the feedback before them is"}
    found = [
        f"unverified: {count:,} decisions, because {missing[what]} not in the log"
        for what, count in sorted(report.unverified_because.items())
        if what in missing
    ]
    if imported := report.unverified_because["imported"]:
        found.append(f"nothing to verify: {imported:,} decisions of another system, which were imported")
    if report.stopped_by is not None:
        found.append(f"not compared: the versions after {report.stopped_after}, because of {report.stopped_by}")
    elif report.unfolded and report.mode == "verify":
        found.append(
            f"not folded again: {report.unfolded:,} versions, because the journal before them is not in the log"
        )
    counts = (
        (report.stale, "decisions by an older version than the one in force, which reached the worker late"),
        (report.bad_lines, f"bad lines skipped, the first: {report.first_bad}"),
        (report.duplicates, "repeated lines"),
        (report.ignored, "lines of other topics ignored"),
    )
    return [*found, *(f"{count:,} {what}" for count, what in counts if count)]


def mismatches(report: ReplayReport) -> list[str]:
    """Return the first mismatches, a line each."""
    if not report.mismatches:
        return []
    count = "1 mismatch" if report.mismatches == 1 else f"{report.mismatches:,} mismatches"
    more = [f"  and {report.mismatches - SHOWN:,} more"] if report.mismatches > SHOWN else []
    return [count, *(f"  {mismatch}" for mismatch in report.findings.first[:SHOWN]), *more]


COMMAND = CommandSpec(
    name="replay",
    summary=(
        "Check a recorded log. Every decision is planned again under the version it names, and every version is\n"
        "folded again from the journal. A difference to the log is a mismatch (exit 1). With --relearn, the versions\n"
        "are learned again from arrivals and clicks alone. Lines may be in any order, and repeated. A log larger than\n"
        "memory is sorted in the folder for temporary files (TMPDIR)."
    ),
    examples=(
        "adcascade demo --record log.gz && adcascade replay log.gz",
        "adcascade replay log.gz --verify --json -",
        "adcascade replay log.gz --relearn --output learned.json",
        "adcascade replay log.gz --relearn --estimator newton --beta 2",
        "adcascade replay clicks-only.jsonl --relearn --dim 16 --catalog arms.json",
        "for t in arrivals clicks decisions journal parameters; do \\",
        "  kcat -b localhost -C -e -J -o e@$(date +%s%3N) -t ads.$t; done | adcascade replay -",
    ),
    options=OPTIONS,
    run=run,
)
