"""`adcascade bench`: the benchmarks of this machine, as ratios within one run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import asdict

from worker.bench.figures import Figure, figures_table, machine, measuring
from worker.cli.options.parser import JSON, CommandSpec, Option, count
from worker.console import progress, write_result


def _show(name: str, measured: Iterator[Figure | str], json: str | None) -> None:
    """Show and write figures; a text among them names the current step."""
    figures: list[Figure] = []
    with measuring() as blas, progress(f"bench {name}") as bar:
        for figure in measured:
            if isinstance(figure, str):
                bar.describe(figure)
                continue
            figures.append(figure)
            bar.describe(figure.name)
            bar.advance()
    where = {**machine(), "blas": blas, "blas_threads": 1}
    record = {"bench": name, "machine": where, "figures": [asdict(one) | {"met": one.met} for one in figures]}
    title = f"{where['cpu']}, Python {where['python']}, numpy {where['numpy']}, {blas} on one thread"
    write_result(json, record, f"{title}\n\n{figures_table(figures)}")


def _action(name: str, summary: str) -> CommandSpec:
    """Return the command of a benchmark that needs no broker: `worker.bench.<name>`."""

    def run(options: argparse.Namespace) -> None:
        bench = importlib.import_module(f"worker.bench.{name}")
        _show(name, bench.measure(), options.json)

    examples = (f"adcascade bench {name}", f"adcascade bench {name} --json {name}.json")
    return CommandSpec(name=name, summary=summary, examples=examples, options=(JSON,), run=run)


def run_kafka(options: argparse.Namespace) -> None:
    """Measure the worker on a real broker."""
    from worker.bench import kafka

    parts = [part for part in ("latency", "backlog") if getattr(options, part)] or ["latency", "backlog"]
    _show("kafka", kafka.measure(options.broker, options.partitions, parts), options.json)


CORE = _action(
    "core", "Measure the decision core: planning slates and closing an episode, with 50, 1,000 and 100,000 ads."
)

STREAM = _action("stream", "Measure the embedded runner against a bare codec loop, and the learner by itself.")

HTTP = _action(
    "http",
    "Measure `adcascade serve` against a plain aiohttp handler that answers a constant: requests per second, and the\n"
    "time of an answer at 500 requests per second. The client is a separate process.",
)

KAFKA = CommandSpec(
    name="kafka",
    summary=(
        "Measure the worker on a real broker against raw aiokafka, plain librdkafka and an idiomatic Faust agent: the\n"
        "time from arrival to decision as a client sees it, at 20, 200 and 1,000 arrivals per second; arrivals per\n"
        "second on a backlog; processor time. Without --broker it starts one, which needs Java 17, and Maven for the\n"
        "first time."
    ),
    examples=(
        "adcascade bench kafka",
        "adcascade bench kafka --broker 127.0.0.1:9092 --json kafka.json",
        "adcascade bench kafka --latency",
        "adcascade bench kafka --backlog",
    ),
    options=(
        Option("broker", "broker to measure on (default: one that is started for the benchmark)", metavar="HOST:PORT"),
        count("partitions", "partitions of every topic that can have more than one", 8, most=100),
        Option("latency", "only the time from arrival to decision", flag=True, default=False),
        Option("backlog", "only arrivals per second on a backlog", flag=True, default=False),
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
