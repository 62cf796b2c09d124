"""`adcascade import`: turn a table of displays of another system into a log."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Final

from worker.cli.options.brokers import PREFIX
from worker.cli.options.catalog import CATALOG, read_arms
from worker.cli.options.learning import declared_ads, setting
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.times import duration_text, time_span
from worker.console import listing, write_result
from worker.errors import InputError
from worker.logs.format import check_new
from worker.logs.importing import HistoryImport, ImportReport
from worker.logs.tables import FORMATS, ROLES, RowReader, read_table
from worker.stream.features import listed
from worker.stream.topology import Topics

#: Settings that say what is learned from the history; those of serving follow from it, or are chosen where it serves.
LEARNED: Final = ("features", "standardise", "model", "intercept", "answers", "estimator", "ridge", "forgetting")
SETTINGS: Final = tuple(setting(name, default=None) for name in (*LEARNED, "unanswered"))


def columns_by_name(text: str) -> dict[str, str]:
    """Read names of columns, or of features with their columns.

    >>> columns_by_name("age, device=user_device, country=")
    {'age': 'age', 'device': 'user_device', 'country': ''}
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    return {name.strip(): column.strip() if sign else name for name, sign, column in parts if name}


OPTIONS = (
    Option("file", "table with a row per display, also gzipped", positional=True),
    Option("output", "log to write, a new file; compressed if it ends in .gz", metavar="FILE"),
    Option("format", "format of the table (default: by the name of the file)", choices=FORMATS),
    *(
        Option(f"{role}-column", f"column of the {meaning} (default: {' or '.join(usual)})", metavar="COLUMN")
        for role, (meaning, *usual) in ROLES.items()
    ),
    Option(
        "context-columns",
        "columns of numbers, or columns of declared features: NAME=COLUMN,… (default: the names of the features)",
        parse=columns_by_name,
        metavar="LIST",
    ),
    Option("skip-bad", "whether sessions with bad rows are left out and counted", flag=True, default=False),
    replace(
        CATALOG, help="ads, JSON, CSV or TOML (default: those of the table, with the mean revenue of their clicks)"
    ),
    PREFIX,
    JSON,
    *SETTINGS,
)


def run(options: argparse.Namespace) -> int:
    """Import a table; exit 2 at the first bad row."""
    if options.output in (None, "-"):
        raise InputError("--output FILE is missing: the log to write")
    check_new(options.output)
    columns = {role: getattr(options, f"{role}_column") for role in ROLES}
    settings = {option.attribute: getattr(options, option.attribute) for option in SETTINGS}
    arms = read_arms(options.catalog, declared=declared_ads(options))
    history = HistoryImport(
        path=options.file,
        rows=read_table(options.file, options.format),
        reader=RowReader(
            {role: column for role, column in columns.items() if column is not None},
            options.context_columns or {},
            options.features,
            ads={arm.arm for arm in arms},
        ),
        given={name: value for name, value in settings.items() if value is not None},
        arms=arms,
        skip_bad=options.skip_bad,
    )
    report = history.run(options.output, Topics(options.prefix))
    write_result(options.json, asdict(report), summary(options.output, report))
    return 0


def summary(output: str, report: ImportReport) -> str:
    """Return the result for people."""
    window, timeout = duration_text(report.window), duration_text(report.session_timeout)
    lines = [
        f"{output}: {report.sessions:,} sessions, {report.displays:,} displays, {report.clicks:,} clicks, "
        f"{report.ads:,} ads{time_span(report.first_at, report.last_at)}",
        f"  horizon {report.horizon}, window {window}, session timeout {timeout}",
    ]
    if report.unpriced:
        ads = f"{len(report.unpriced):,} ads ({listed(report.unpriced, 3)})"
        lines.append(f"  no revenue is known of {ads}: they get the mean of the others; --catalog gives theirs")
    for feature, values in report.unlisted.items():
        shown = ", ".join(f"{value} in {count:,}" for value, count in values.items())
        lines.append(f"  values of {feature} that are not listed, so they count as missing: {shown} sessions")
    if report.bad:
        bad = [{"reason": reason} | defect for reason, defect in report.bad.items()]
        columns = {"rows": "{rows}", "such as": "{example}", "reason": "{reason}{detail}"}
        lines += [f"  left out: {report.sessions_left_out:,} sessions", "", listing(columns, bad)]
    return "\n".join([*lines, "", f"next: adcascade serve --start-from {output}, with --config and --catalog as here"])


COMMAND = CommandSpec(
    name="import",
    summary=(
        "Turn a table of displays (CSV, JSON lines, Parquet, Personalizer's DSJSON, obp's columns) into a log, from\n"
        "which `adcascade replay --relearn` learns. A row is a display: session, time, position, ad, clicked, and the\n"
        "features of the user. Rows may be in any order. A session ends with its click, or with its last row."
    ),
    examples=(
        "adcascade import history.csv --config serve.toml --catalog ads.csv --output history.gz",
        "adcascade import rows.jsonl --session-column visit --ad-column creative --context-columns age,visits \\",
        "  --output history.gz",
        "adcascade import personalizer.json --format dsjson --config serve.toml --skip-bad --output history.gz",
        "adcascade replay history.gz --relearn --output learned.json",
    ),
    options=OPTIONS,
    run=run,
)
