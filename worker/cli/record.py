"""`adcascade record`: write topics of Kafka to a log that `replay` checks."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from worker.cli.options.brokers import CONNECTION, connection
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.times import time_span, timestamp
from worker.console import check_writable, note, progress, say, stops_on_signals, table, write_json
from worker.errors import InputError
from worker.logs.format import LogWriter
from worker.runtime.clock import wall_clock
from worker.stream.events import TOPICS
from worker.stream.topology import Topics

if TYPE_CHECKING:
    from worker.logs.record import Recorded, Recorder  # with a Kafka client, which only this command needs


FLUSHED_EVERY = 1.0  # seconds, while new records are recorded


def topic_list(text: str) -> tuple[str, ...]:
    """Return the topics of a list, by their names without prefix.

    >>> topic_list("arrivals, clicks")
    ('arrivals', 'clicks')
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in TOPICS]
    if unknown or not names:
        raise ValueError(f"unknown topic {unknown[0] if unknown else text!r}; some of {','.join(TOPICS)}")
    return names


def edge(name: str, field: str, word: str, help: str) -> Option:
    """Return the option for an edge of the `Span` that is recorded; `word` stands for that of the topics.

    >>> option = edge("from", "since", "earliest", "start")
    >>> option.parse("1970-01-01T00:00:01Z"), option.parse("earliest")
    ({'since': 1000}, {})
    """

    def parse(text: str) -> dict[str, int]:
        return {} if text == word else {field: timestamp(text, wall_clock())}

    return Option(name, help, parse=parse, metavar="WHERE", default={}, show=lambda _: word)


OPTIONS = (
    Option("file", "log to write, a new file; compressed if it ends in .gz; - for standard output", positional=True),
    *CONNECTION,
    edge("from", "since", "earliest", "start: earliest, a time (2026-01-31T12:00:00Z), or an age (10m)"),
    edge("until", "until", "end", "end: the current end of the topics, or a time, also in the future"),
    Option("live", "recording of new records until Ctrl-C", flag=True, default=False),
    Option(
        "topics",
        "topics, names without prefix, separated by commas",
        parse=topic_list,
        default=TOPICS,
        metavar="NAMES",
        show=",".join,
    ),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Record topics; a signal ends the recording with a complete file."""
    if options.live and options.until:
        raise InputError("--live records until Ctrl-C: --until contradicts it")
    if options.json == "-" and options.file == "-":
        raise InputError("the log and --json cannot both go to standard output")
    from worker.logs.record import Recorder, Span

    check_writable(options.file, options.json)
    topics = Topics(options.prefix)
    # Fails before the file is created.
    span = Span(**getattr(options, "from"), **options.until, live=options.live)
    recorder = Recorder(connection(options), topics, options.topics, span)
    began = time.perf_counter()
    with LogWriter(options.file) as log:
        recorded, stopped = _record(recorder, log)
    seconds = time.perf_counter() - began
    write_json(options.json, as_json(recorded, seconds, topics, stopped=bool(stopped)))
    (note if "-" in (options.file, options.json) else say)(summary(log.name, recorded, seconds))
    if stopped and not options.live:
        note("stopped before the end; the log is complete up to this point")
        return 128 + stopped
    return 0


def _record(recorder: Recorder, log: LogWriter) -> tuple[Recorded, int]:
    """Record with a progress bar; return the result, and the signal that ended it or 0."""
    bar, flushed = None, time.monotonic()
    with ExitStack() as stack:
        came = stack.enter_context(stops_on_signals())

        def report(total: int | None, written: int) -> None:
            nonlocal bar, flushed
            bar = bar or stack.enter_context(progress(f"recording {log.name}", total, unit="records"))
            bar.advance(written)
            if total is None and time.monotonic() - flushed > FLUSHED_EVERY:
                log.flush()
                flushed = time.monotonic()

        return recorder.run(log, lambda: bool(came), report), came[0] if came else 0


def as_json(recorded: Recorded, seconds: float, topics: Topics, *, stopped: bool) -> dict[str, Any]:
    """Return the result in its JSON form; topics without prefix, times in milliseconds since the epoch."""
    return {
        "records": recorded.counts.total(),
        "topics": {name: recorded.counts[f"{topics.prefix}.{name}"] for name in TOPICS},
        "first": recorded.first,
        "last": recorded.last,
        "stopped": stopped,
        "seconds": round(seconds, 3),
    }


def summary(name: str, recorded: Recorded, seconds: float) -> str:
    """Return the result for people."""
    rate = recorded.counts.total() / max(seconds, 1e-9)
    span = time_span(recorded.first, recorded.last)
    text = f"{name}: {recorded.counts.total():,} records{span}, in {seconds:.1f} s ({rate:,.0f}/s)"
    rows = [[topic, f"{count:,}"] for topic, count in sorted(recorded.counts.items())]
    return f"{text}\n\n{table(['topic', 'records'], rows)}" if rows else text


COMMAND = CommandSpec(
    name="record",
    summary=(
        "Write topics of Kafka to a log of JSON lines, as kcat -J does; each partition keeps its order.\n"
        "`adcascade replay` checks every decision and every version of a log of all topics. Parameters and their\n"
        "history are always read from the beginning of their topics. Versions that neither has are not in the log, so\n"
        "that replay counts their decisions as unverified."
    ),
    examples=(
        "adcascade record log.gz && adcascade replay log.gz --verify",
        "adcascade record log.gz --from 2h",
        "adcascade record log.gz --from 2026-01-31T12:00:00Z --until 2026-01-31T13:00:00Z",
        "adcascade record live.jsonl --live",
        "adcascade record - --topics decisions,dead-letters | jq .payload",
    ),
    options=OPTIONS,
    run=run,
)
