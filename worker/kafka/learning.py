"""The learner of a worker on Kafka, as the process that it is (see `worker.kafka.learner`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from worker.errors import InputError
from worker.kafka import processors as kafka_ports
from worker.kafka.clients import run_client
from worker.kafka.connection import Connection
from worker.kafka.control import published_versions
from worker.kafka.learner import run
from worker.kafka.processors import JournalFold, Published
from worker.metrics import Metrics
from worker.stream.learner import Learner
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.topology import Topics


def run_learner(
    connection: Connection, names: Topics, *, learning: LearningSettings, dim: int | None, arms: tuple[Arm, ...]
) -> int:
    """Learn until the worker ends this; the arguments are those of the worker."""
    # Which versions there are, the worker says.
    logging.getLogger(kafka_ports.__name__).setLevel(logging.WARNING)
    history = run_client(connection, published_versions(connection, names))
    learning = fitting(learning, dim, history)
    sink = Published(Parameters.first(learning, arms), history, Metrics())
    return run(connection, names, sink, lambda: JournalFold(Learner(learning, arms, sink.history)))


def fitting(learning: LearningSettings, dim: int | None, history: Sequence[Parameters]) -> LearningSettings:
    """Return the settings with the dimension that was given, else with that of the published parameters.

    Raises `InputError` if there is neither, or if they differ.
    """
    newest = history[-1].settings.dim if history else None
    if dim is None and newest is None:
        raise InputError("--dim is missing: how many numbers has a context? (no parameters are published that say it)")
    if dim is not None and newest is not None and dim != newest:
        raise InputError(
            f"--dim is {dim}, but the published parameters have {newest}: a model of another size needs "
            "topics of its own (--prefix)"
        )
    return replace(learning, dim=dim or newest or 0)
