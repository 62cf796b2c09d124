"""`adcascade worker`: serve and learn on Kafka."""

from __future__ import annotations

import argparse

from worker.cli.options.brokers import CONNECTION, connection
from worker.cli.options.catalog import CATALOG
from worker.cli.options.learning import LEARNING, LIMITS
from worker.cli.options.parser import CommandSpec, Option, defaulted, port
from worker.cli.options.process import PROCESS, STARTING, process_settings
from worker.cli.options.times import seconds_option
from worker.errors import InputError
from worker.kafka.settings import WorkerSettings
from worker.stream.topology import Topics

OPERATION = defaulted(
    WorkerSettings,
    Option("group", "consumer group of all workers of these topics"),
    seconds_option(
        "member-timeout",
        "time after which the partitions of a silent worker are assigned to others",
        least=1_000,
        most=300_000,
    ),
    seconds_option("progress-interval", "time between two progress records of a partition", least=10, most=60_000),
    Option("web-host", "address of /metrics, /livez and /readyz"),
    port("web-port", "port of the web server; 0: any free port"),
    *PROCESS,
)


def read(options: argparse.Namespace) -> WorkerSettings:
    """Return the settings of worker and learner process, checked as far as possible without a broker; start the log."""
    brokers = connection(options)
    own = {"connection": brokers, "topics": Topics(options.prefix)}
    return process_settings(WorkerSettings, "worker", options, brokers.secrets, **own)


def run(options: argparse.Namespace) -> int:
    """Check the options, then serve until a signal or a failure."""
    if not options.group:
        raise InputError("--group is empty")
    settings = read(options)

    # Faust takes half a second to import; --help and wrong options need not wait for it.
    from worker.kafka.worker import run_worker

    return run_worker(settings)


COMMAND = CommandSpec(
    name="worker",
    summary="Serve from Kafka: any number of workers share the partitions; one of them runs the learner.",
    examples=(
        "adcascade topics create && adcascade worker --dim 16 --catalog arms.csv",
        "adcascade worker --broker kafka-1:9092,kafka-2:9092 --web-host 0.0.0.0 --web-port 8080",
        "ADCASCADE_SASL_PASSWORD_FILE=/run/secrets/kafka adcascade worker --broker kafka:9093 --sasl-username ads "
        "--kafka ssl.ca.location=ca.pem",
        "adcascade worker --config worker.toml",
        "adcascade worker --config worker.toml --start-from learned.json     # of `adcascade replay --relearn`",
    ),
    options=(*CONNECTION, CATALOG, *STARTING, *LEARNING, *LIMITS, *OPERATION),
    run=run,
)
