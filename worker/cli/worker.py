"""`adcascade worker`: serve and learn on Kafka."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from worker.cli import log_format
from worker.cli.options.brokers import CONNECTION, connection, secret, topic_names
from worker.cli.options.catalog import CATALOG, read_arms
from worker.cli.options.learning import LEARNING, LIMITS, check_fixed, context_dim, declared_ads, limits
from worker.cli.options.parser import CommandSpec, Option, Settings, count, filled, port
from worker.cli.options.starting import STARTING, start_of
from worker.cli.options.times import seconds_option
from worker.errors import InputError
from worker.kafka.settings import WorkerSettings
from worker.runtime.clock import clock_of
from worker.runtime.process import command
from worker.secret import Secret
from worker.stream.feedback import token_secret
from worker.stream.settings import LearningSettings, check_order

#: For tests: a file with the time, in place of the machine's clock (see `clock_of`).
CLOCK = "ADCASCADE_TEST_CLOCK"

LOG = (
    Option(
        "log-format",
        "format of the log, json or text (default: text on a terminal, else json)",
        choices=log_format.FORMATS,
    ),
    Option("log-level", "lowest level in the log", choices=log_format.LEVELS, default="info"),
)

_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(WorkerSettings)}

#: Options of a process that answers arrivals, `worker` or `serve`.
PROCESS = (
    count(
        "max-open-sessions",
        "maximum sessions in memory; further arrivals get fallback ads",
        _DEFAULTS["max_open_sessions"],
    ),
    Option("token-secret", "secret that signs the tokens of decisions, at least 16 bytes", parse=Secret, secret=True),
    Option("token-secret-file", "file with the secret that signs the tokens", metavar="FILE"),
    *LOG,
)

OPERATION = (
    Option("group", "consumer group of all workers of these topics", default=_DEFAULTS["group"]),
    seconds_option(
        "member-timeout",
        "time after which the partitions of a silent worker are assigned to others",
        _DEFAULTS["member_timeout"],
        least=1_000,
        most=300_000,
    ),
    seconds_option(
        "progress-interval",
        "time between two progress records of a partition",
        _DEFAULTS["progress_interval"],
        least=10,
        most=60_000,
    ),
    Option("web-host", "address of /metrics, /livez and /readyz", default=_DEFAULTS["web_host"]),
    port("web-port", "port of the web server; 0: any free port"),
    *PROCESS,
)


def process_settings(
    kind: Callable[..., Settings], name: str, options: argparse.Namespace, secrets: Sequence[str] = (), **own: Any
) -> Settings:
    """Return the settings of `worker` or `serve` and of its learner process, some its `own`; start the log."""
    signing = secret(options, "token-secret")
    dim = context_dim(options)
    check_fixed(options)
    arms = read_arms(options.catalog, declared=declared_ads(options))
    check_order(options.order, arms)
    settings = filled(
        kind,
        options,
        learner=command("worker.cli.child", name, *getattr(options, "arguments", ())),
        learning=filled(LearningSettings, options, dim=dim or 1),
        dim=dim,
        arms=arms,
        limits=limits(options),
        secret=None if signing is None else token_secret(signing),
        start=start_of(options),
        clock=clock_of(os.environ.get(CLOCK)),
        **own,
    )
    hidden = [*secrets, signing.reveal().decode() if signing is not None else ""]
    log_format.configure(format=options.log_format, level=options.log_level, secrets=hidden)
    return settings


def read(options: argparse.Namespace) -> WorkerSettings:
    """Return the settings of worker and learner process, checked as far as possible without a broker; start the log."""
    brokers = connection(options)
    own = {"connection": brokers, "topics": topic_names(options)}
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
