"""The source of recorded sessions: a log, a state folder or the topics of Kafka, read as a log.

A folder has the journal of the time that `serve --keep` gives, the last versions and their thinned history. It has no
arrivals, clicks and decisions; the journal says what came of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Literal

from worker.cli.options.brokers import connection
from worker.console import progress
from worker.errors import InputError
from worker.logs.findings import Findings
from worker.logs.format import NO_TIMESTAMP
from worker.logs.ordered import OrderedLog, empty_log, read_log
from worker.serve.state import StateView
from worker.stream.topology import ONLY_PARTITION, Record, Topics


def kind_of_source(options: argparse.Namespace) -> Literal["log", "state", "broker"]:
    """Return the one source of the options. A folder comes before a broker that only a variable or a file names."""
    words = [word.partition("=")[0] for word in options.arguments]
    flags = [f"--{name}" for name in ("state", "broker") if f"--{name}" in words]
    given = [*([options.log] if options.log is not None else []), *flags]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are several sources: give one log, --state DIR or --broker HOST:PORT")
    if options.log is not None:
        return "log"
    if options.state is not None and "--broker" not in flags:
        return "state"
    if options.broker is None:
        raise InputError("the source is missing: a log, --state DIR or --broker HOST:PORT")
    return "broker"


@contextmanager
def source(
    options: argparse.Namespace, names: Collection[str], *, since: int | None = None, session: str | None = None
) -> Iterator[OrderedLog]:
    """Open the one source of the options as a log, to be used in this context.

    Of Kafka the topics of these `names` are read, from the time `since` on. With a `session`, only what is about it.
    """
    kind, topics = kind_of_source(options), Topics(options.prefix)
    if kind == "log":
        with read_log(options.log, Findings(), topics=topics, session=session) as log:
            yield log
        return
    with empty_log(topics, Findings(), session=session) as log:
        if kind == "state":
            with StateView(options.state) as state:
                add_state(state, topics, log)
        else:
            from worker.logs.record import Recorder, Span  # with a Kafka client, which only this source needs

            recorder = Recorder(connection(options), topics, names, Span(since=since))
            with progress("reading topics", unit="records") as bar:
                recorder.run(log.add_record, lambda: False, lambda total, written: bar.advance(written))
        yield log


def add_state(state: StateView, topics: Topics, log: OrderedLog) -> None:
    """Add a state folder to a log, also while a process writes to it: the journal first, then the versions."""

    def put(topic: str, offset: int, key: bytes | None, value: bytes | None) -> None:
        log.add_record(Record(topic, ONLY_PARTITION, offset, NO_TIMESTAMP, key, value))

    for offset, value in state.journal():
        put(topics.journal, offset, None, value)
    offsets = count()
    for slot in state.slots():
        put(topics.parameters_history, next(offsets), slot.encode(), state.in_slot(slot))
    for value in state.parameters():
        put(topics.parameters, next(offsets), None, value)
