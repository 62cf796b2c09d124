"""`adcascade import`: turn a table of impressions of another system into a log."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from worker.cli.options.brokers import PREFIX
from worker.cli.options.catalog import CATALOG, read_arms
from worker.cli.options.learning import LEARNING, declared_ads
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.times import duration_text, time_span
from worker.console import check_writable, progress, table, write_result
from worker.errors import InputError
from worker.logs.importing import HistoryImport, ImportReport
from worker.logs.impressions import ROLES
from worker.logs.tables import FORMATS, format_of
from worker.stream.features import listed
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

#: Settings of version 0; the other ones follow from the history.
SETTINGS: Final = tuple(
    replace(option, default=None)
    for option in LEARNING
    if option.name not in ("dim", "session-timeout", "lateness", "window")
)


def column_list(text: str) -> tuple[tuple[str, str], ...]:
    """Read names of columns, or of features with their columns.

    >>> column_list("age,device=user_device")
    (('age', 'age'), ('device', 'user_device'))
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    pairs = [part.partition("=") for part in parts]
    return tuple((name.strip(), column.strip() if sign else name.strip()) for name, sign, column in pairs)


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
        parse=column_list,
        default=(),
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
    if options.output is None:
        raise InputError("--output FILE is missing: the log to write")
    check_writable(options.output, options.json)
    if Path(options.output).is_file() and Path(options.output).stat().st_size:
        raise InputError(f"{options.output}: this file exists; a log is not written over it: name a new file")
    format = options.format or format_of(options.file)
    columns = {role: getattr(options, f"{role}_column") for role in ROLES}
    settings = {option.attribute: getattr(options, option.attribute) for option in SETTINGS}
    history = HistoryImport(
        path=options.file,
        format=format,
        columns={role: column for role, column in columns.items() if column is not None},
        context=options.context_columns,
        settings={name: value for name, value in settings.items() if value is not None},
        arms={arm.arm: arm for arm in read_arms(options.catalog, declared=declared_ads(options))},
        worth=1.0 if format == "obp" else None,
        skip_bad=options.skip_bad,
        stage=partial(progress, unit="rows"),
    )
    version = history.run(options.output, Topics(options.prefix))
    chosen = {name: getattr(version.settings, name) for name in ("horizon", "window", "session_timeout")}
    result = asdict(history.report) | {"ads": len(version.arms)} | chosen
    write_result(options.json, result, summary(options.output, history.report, version))
    return 0


def summary(output: str, report: ImportReport, version: Parameters) -> str:
    """Return the result for people."""
    settings = version.settings
    times = "dates and times, UTC where they have no zone" if report.times == "dates" else f"{report.times} since 1970"
    sizes = f"window {duration_text(settings.window)}, session timeout {duration_text(settings.session_timeout)}"
    lines = [
        f"{output}: {report.sessions:,} sessions, {report.displays:,} displays, {report.clicks:,} clicks, "
        f"{len(version.arms):,} ads{time_span(report.first_at, report.last_at)}",
        f"  times read as {times}; horizon {settings.horizon}, {sizes}",
    ]
    if report.unpriced:
        ads = f"{len(report.unpriced):,} ads ({listed(report.unpriced, 3)})"
        lines.append(f"  no revenue is known of {ads}: they get the mean of the others; --catalog gives theirs")
    if report.bad:
        bad = [[n, row, reason, text.removeprefix(reason).strip()] for reason, (n, row, text) in report.bad.items()]
        lines += [f"  left out: {report.sessions_left_out:,} sessions", "", table(["rows", "first", "reason", ""], bad)]
    return "\n".join([*lines, "", f"next: adcascade replay {output} --relearn --output learned.json"])


COMMAND = CommandSpec(
    name="import",
    summary=(
        "Turns a table of displays (CSV, JSON lines, Parquet, Personalizer's DSJSON, obp's columns) into a log, from\n"
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
