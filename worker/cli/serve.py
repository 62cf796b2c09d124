"""`adcascade serve`: real traffic over HTTP on one machine, without Kafka."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.cli.options.catalog import CATALOG
from worker.cli.options.learning import LEARNING, LIMITS
from worker.cli.options.parser import CommandSpec, Option, defaulted
from worker.cli.options.process import HTTP, PROCESS, STARTING, http_settings, process_settings
from worker.cli.options.times import seconds_option, time_option
from worker.errors import InputError
from worker.serve.store import ServeSettings

DAY = 86_400_000

KEEP = (
    time_option("keep", "time that the folder keeps sessions and versions for reports", 7 * DAY, most=7 * DAY),
    time_option(
        "keep-record",
        "time that parts of the log are kept, FILE-<beginning>, one a day; 0: one file, which grows",
        30 * DAY,
    ),
)
OPERATION = defaulted(
    ServeSettings,
    Option("state", "state folder; everything that was answered is in it", default="adcascade-state", metavar="DIR"),
    Option(
        "record", "log of all records, continued after a restart; any other file that exists is refused", metavar="FILE"
    ),
    *KEEP,
    seconds_option("progress-interval", "time between two progress records", least=10, most=60_000),
    *PROCESS,
)


def read(options: argparse.Namespace) -> ServeSettings:
    """Return the settings of the server and of its learner process; start the log."""
    if options.record is not None and (options.record == "-" or options.record.endswith(".gz")):
        raise InputError("--record needs a plain file, which a restart can continue; compress it when it is complete")
    return process_settings(
        ServeSettings,
        "serve",
        options,
        folder=Path(options.state),
        http=http_settings(options),
        record=None if options.record is None else Path(options.record),
    )


def run(options: argparse.Namespace) -> int:
    """Check the options, then serve until a signal or a failure."""
    settings = read(options)

    # aiohttp takes a while to import; --help and wrong options need not wait for it.
    from worker.serve.server import run_server

    return run_server(settings)


COMMAND = CommandSpec(
    name="serve",
    summary="Serve over HTTP on this machine, without Kafka: durable in a state folder, learning in a second process.",
    examples=(
        "adcascade serve --dim 16 --catalog arms.csv",
        "adcascade serve --catalog ads.csv --config serve.toml --start-from history.gz     # a log, or a version",
        "adcascade serve --dim 16 --catalog arms.csv --state /var/lib/adcascade --port 8080 --record served.log",
        "adcascade serve --state /var/lib/adcascade --host 0.0.0.0 --api-keys keys.txt --max-sessions-per-key 60000",
    ),
    options=(*HTTP, CATALOG, *STARTING, *LEARNING, *LIMITS, *OPERATION),
    run=run,
)
