"""`adcascade demo`: everything in one process, with simulated users."""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from worker.cli.options.learning import SEED, with_defaults, world
from worker.cli.options.parser import JSON, CommandSpec, Option, count, filled, number, port
from worker.console import check_writable, note, say, stops_on_signals, write_json
from worker.embedded.state import StateFolder
from worker.http.pages import operations
from worker.logs.format import LogWriter
from worker.metrics import Metrics
from worker.simulation.demo.report import DemoView, can_draw, check_report, summary, summary_rows, write_report
from worker.simulation.demo.run import TICK, Beside, Demo, DemoSettings, additive, check_state
from worker.simulation.reporting import REFRESH, laid_out, live_view
from worker.web.status import status_routes

DEFAULTS = DemoSettings()
NO_REPORT = "none"

OPTIONS = (
    *world(DEFAULTS),
    *with_defaults(DEFAULTS, "model", "intercept", "answers", "standardise", "policy", "bonus", "beta", "ridge"),
    *with_defaults(DEFAULTS, "random-share", "control-share", "control", "learn-at-most"),
    count("users", "mean number of users per episode", DEFAULTS.users),
    count("episodes", "number of episodes, windows of a minute", DEFAULTS.episodes),
    SEED,
    count(
        "partitions",
        "partitions of arrivals and clicks; the results do not depend on them",
        DEFAULTS.partitions,
        most=1024,
    ),
    Option(
        "beside",
        "second run with the same users and the additive model, for comparison, in a separate process",
        flag=True,
        default=True,
    ),
    Option("state", "state folder; a run continues from it, also after a kill -9", metavar="DIR"),
    Option("record", "log of all records of this run (.gz: compressed, -: standard output)", metavar="FILE"),
    Option(
        "report",
        "folder of the report, or none (default: DIR/report with --state DIR, else a temporary folder)",
        metavar="DIR",
    ),
    port("metrics-port", "port of the status page http://127.0.0.1:PORT/ and of /metrics; 0: any free port"),
    Option("speed", "maximum seconds of event time per second (default: as fast as possible)", parse=number(above=0)),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Run the demo; print a summary, write JSON, log and report."""
    # aiohttp takes a while to import; --help and wrong options need not wait for it.
    from worker.http.server import WebServer

    settings = filled(DemoSettings, options)
    _check(options, settings)
    began = time.perf_counter()
    metrics = Metrics()
    metrics.learning(here=True)
    with ExitStack() as stack:
        state = stack.enter_context(StateFolder(options.state)) if options.state else None
        if state is not None:
            check_state(state, settings)  # before a log is begun
        routes = {**operations(metrics.registry, lambda: None), **status_routes(metrics, runner="demo")}
        server = stack.enter_context(WebServer(routes, port=options.metrics_port))
        log = stack.enter_context(LogWriter(options.record)) if options.record else None
        other = additive(settings) if options.beside else None
        beside = stack.enter_context(Beside(other)) if other else None
        demo = Demo(settings, state=state, watchers=[metrics], tap=log)
        if demo.resumed:
            rest = f"; {log.name} has only the rest" if log else ""
            note(f"continuing after {len(demo.rows)} episodes{rest}")
        stopped = _run(demo, beside, DemoView(demo, server.url, beside), options.speed)
        seconds = time.perf_counter() - began
        folder = _report_folder(options)
        page = None if folder is None else write_report(demo, folder, seconds=seconds, beside=beside)
    _print_summary(options, demo, beside, page, seconds)
    return 128 + stopped if stopped else 0


def _check(options: argparse.Namespace, settings: DemoSettings) -> None:
    """Refuse, before any work, wrong settings and files that could not be written."""
    settings.learning()
    check_writable(options.json, options.record)
    if options.report not in (None, NO_REPORT):
        check_report(Path(options.report))


def _run(demo: Demo, beside: Beside | None, view: DemoView, speed: float | None) -> int:
    """Run the demo to its end or to the first signal; return the number of the signal, else 0."""
    began, from_time = time.perf_counter(), demo.time
    with stops_on_signals() as came, live_view(view) as show:
        while not demo.finished and not came:
            demo.step()
            if beside is not None:
                beside.follow(len(demo.rows))
            show()
            if speed is not None:
                ahead = (demo.time - from_time) / TICK / speed - (time.perf_counter() - began)
                time.sleep(max(0.0, ahead))
        # Mostly the run beside is as far already. After a restart it began anew, and is behind.
        while beside is not None and not came and not beside.follow(len(demo.rows), wait=REFRESH):
            show()
    return came[0] if came else 0


def _report_folder(options: argparse.Namespace) -> Path | None:
    if options.report is not None:
        return None if options.report == NO_REPORT else Path(options.report)
    return Path(options.state) / "report" if options.state else Path(tempfile.mkdtemp(prefix="adcascade-demo-"))


def _print_summary(
    options: argparse.Namespace, demo: Demo, beside: Beside | None, page: Path | None, seconds: float
) -> None:
    numbers = summary(demo, beside)
    write_json(options.json, {**numbers, "seconds": round(seconds, 3), "report": page and str(page)})
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
        "adcascade demo --environment rare --policy ucbbp --seed 7 --report demo",
        "adcascade demo --users 400 --episodes 300 --json -",
        "adcascade demo --state demo.state     # stop or kill it, start it again: it continues",
        "adcascade demo --record demo.log.gz && adcascade replay demo.log.gz --verify",
        "adcascade demo --speed 60 --metrics-port 9464     # a minute per second, for Prometheus to scrape",
    ),
    options=OPTIONS,
    run=run,
)
