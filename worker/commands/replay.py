"""`adcascade replay`: a recorded log gives the same decisions and the same parameters again, or it says where not."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from worker.bandit.estimators import ESTIMATORS
from worker.bandit.policies import BONUSES, POLICIES
from worker.commands.simulate import beta
from worker.console import JSON, Progress, check_writable, note, progress, say, table, write_json
from worker.errors import InputError
from worker.runners.replay import Report, relearn, verify
from worker.settings import Command, Option, Parser, integer, number
from worker.stream.parameters import UNANSWERED, Arm
from worker.stream.topology import Topics

SHOWN: Final = 5  # mismatches told to people


def milliseconds(*, above: float | None = None) -> Parser:
    """Return a parser of seconds that gives milliseconds.

    >>> milliseconds()("2.5")
    2500
    """
    seconds = number(least=0, above=above)
    return lambda text: round(1000 * seconds(text))


#: Settings of learning, for --relearn: those recorded hold unless they are given.
SETTINGS: Final = (
    Option(name="dim", help="context features d", parse=integer(least=1)),
    Option(name="horizon", help="most displays H in a session", parse=integer(least=1)),
    Option(name="repeats", help="whether a session may show an arm twice", flag=True),
    Option(name="policy", help="how slates are planned where none is recorded", choices=POLICIES),
    Option(name="epsilon", help="share that epsilon-greedy explores", parse=number(least=0, most=1)),
    Option(name="bonus", help="what is added to Q to explore", choices=BONUSES),
    Option(name="beta", help="exploration: a number of standard deviations, or theory", parse=beta),
    Option(name="estimator", help="how a window is folded", choices=ESTIMATORS),
    Option(name="ridge", help="prior precision λ", parse=number(above=0)),
    Option(name="forgetting", help="how much of the certainty a fold keeps", parse=number(above=0, most=1)),
    Option(name="warmup", help="folds before the policy takes over", parse=integer(least=0)),
    Option(name="horizon-episodes", help="episodes T that exploration is spread over", parse=integer(least=2)),
    Option(name="random-share", help="share of sessions drawn at random", parse=number(least=0, most=1)),
    Option(name="salt", help="makes the chance of deployments differ"),
    Option(name="session-timeout", help="seconds within which feedback counts", parse=milliseconds()),
    Option(name="lateness", help="seconds that a record may be late", parse=milliseconds()),
    Option(name="window", help="seconds of arrivals that are folded together", parse=milliseconds(above=0)),
    Option(name="unanswered", help="what a display without an answer says", choices=UNANSWERED),
)

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
    Option(
        name="arms",
        help="with --relearn: arms to start with, JSON as `adcascade arms list --json` writes it",
        metavar="FILE",
    ),
    *(replace(option, help=f"with --relearn: {option.help}") for option in SETTINGS),
)


def run(options: argparse.Namespace) -> int:
    """Replay a log; exit 1 if something does not come out as it was recorded."""
    if options.verify and options.relearn:
        raise InputError("--verify and --relearn are two different replays: give one of them")
    if options.arms is not None and not options.relearn:
        raise InputError("--arms is for --relearn: --verify takes the arms from the recorded versions")
    check_writable(options.json)
    common: dict[str, Any] = {
        "topics": Topics(options.prefix),
        "skip_bad": options.skip_bad,
        "tolerance": options.tolerance,
        "stage": _stage,
    }
    if options.relearn:
        report = relearn(options.file, changes=_changes(options), arms=_arms(options.arms), **common)
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


def _stage(title: str, total: float | None) -> AbstractContextManager[Progress]:
    return progress(title, total, unit="lines")


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    given = {option.attribute: getattr(options, option.attribute) for option in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def _arms(path: str | None) -> list[Arm] | None:
    if path is None:
        return None
    try:
        given: Any = orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"--arms {path}: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"--arms {path}: not JSON: {error}") from None
    if isinstance(given, Mapping):
        given = given.get("arms")
    if not isinstance(given, list) or not given:
        raise InputError(f'--arms {path}: must be a list such as [{{"arm": "shoes", "reward": 1.2}}]')
    try:
        arms = [Arm(arm=arm["arm"], reward=arm["reward"], active=arm.get("active", True)) for arm in given]
    except (TypeError, KeyError, AttributeError):
        raise InputError(f"--arms {path}: every arm needs an arm and a reward") from None
    except InputError as error:
        raise InputError(f"--arms {path}: {error}") from None
    if len({arm.arm for arm in arms}) < len(arms):
        raise InputError(f"--arms {path}: two arms have the same id")
    return arms


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(path: str, report: Report) -> str:
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


def _versions(report: Report) -> str:
    if not report.versions:
        return "no versions"
    first, last = report.versions[0], report.versions[-1]
    made = sum(version.status != "recorded" for version in report.versions)
    how = "learned" if report.mode == "relearn" else "folded again"
    return (
        f"versions {first.version} to {last.version}: {made:,} of {len(report.versions):,} {how}; "
        f"the last has sha256 {last.sha256}"
    )


def _decisions(report: Report) -> str:
    verified = report.decisions - report.unverified
    modes = ", ".join(f"{mode} {count:,}" for mode, count in sorted(report.modes.items()))
    return f"{verified:,} of {report.decisions:,} decisions made again{f' ({modes})' if modes else ''}"


def _slates(report: Report) -> str:
    return f"slates: {report.pinned or 0:,} as recorded, {report.planned or 0:,} planned here"


def warnings(report: Report) -> list[str]:
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


def mismatches(report: Report) -> list[str]:
    """Return the first mismatches, a line each."""
    if not report.mismatches:
        return []
    count = "1 mismatch" if report.mismatches == 1 else f"{report.mismatches:,} mismatches"
    told = [count, *(f"  {mismatch}" for mismatch in report.findings.first[:SHOWN])]
    if report.mismatches > SHOWN:
        told.append(f"  and {report.mismatches - SHOWN:,} more")
    return told


COMMAND = Command(
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
        "adcascade replay clicks-only.jsonl --relearn --dim 16 --arms arms.json",
        "for t in arrivals clicks decisions journal parameters; do kcat -b localhost -C -e -J -t ads.$t; done \\",
        "  | adcascade replay -",
    ),
    options=OPTIONS,
    run=run,
)
