"""`adcascade report`: what was earned in a day or a week, for people who do not read metrics."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from worker.cli.options.brokers import BROKER, PREFIX, SECURITY, connection
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.times import duration, timestamp
from worker.console import check_writable, note, progress, table, write_file, write_result
from worker.embedded.state import StateView
from worker.errors import InputError
from worker.logs.findings import Findings
from worker.logs.format import LogWriter
from worker.logs.ordered import OrderedLog, read_log
from worker.logs.sources import write_state
from worker.report.document import report_on
from worker.report.page import page
from worker.report.period import WEEK, chosen_period
from worker.report.tables import WORDS, changes, heads, tables
from worker.stream.accounts import DAY
from worker.stream.topology import Topics

#: Topics that a report needs: the journal has what came of arrivals and clicks.
TOPICS: Final = ("journal", "parameters", "parameters-history", "episodes")
_LENGTHS: Final = {"day": DAY, "week": WEEK, "all": 0}


def period(text: str) -> int:
    """Read the length of a period in milliseconds; 0 is all there is.

    >>> period("week") == period("7d"), period("all")
    (True, 0)
    """
    if text in _LENGTHS:
        return _LENGTHS[text]
    with suppress(ValueError):
        if length := duration(text):
            return length
    raise ValueError(f"must be day, week, all or a time such as 12h, not {text!r}")


OPTIONS = (
    Option("log", "recorded log; - for standard input", positional=True, optional=True),
    Option("state", "state folder of `adcascade serve`, instead of a log", metavar="DIR"),
    replace(BROKER, default=None, help="bootstrap brokers of running workers, host:port[,…], instead of a log"),
    Option(
        "period",
        "day, week, all, or a time such as 12h; days and weeks are whole ones, and end at midnight UTC (default: the "
        "last whole day, or all if there is none)",
        parse=period,
        metavar="PERIOD",
    ),
    Option(
        "until",
        "end of the period: a time (2026-01-31T12:00:00Z), or how long ago (2h)",
        parse=lambda text: timestamp(text, _now()),
        metavar="TIME",
    ),
    Option(
        "by",
        "feature that users are grouped by; repeatable (default: those whose groups differ most)",
        repeatable=True,
        default=(),
        metavar="NAME",
    ),
    Option("html", "file for the report as a page that can be printed", metavar="FILE"),
    JSON,
    PREFIX,
    *SECURITY,
)


def _now() -> int:
    return time.time_ns() // 1_000_000


def run(options: argparse.Namespace) -> None:
    """Report on a period."""
    check_writable(options.json, options.html)
    if options.html == "-":
        raise InputError("--html needs the name of a file")
    with _source(options) as log:
        document = report_on(log, length=options.period, until=options.until, by=options.by)
    if options.html is not None:
        write_file(options.html, page(document).encode())
        note(f"wrote {options.html}")
    write_result(options.json, document, text(document))


@contextmanager
def _source(options: argparse.Namespace) -> Iterator[OrderedLog]:
    """Open the one source of the options as a log."""
    flags = [f"--{name}" for name in ("state", "broker") if _is_typed(options, name)]
    given = [*([options.log] if options.log is not None else []), *flags]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are several sources: give one log, --state DIR or --broker HOST:PORT")
    topics, stage = Topics(options.prefix), partial(progress, unit="lines")
    with tempfile.TemporaryDirectory(prefix="adcascade-report-") as folder:
        path = options.log
        if path is None:
            path = Path(folder) / "log.jsonl"
            _fetch(options, topics, path)
        with read_log(path, Findings(), topics=topics, stage=stage) as log:
            yield log


def _is_typed(options: argparse.Namespace, name: str) -> bool:
    return any(word.partition("=")[0] == f"--{name}" for word in options.arguments)


def _fetch(options: argparse.Namespace, topics: Topics, path: Path) -> None:
    """Write a log of a state folder, or of the topics for the period and the one before."""
    if options.state is not None and not (_is_typed(options, "broker")):
        with StateView(options.state) as state, LogWriter(path) as log:
            write_state(state, topics, log)
        return
    if options.broker is None:
        raise InputError("what to report on is missing: a log, --state DIR or --broker HOST:PORT")
    from worker.logs.record import Recorder, Span  # with a Kafka client, which only this source needs

    length = DAY if options.period is None else options.period
    since = chosen_period(0, _now(), length, options.until).before.since if length else None
    span = Span(since=since)
    recorder = Recorder(connection(options), topics, TOPICS, span)
    with LogWriter(path) as log, progress("reading topics", None, unit="records") as bar:
        recorder.run(log, lambda: False, lambda total, written: bar.advance(written))


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def text(document: Mapping[str, Any]) -> str:
    """Return the report for a terminal."""
    parts = [
        "\n".join(heads(document)),
        "\n".join(f"! {warning['text']}" for warning in document["warnings"]),
        *(table(one.header, one.rows) for _, one in tables(document)),
        "\n".join(f"changed: {line}" for line in changes(document)),
        "\n".join(f"{word}: {meaning}" for word, meaning in WORDS.items()),
        "\n".join(f"note: {line}" for line in document["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


COMMAND = CommandSpec(
    name="report",
    summary=(
        "Says what was earned in a day or a week, for people who do not read metrics: revenue, clicks and answers, of\n"
        "all, per ad and per group of users, what has changed since the period before, and which ads need a look."
    ),
    examples=(
        "adcascade demo --record log.gz && adcascade report log.gz",
        "adcascade report log.gz --period week --html report.html",
        "adcascade report --state /var/lib/adcascade --period day",
        "adcascade report --broker kafka:9092 --period week --until 2026-01-31T00:00:00Z --json -",
        "adcascade report log.gz --by device --by age",
    ),
    options=OPTIONS,
    run=run,
)
