"""`adcascade gateway`: HTTP in front of Kafka."""

from __future__ import annotations

import argparse
import asyncio

from worker.cli import log_format
from worker.cli.options.brokers import CONNECTION, connection
from worker.cli.options.learning import LIMITS
from worker.cli.options.parser import CommandSpec, count, filled
from worker.cli.options.process import HTTP, LOG, http_settings
from worker.runtime.process import collect_garbage_rarely
from worker.stream.decoding import Limits
from worker.stream.topology import Topics

OPTIONS = (
    *CONNECTION,
    *HTTP,
    count("max-remembered-sessions", "most sessions of which the last decision is remembered", 100_000),
    *LIMITS,
    *LOG,
)


def run(options: argparse.Namespace) -> None:
    """Serve until a signal."""
    from worker.gateway.run import run_gateway
    from worker.kafka.clients import partition_counts

    reached, topics = connection(options), Topics(options.prefix)
    http, limits, most = http_settings(options), filled(Limits, options), options.max_remembered_sessions
    # Before there is a log, so that an error is one line.
    partition_counts(reached, topics.parameters, topics.arrivals, topics.clicks, topics.decisions)
    collect_garbage_rarely()  # a search among a hundred thousand remembered sessions takes as long as some answers may
    log_format.configure(format=options.log_format, level=options.log_level, secrets=reached.secrets)
    asyncio.run(run_gateway(reached, topics, http=http, limits=limits, max_remembered_sessions=most))


COMMAND = CommandSpec(
    name="gateway",
    summary=(
        "Serve HTTP and JSON in front of Kafka, for clients in any language: the next ad of a session, and feedback.\n"
        "Any number of gateways may run. They keep nothing: all decisions are the workers'."
    ),
    examples=(
        "adcascade gateway --port 8080",
        "curl -s 127.0.0.1:8080/v1/sessions -d '{\"context\": [0.1, 0.2, 0.3, 0.4, 0.5]}'",
        "adcascade gateway --broker kafka-1:9092,kafka-2:9092 --host 0.0.0.0 --api-keys keys.txt --deadline 30ms",
    ),
    options=OPTIONS,
    run=run,
)
