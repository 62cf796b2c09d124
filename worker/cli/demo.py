"""`adcascade demo`: everything in one process, with simulated users."""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from worker.bandit.additive import AdditiveModel
from worker.cli.options.learning import SEED, WORLD, check_fixed, setting
from worker.cli.options.parser import JSON, CommandSpec, Option, count, defaulted, filled, port
from worker.console import note, say, stops_on_signals, write_json
from worker.http.pages import operations
from worker.logs.format import LogWriter
from worker.metrics.observer import Metrics
from worker.simulation.demo.report import can_draw, write_report
from worker.simulation.demo.run import Demo, DemoSettings, FinishedRun, beside, received_run
from worker.simulation.demo.summary import summary, summary_rows
from worker.simulation.demo.view import REFRESH, live_view
from worker.simulation.worth import laid_out
from worker.web.status import status_routes

LEARNED = ("model", "intercept", "answers", "standardise", "policy", "bonus", "beta", "ridge")
COMPARED = ("random-share", "control-share", "control", "order")
NO_REPORT = "none"
PREFIX, PAGE = "adcascade-demo-", "report.html"  # of the temporary folder and file

OPTIONS = defaulted(
    DemoSettings,
    *WORLD,
    *map(setting, (*LEARNED, *COMPARED)),
    count("users", "mean number of users per episode"),
    count("episodes", "number of episodes, windows of a minute"),
    SEED,
    Option(
        "beside",
        "second run with the same users and the additive model, for comparison, in a separate process",
        flag=True,
        default=True,
    ),
    Option("record", "log of all records of this run (.gz: compressed, -: standard output)", metavar="FILE"),
    Option("report", "page of the report, or none (default: a temporary file)", metavar="FILE"),
    port("metrics-port", "port of the status page http://127.0.0.1:PORT/ and of /metrics; 0: any free port"),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Run the demo; print a summary, write JSON, log and report."""
    # aiohttp takes a while to import; --help and wrong options need not wait for it.
    from worker.http.server import WebServer

    check_fixed(options)
    settings = filled(DemoSettings, options)
    page = None if options.report == NO_REPORT else options.report
    began = time.perf_counter()
    metrics = Metrics()
    metrics.learning(here=True)
    with ExitStack() as stack:
        routes = {**operations(metrics.registry, lambda: None), **status_routes(metrics, runner="demo")}
        server = stack.enter_context(WebServer(routes, port=options.metrics_port))
        log = stack.enter_context(LogWriter(options.record)) if options.record else None
        compares = options.beside and settings.model != AdditiveModel.name
        additive = stack.enter_context(beside(settings)) if compares else None
        demo, other = Demo(settings, metrics=metrics, tap=log), None
        with stops_on_signals() as stopped, live_view(demo, server.url) as show:
            while not (demo.finished or stopped):
                demo.step()
                show()
            while additive is not None and not stopped and not additive.poll(REFRESH):
                show()
        if additive is not None and not stopped:
            other = received_run(additive)
        seconds = time.perf_counter() - began
        if options.report != NO_REPORT:
            page = page or str(Path(tempfile.mkdtemp(prefix=PREFIX)) / PAGE)
            write_report(demo, Path(page), seconds=seconds, other=other)
    _print_summary(options, demo, other, page, seconds)
    return 128 + stopped[0] if stopped else 0


def _print_summary(
    options: argparse.Namespace, demo: Demo, other: FinishedRun | None, page: str | None, seconds: float
) -> None:
    numbers = summary(demo, other)
    write_json(options.json, {**numbers, "seconds": round(seconds, 3), "report": page})
    report = f"report: {page}" + ("" if can_draw() else " (plots need matplotlib: pip install 'adcascade[lab]')")
    if "-" in (options.json, options.record):
        if page is not None:
            note(report)
        return
    settings = demo.settings
    title = f"adcascade demo: {settings.environment}, {settings.model} model, {settings.policy}, seed {settings.seed}"
    say("\n\n".join([title, laid_out(summary_rows(numbers, seconds)), *([report] if page else [])]))


COMMAND = CommandSpec(
    name="demo",
    summary="Run everything in one process: simulated users, live view, metrics, and a report at the end.",
    examples=(
        "adcascade demo",
        "adcascade demo --environment leaving     # users leave, and one ad never gets an answer",
        "adcascade demo --environment rare --policy ucbbp --seed 7 --report demo.html",
        "adcascade demo --users 400 --episodes 300 --json -",
        "adcascade demo --record demo.log.gz && adcascade replay demo.log.gz --verify",
        "adcascade demo --episodes 100000 --metrics-port 9464     # for Prometheus to scrape",
    ),
    options=OPTIONS,
    run=run,
)
