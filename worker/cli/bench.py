"""`adcascade bench`: the benchmarks of this machine, as ratios within one run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from worker.bench.figures import Figure, busy, figures_table, machine, one_blas_thread
from worker.cli.options.parser import JSON, CommandSpec, Option, count
from worker.console import check_writable, note, progress, write_result
from worker.errors import InputError


def _show(name: str, measured: Iterator[Figure | str], total: int, json: str | None) -> int:
    """Show and write `total` figures; a text among them names the current step.

    A run takes minutes: if it fails, or is interrupted, what was measured before is shown.
    """
    check_writable(json)
    figures: list[Figure] = []
    crowd = busy()
    with one_blas_thread() as blas:
        where = {**machine(), "blas": blas, "blas_threads": 1}
    complete = False
    try:
        with progress(f"bench {name}", total) as bar:
            for figure in measured:
                if isinstance(figure, str):
                    bar.describe(figure)
                    continue
                figures.append(figure)
                bar.describe(figure.name)
                bar.advance()
        complete = True
    finally:
        if figures:
            if crowd:
                note(crowd)
            records = [one.record() for one in figures]
            record = {"bench": name, "machine": where, "busy": crowd, "complete": complete, "figures": records}
            title = f"{where['cpu']}, Python {where['python']}, numpy {where['numpy']}, {blas} on one thread"
            write_result(json, record, f"{title}\n\n{figures_table(figures)}")
    return 0


def _action(name: str, summary: str) -> CommandSpec:
    """Return the command of a benchmark that needs no broker: `worker.bench.<name>`."""

    def run(options: argparse.Namespace) -> int:
        bench = importlib.import_module(f"worker.bench.{name}")
        return _show(name, bench.measure(), bench.FIGURES, options.json)

    examples = (f"adcascade bench {name}", f"adcascade bench {name} --json {name}.json")
    return CommandSpec(name=name, summary=summary, examples=examples, options=(JSON,), run=run)


def run_kafka(options: argparse.Namespace) -> int:
    """Measure the worker on a real broker."""
    from worker.bench.kafka import comparison, soak

    if options.soak:
        return _show("kafka soak", soak.measure(options.broker, count=options.partitions), soak.FIGURES, options.json)
    if options.rebalance:
        from worker.bench.kafka import rebalance

        return _show("kafka rebalance", rebalance.measure(options.broker), rebalance.FIGURES, options.json)
    if options.versions:
        from worker.bench.kafka import new_versions

        measured = new_versions.measure(options.broker, new_versions.Scale())
        return _show("kafka versions", measured, new_versions.FIGURES, options.json)
    if options.overload:
        from worker.bench.kafka import overload

        measured = overload.measure(options.broker, count=options.partitions)
        return _show("kafka overload", measured, overload.FIGURES, options.json)
    scale = comparison.Scale(partitions=options.partitions)
    if options.latency:
        from worker.bench.kafka import rates

        return _show("kafka latency", comparison.measure_latency(options.broker, scale), rates.FIGURES, options.json)
    measured = comparison.measure(options.broker, scale)
    return _show("kafka", measured, comparison.FIGURES, options.json)


def run_http(options: argparse.Namespace) -> int:
    """Measure HTTP, in front of this process or of Kafka."""
    if not options.gateway:
        if options.broker is not None:
            raise InputError("--broker is for --gateway: `adcascade serve` needs none")
        from worker.bench import http

        return _show("http", http.measure(), http.FIGURES, options.json)
    from worker.bench.http import gateway

    return _show("http gateway", gateway.measure(options.broker), gateway.FIGURES, options.json)


CORE = _action(
    "core", "Measure the decision core: planning and closing episodes against a dense loop, growth with K, memory."
)

STREAM = _action(
    "stream",
    "Measure the embedded runner and the learner by itself: speed against a bare codec loop and against only decoding\n"
    "the same facts, decision latency, memory of open sessions.",
)

HTTP = CommandSpec(
    name="http",
    summary=(
        "Measure `adcascade serve` against a plain aiohttp handler that answers a constant: requests per second, the\n"
        "time of an answer at 500 requests per second, and the same beside 10,000 idle connections. The client is a\n"
        "process of its own. With --gateway: `adcascade gateway` against Kafka's own time, at 200 sessions per second."
    ),
    examples=("adcascade bench http", "adcascade bench http --json http.json", "adcascade bench http --gateway"),
    options=(
        Option(
            "gateway",
            "the gateway instead, on a broker that is started for the benchmark",
            flag=True,
            default=False,
        ),
        Option("broker", "broker to measure the gateway on, in place of one of its own", metavar="HOST:PORT"),
        JSON,
    ),
    run=run_http,
)

KAFKA = CommandSpec(
    name="kafka",
    summary=(
        "Measure the worker on a real broker against raw aiokafka and an idiomatic Faust agent: events per second\n"
        "and processor time on a backlog, live time from arrival to decision, recovery. Without --broker it starts a\n"
        "broker of its own, which needs Java 17, and Maven for the first time."
    ),
    examples=(
        "adcascade bench kafka",
        "adcascade bench kafka --broker 127.0.0.1:9092 --json kafka.json",
        "adcascade bench kafka --latency",
        "adcascade bench kafka --rebalance",
        "adcascade bench kafka --versions",
        "adcascade bench kafka --soak",
        "adcascade bench kafka --overload",
    ),
    options=(
        Option("broker", "broker to measure on (default: one that is started for the benchmark)", metavar="HOST:PORT"),
        count("partitions", "partitions of every topic that can have more than one", 4, most=100),
        Option(
            "soak",
            "long run instead: 1,000,000 events, with a worker that is slow for a while; its memory",
            flag=True,
            default=False,
        ),
        Option(
            "latency",
            "only live traffic as a client sees it: 20 to 5,000 arrivals per second on 8 partitions",
            flag=True,
            default=False,
        ),
        Option(
            "rebalance",
            "only the waits of clients while workers join, leave and are killed: 200 arrivals per second",
            flag=True,
            default=False,
        ),
        Option(
            "versions",
            "only live traffic at 200 arrivals per second, with and without a version of 1,000 ads every 10 s",
            flag=True,
            default=False,
        ),
        Option(
            "overload",
            "flat-out traffic for 5 minutes instead, with a low --learn-at-most: lag of the journal, late versions",
            flag=True,
            default=False,
        ),
        JSON,
    ),
    run=run_kafka,
)

COMMAND = CommandSpec(
    name="bench",
    summary="Measure this machine, as ratios within one run.",
    examples=("adcascade bench core", "adcascade bench stream", "adcascade bench http", "adcascade bench kafka"),
    actions=(CORE, STREAM, HTTP, KAFKA),
)
