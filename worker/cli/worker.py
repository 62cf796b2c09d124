"""`adcascade worker`: the topology on Kafka."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

from worker.cli import log_format as logs_json
from worker.cli.options.brokers import CONNECTION, connection, secret, topic_names
from worker.cli.options.catalog import CATALOG, read_arms
from worker.cli.options.learning import LEARNING, LIMITS, learning_settings, limits
from worker.cli.options.parser import CommandSpec, Option, integer
from worker.cli.options.times import Duration, duration
from worker.errors import InputError
from worker.kafka.connection import Connection
from worker.secret import Secret
from worker.stream.codec import Limits
from worker.stream.parameters import Arm, LearningSettings
from worker.stream.tokens import token_secret
from worker.stream.topology import Topics

#: For tests: a file with the time, in place of the machine's clock.
CLOCK = "ADCASCADE_TEST_CLOCK"

GROUP = Option(name="group", help="the consumer group that all workers of these topics share", default="adcascade")

OPERATION = (
    GROUP,
    Option(
        name="member-timeout",
        help="how long the group waits for a silent worker before others take its partitions",
        parse=duration,
        default=Duration(10_000),
    ),
    Option(
        name="progress-interval",
        help="how often a partition says how far it is",
        parse=duration,
        default=Duration(1000),
    ),
    Option(
        name="changelog-replication",
        help="replicas of the changelog, should `adcascade topics create` not have made it",
        parse=integer(least=1),
        default=1,
    ),
    Option(name="token-secret", help="signs the tokens of decisions, at least 16 bytes", parse=Secret, secret=True),
    Option(name="token-secret-file", help="a file with the secret that signs tokens", metavar="FILE"),
    Option(name="web-host", help="address of /metrics, /livez and /readyz", default="127.0.0.1"),
    Option(name="web-port", help="its port; 0 takes a free one", parse=integer(least=0, most=65535), default=0),
    Option(name="log-format", help="json, or text [text on a terminal, else json]", choices=logs_json.FORMATS),
    Option(name="log-level", help="from which level on", choices=logs_json.LEVELS, default="info"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What worker and learner are both told, checked as far as that goes without a broker."""

    link: Connection
    names: Topics
    learning: LearningSettings  # for whatever the dimension will turn out to be
    arms: tuple[Arm, ...]
    limits: Limits
    secret: Secret | None


def read(options: argparse.Namespace) -> Told:
    """Check the options, and begin to log as they say."""
    link = connection(options)
    signing = secret(options, "token-secret")
    told = Told(
        link=link,
        names=topic_names(options),
        learning=learning_settings(options, options.dim or 1),
        arms=read_arms(options.catalog),
        limits=limits(options),
        secret=None if signing is None else token_secret(signing),
    )
    secrets = [link.password or "", signing.reveal().decode() if signing is not None else ""]
    logs_json.configure(format=options.log_format, level=options.log_level, secrets=secrets)
    return told


def run(options: argparse.Namespace) -> int:
    """Check everything that can be checked, then serve until told to stop."""
    if not options.group:
        raise InputError("--group is empty")
    if not 1_000 <= options.member_timeout <= 300_000:
        raise InputError(f"--member-timeout must be between 1s and 300s, not {options.member_timeout}")
    if not 10 <= options.progress_interval <= 60_000:
        raise InputError(f"--progress-interval must be between 10ms and 60s, not {options.progress_interval}")
    told = read(options)

    # Faust takes half a second to import; --help and wrong options need not wait for it.
    from worker.kafka.faust.app import Options
    from worker.kafka.worker import WorkerSettings, run_worker

    return run_worker(
        WorkerSettings(
            transport=Options(
                connection=told.link,
                names=told.names,
                group=options.group,
                learner=(sys.executable, "-m", "worker.cli.learner_process", *options.arguments),
                replication=options.changelog_replication,
                session_timeout=options.member_timeout / 1000,
                progress_interval=options.progress_interval / 1000,
            ),
            learning=told.learning,
            dim=options.dim,
            arms=told.arms,
            limits=told.limits,
            secret=told.secret,
            web_host=options.web_host,
            web_port=options.web_port,
            clock_file=os.environ.get(CLOCK),
        )
    )


COMMAND = CommandSpec(
    name="worker",
    summary="Serve from Kafka: any number of workers share the partitions; one of them learns.",
    examples=(
        "adcascade topics create && adcascade worker --dim 16 --catalog arms.csv",
        "adcascade worker --broker kafka-1:9092,kafka-2:9092 --web-host 0.0.0.0 --web-port 8080",
        "ADCASCADE_SASL_PASSWORD_FILE=/run/secrets/kafka adcascade worker --broker kafka:9093 --tls-ca ca.pem "
        "--sasl-username ads",
        "adcascade worker --config worker.toml",
    ),
    options=(*CONNECTION, CATALOG, *LEARNING, *LIMITS, *OPERATION),
    run=run,
)
