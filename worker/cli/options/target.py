"""The target of `parameters` and `arms`: the state folder of an embedded runner, or the workers of a Kafka cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace

from worker.cli.options.brokers import BROKER, PREFIX, SECURITY, connection, topic_names
from worker.cli.options.parser import Option, grouped
from worker.cli.options.times import time_option
from worker.embedded.control import LearnerControl, StateFolderControl
from worker.errors import InputError
from worker.serve.control import ServeControl, is_served

TARGET = (
    *grouped(
        "target",
        Option("state", "state folder of `adcascade serve` or of `adcascade demo --state`", metavar="DIR"),
        replace(BROKER, default=None, help="bootstrap brokers of running workers, host:port[,…], without --state"),
        PREFIX,
        time_option("wait", "longest wait for the answer of the learner", 30_000),
    ),
    *SECURITY,
)


def control(options: argparse.Namespace) -> LearnerControl:
    """Return the target of the options. A state folder comes first: variables may name a broker for all commands."""
    if options.state is not None:
        if is_served(options.state):
            return ServeControl(options.state, patience=options.wait / 1000)
        return StateFolderControl(options.state)
    if options.broker is None:
        raise InputError("--state DIR or --broker HOST:PORT is missing: it names the target of this command")
    # Importing the Kafka client takes a while, and a state folder needs none.
    from worker.kafka.control import KafkaControl

    return KafkaControl(connection(options), topic_names(options), timeout=options.wait / 1000)
