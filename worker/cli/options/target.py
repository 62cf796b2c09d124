"""Where `parameters` and `arms` look: the options that say it, and what they lead to."""

from __future__ import annotations

import argparse

from worker.cli.options.brokers import BROKER, PREFIX, SECURITY, connection, topic_names, without_default
from worker.cli.options.learning import Duration, duration
from worker.cli.options.parser import Option
from worker.embedded.control import LearnerControl, StateFolderControl
from worker.errors import InputError

STATE = Option(name="state", help="the state folder of an embedded runner (`adcascade demo --state`)", metavar="DIR")
WAIT = Option(
    name="wait", help="how long to wait for the learner's answer to an order", parse=duration, default=Duration(30_000)
)

PLACE = (
    STATE,
    without_default(BROKER, help="brokers of running workers, host:port[,host:port…]; if there is no --state"),
    PREFIX,
    WAIT,
    *SECURITY,
)


def control(options: argparse.Namespace) -> LearnerControl:
    """Return the place that the options name; a state folder comes first, as brokers may be set for everything."""
    if options.state is not None:
        return StateFolderControl(options.state)
    if options.broker is None:
        raise InputError("--state DIR or --broker HOST:PORT is missing: say where the parameters are kept")
    # The Kafka client takes a while to import; a state folder does without it.
    from worker.kafka.control import KafkaControl

    return KafkaControl(connection(options), topic_names(options), patience=options.wait / 1000)
