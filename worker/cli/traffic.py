"""`adcascade traffic`: simulated users against Kafka."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from worker.cli.options.brokers import CONNECTION, connection
from worker.cli.options.learning import SEED, WORLD
from worker.cli.options.parser import JSON, CommandSpec, Option, count, defaulted, filled, flag, number, port
from worker.cli.options.times import duration_range, time_option
from worker.console import note, stops_on_signals, write_result
from worker.errors import InputError
from worker.http.pages import operations
from worker.kafka.connection import Connection
from worker.runtime.process import collect_garbage_rarely
from worker.simulation.traffic.generator import Traffic, TrafficSettings
from worker.simulation.traffic.report import TrafficLines, summary, summary_rows, traffic_registry
from worker.simulation.worth import laid_out
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

_share = number(least=0, most=1)

OPTIONS = defaulted(
    TrafficSettings,
    *CONNECTION,
    Option("rate", "mean number of users per second", parse=number(above=0)),
    count("sessions", "number of sessions (default: until Ctrl-C)"),
    time_option("duration", "duration, such as 30s or 10m (default: until Ctrl-C)"),
    *WORLD,
    SEED,
    Option(
        "look",
        "viewing time of a display, shortest-longest",
        parse=duration_range,
        show=lambda look: "-".join(f"{end / 1000:g}s" for end in look),
    ),
    time_option("patience", "maximum length of a visit; less than the session timeout"),
    Option("duplicates", "share of records sent twice", parse=_share),
    time_option("disorder", "maximum delay of records out of order; less than the lateness"),
    Option("silence", "share of users who never answer", parse=_share),
    Option("poison", "unusable records, relative to the number of users", parse=_share),
    Option(
        "prefetching",
        "share of clients that show a whole slate without waiting for further decisions",
        parse=_share,
    ),
    port("metrics-port", "port of http://127.0.0.1:PORT/metrics; 0: any free port"),
    Option(
        "write-arms",
        "file for the arms of this world (JSON, for `adcascade worker --catalog FILE`); no traffic",
        metavar="FILE",
    ),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Write the arms, or run the traffic to its end and print a summary."""
    settings = filled(TrafficSettings, options)
    if options.write_arms is not None:
        _write_arms(settings, options.write_arms)
        return 0
    from worker.kafka.parameters import published_versions

    reached, topics = connection(options), Topics(options.prefix)
    versions = published_versions(reached, topics)
    if versions:
        check_fits(settings, versions[-1])
    else:
        note(f"{topics.parameters} is empty: users wait until a worker starts")
    collect_garbage_rarely()  # a search among tens of thousands of small tuples takes a fifth of the time
    traffic = Traffic(settings, now=time.time_ns())
    began = time.perf_counter()
    try:
        stopped = asyncio.run(_run(reached, topics, traffic, options.metrics_port))
    finally:
        if traffic.counts.sessions:  # also if the connection to the brokers was lost
            traffic.settle(time.time_ns())
            _print_summary(options, summary(traffic, time.perf_counter() - began))
    return 128 + stopped if stopped else 0


def _write_arms(settings: TrafficSettings, path: str) -> None:
    arms = [{"arm": arm.arm, "reward": arm.reward} for arm in settings.world().catalogue()]
    text = (
        f"wrote {len(arms)} arms to {path}; serve them with\n"
        f"  adcascade worker --dim {settings.dim} --horizon {settings.horizon} --catalog {path}"
    )
    write_result(path, arms, text)


def check_fits(settings: TrafficSettings, served: Parameters) -> None:
    """Refuse a world that the workers do not serve: records would be dead letters, or the regret would be wrong."""
    there, arms = served.settings, {arm.arm: arm for arm in served.arms}
    for name in ("dim", "horizon", "repeats"):
        if getattr(there, name) != getattr(settings, name):
            shown, wanted = (flag(name, getattr(s, name)) for s in (there, settings))
            raise InputError(f"the workers have {shown}, the traffic has {wanted}: they must be equal")
    catalogue = settings.world().catalogue()
    unknown = [arm.arm for arm in catalogue if arm.arm not in arms]
    if unknown:
        raise InputError(
            f"the workers have no arm {unknown[0]}: start them with the file of adcascade traffic --write-arms"
        )
    other = [arm for arm in catalogue if abs(arms[arm.arm].reward - arm.reward) > 1e-12]
    if other:
        note(
            f"{len(other)} arms have another reward here than in the workers, such as {other[0].arm}: "
            f"{other[0].reward:g} and {arms[other[0].arm].reward:g}; revenue and regret use the former"
        )


async def _run(reached: Connection, topics: Topics, traffic: Traffic, port: int) -> int:
    """Run the traffic with lines of progress and metrics; return the number of the signal that ended it, else 0."""
    from worker.client.kafka import KafkaTransport
    from worker.http.server import WebServer
    from worker.simulation.traffic.client import run_traffic

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    with (
        stops_on_signals(lambda: loop.call_soon_threadsafe(stop.set)) as came,
        WebServer(operations(traffic_registry(traffic), lambda: None), port=port) as server,
    ):
        note(f"metrics: {server.url}/metrics")
        lines, began = TrafficLines(traffic), loop.time()
        transport = KafkaTransport(reached, topics)
        await run_traffic(transport, traffic, stop=stop, show=lambda: lines.show(loop.time() - began))
    return came[0] if came else 0


def _print_summary(options: argparse.Namespace, numbers: dict[str, Any]) -> None:
    settings = numbers["settings"]
    title = f"adcascade traffic: {settings['environment']}, seed {settings['seed']}, {numbers['seconds']:.1f} s"
    write_result(options.json, numbers, f"{title}\n\n{laid_out(summary_rows(numbers))}")


COMMAND = CommandSpec(
    name="traffic",
    summary=(
        "Run simulated users against Kafka: send arrivals and answer the decisions with passes and clicks. The true\n"
        "click model is known, so it reports the revenue that the slates miss (pseudo-regret), and the latency of\n"
        "decisions at the client. The workers must serve the arms of the same world (--write-arms)."
    ),
    examples=(
        "adcascade traffic --write-arms arms.json",
        "adcascade topics create && adcascade worker --dim 5 --horizon 5 --catalog arms.json &",
        "adcascade traffic --rate 200 --duration 10m",
        "adcascade traffic --rate 1000 --sessions 100000 --json -",
        "adcascade traffic --rate 50 --look 0.2s-1s --disorder 2s --duplicates 0.1 --poison 0.05",
    ),
    options=OPTIONS,
    run=run,
)
