"""`adcascade report`: what was earned in a day or a week, for people who do not read metrics."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from worker.cli.options.brokers import SECURITY
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.source import source
from worker.cli.options.target import PLACE
from worker.cli.options.times import duration, timestamp
from worker.console import note, table, write_file, write_result
from worker.report.counting import WEEK, chosen_period
from worker.report.document import report_on
from worker.report.page import report_page
from worker.report.tables import WORDS, changes, heads, tables
from worker.stream.accounts import DAY

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
    Option("log", "recorded log, without --state and --broker; - for standard input", positional=True, optional=True),
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
    *PLACE,
    *SECURITY,
)


def _now() -> int:
    return time.time_ns() // 1_000_000


def run(options: argparse.Namespace) -> None:
    """Report on a period."""
    length = DAY if options.period is None else options.period
    since = chosen_period(0, _now(), length, options.until).before.since if length else None
    with source(options, TOPICS, since=since) as log:
        document = report_on(log, length=options.period, until=options.until, by=options.by)
    if options.html is not None:
        write_file(options.html, report_page(document).encode())
        note(f"wrote {options.html}")
    write_result(options.json, document, text(document))


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
        "Say what was earned in a day or a week, for people who do not read metrics: revenue, clicks and answers, of\n"
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
