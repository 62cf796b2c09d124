"""`adcascade export`: write the sessions of a log as a table for other tools."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from worker.cli.options.brokers import PREFIX
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.console import write_result
from worker.errors import FailedError, InputError
from worker.logs.findings import Findings
from worker.logs.obp import ObpTable
from worker.logs.ordered import read_log
from worker.stream.topology import Topics

OPTIONS = (
    Option("file", "recorded log; - for standard input", positional=True),
    Option("output", "table to write, CSV", metavar="FILE"),
    Option("format", "format of the table: columns of the Open Bandit Pipeline", choices=("obp",), default="obp"),
    PREFIX,
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Write the table."""
    if options.output is None:
        raise InputError("--output FILE is missing: the table to write")
    with read_log(options.file, Findings(), topics=Topics(options.prefix)) as log:
        table = ObpTable(log)
        try:
            with Path(options.output).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(table.header)
                writer.writerows(table.rows())
        except OSError as error:
            raise FailedError(f"{options.output}: {error.strerror or error}") from None
    result = {"sessions": table.sessions, "displays": table.displays, "left_out": dict(table.left_out)}
    lines = [f"{options.output}: {table.sessions:,} sessions, {table.displays:,} displays"]
    lines += [f"  left out: {count:,} sessions, {reason}" for reason, count in table.left_out.items()]
    write_result(options.json, result, "\n".join(lines))
    return 0


COMMAND = CommandSpec(
    name="export",
    summary="Write the sessions of a log as a table for other tools: a row per display, with its propensity.",
    examples=("adcascade export log.gz --format obp --output all.csv",),
    options=OPTIONS,
    run=run,
)
