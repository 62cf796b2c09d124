"""The worker on a real broker against plain echoes and an idiomatic Faust agent, in one run with the same arrivals.

In every round each of the four starts on topics of its own, is measured, and ends; so a machine that is slower for a
while is slower for all of them. Ratios are taken round by round.

Latency: a client sends arrivals at random times and measures the wait for each decision (`client`). Backlog: arrivals
are written first, then a server starts, and decisions are counted by end offsets, from the first ones to the last.
Processor time is that of the server's process; the worker's is given without and with its learner process.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import nan
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from worker.bench.figures import Figure
from worker.bench.kafka.client import Client
from worker.bench.kafka.processes import ChildProcess, running_broker, worker_process
from worker.bench.kafka.topics import decisions_in, learned, new_topics, write_backlog
from worker.errors import FailedError
from worker.kafka.clients import admin_client
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

NAMES: Final = {
    "aiokafka": "raw aiokafka",
    "librdkafka": "plain librdkafka",
    "faust": "idiomatic Faust",
    "worker": "worker",
}
RATES: Final = {20: 12.0, 200: 6.0, 1_000: 6.0}  # seconds of a play, by arrivals per second
WARM: Final = 1.5  # seconds before each play that do not count
ROUNDS: Final = 5
LATE: Final = 100.0  # milliseconds; if half of the clients wait for longer, the server does not keep up
BACKLOG, FAUST_BACKLOG, BACKLOG_ROUNDS = 100_000, 6_000, 3  # arrivals
LOOK: Final = 0.02  # seconds between two looks at the end offsets
PATIENCE: Final = 60.0  # seconds without a new decision before a run counts as failed

#: Bounds of the worker's p50, as ratios to others, by arrivals per second.
MOST: Final = {
    "aiokafka": {20: 1.0, 200: 1.0, 1_000: 1.5},
    "librdkafka": {20: 2.5, 200: 2.5, 1_000: 2.5},
    "faust": {20: 1.0, 200: 1.0, 1_000: 1.0},
}
MOST_PROCESSOR: Final = {200: 1.4}  # of the processor time, as a ratio to raw aiokafka
LEAST_BACKLOG: Final = 15.0  # of the arrivals per second, as a ratio to idiomatic Faust
LATENCY_FIGURES: Final = len(RATES) * (len(NAMES) + len(MOST) + 1)
BACKLOG_FIGURES: Final = len(NAMES) + 1


class Run(NamedTuple):
    """A measurement: p50 and p99 in milliseconds, or arrivals per second of a backlog.

    `own` and `family` are milliseconds of processor time per arrival, without and with child processes.
    """

    value: float
    p99: float
    own: float
    family: float


#: Runs of each server, in the order of the rounds.
Runs = Mapping[str, Sequence[Run]]


def measure(
    address: str | None, partitions: int, *, latency: bool, backlog: bool, share: float = 1.0
) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows; `share` is the part of the whole that is played."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        servers = Servers(connection, Path(folder), partitions, share)
        yield "a backlog, for the broker to warm up"
        servers.work_off("librdkafka")
        if latency:
            yield from in_turn("latency", max(1, round(ROUNDS * share)), servers.play, latency_figures)
        if backlog:
            yield from in_turn("backlog", max(1, round(BACKLOG_ROUNDS * share)), servers.work_off, backlog_figures)


def in_turn(
    part: str,
    rounds: int,
    measure_one: Callable[[str], Mapping[int, Run]],
    figures: Callable[[int, Runs], Iterator[Figure]],
) -> Iterator[Figure | str]:
    """Measure all servers in turn, and yield the figures; if it fails or is interrupted, of what it has measured."""
    seen: dict[int, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    failure: BaseException | None = None
    try:
        for turn in range(rounds):
            for kind, name in NAMES.items():
                yield f"{part}, round {turn + 1} of {rounds}, {name}"
                for rate, run in measure_one(kind).items():
                    seen[rate][kind].append(run)
    except (FailedError, KeyboardInterrupt) as error:
        failure = error
    for rate, runs in seen.items():
        yield from figures(rate, runs)
    if failure is not None:
        raise failure


class Servers:
    """Starts servers on a broker, each on new topics, and measures them."""

    def __init__(self, connection: Connection, folder: Path, partitions: int, share: float = 1.0) -> None:
        self._connection, self._folder = connection, folder
        self._partitions, self._share = partitions, share
        self._parameters = learned()

    def _start(self, kind: str, names: Topics) -> ChildProcess:
        broker = self._connection.servers[0]
        if kind == "worker":
            return worker_process(broker, names, self._folder)
        arguments = [kind, broker, names.prefix, str(self._partitions)]
        return ChildProcess(NAMES[kind], ["worker.bench.kafka.baselines", *arguments], self._folder)

    def play(self, kind: str) -> dict[int, Run]:
        """Start a server and play all rates, one after the other."""
        with (
            new_topics(self._connection, self._partitions, self._parameters) as names,
            self._start(kind, names) as child,
            closing(Client(self._connection, names, self._partitions)) as client,
        ):
            client.wait_until_served(child.check)
            return {rate: self._play(client, child, rate, seconds) for rate, seconds in RATES.items()}

    def _play(self, client: Client, child: ChildProcess, rate: int, seconds: float) -> Run:
        client.play(rate, WARM * self._share, child.check)
        before = child.processor_seconds()
        waits = client.play(rate, seconds * self._share, child.check)
        spent = np.subtract(child.processor_seconds(), before) * 1000 / len(waits)
        return Run(*np.quantile(waits, (0.5, 0.99)).tolist(), *spent.tolist())

    def work_off(self, kind: str) -> dict[int, Run]:
        """Write a backlog, start a server, and wait until it has answered every arrival."""
        count = round(self._share * (FAUST_BACKLOG if kind == "faust" else BACKLOG))
        with new_topics(self._connection, self._partitions, self._parameters) as names:
            write_backlog(self._connection, names, count, self._partitions)
            look = partial(decisions_in, admin_client(self._connection), names, self._partitions)
            with self._start(kind, names) as child:
                # The start of the process, and the work on the first decisions that are seen, do not count.
                began, first = _reached(1, look, child)
                before = child.processor_seconds()
                ended, last = _reached(count, look, child)
                spent = np.subtract(child.processor_seconds(), before) * 1000
        answered = max(1, last - first)
        return {0: Run(answered / (ended - began), nan, *(spent / answered).tolist())}


def _reached(count: int, look: Callable[[], int], child: ChildProcess) -> tuple[float, int]:
    """Wait until there are `count` decisions; return the time, and the number of decisions at that time."""
    seen, since = -1, time.monotonic()
    while True:
        there, now = look(), time.monotonic()
        if there >= count:
            return now, there
        if there > seen:
            seen, since = there, now
        child.check()
        if now - since > PATIENCE:
            raise FailedError(f"{child.name}: {there:,} of {count:,} decisions, and no more: {child.last_error()}")
        time.sleep(LOOK)


def latency_figures(rate: int, runs: Runs) -> Iterator[Figure]:
    """Yield the waits at a rate, and the ratios of the worker to the others."""
    where = f"{rate:,} arrivals/s"
    for kind, made in runs.items():
        p50, p99, own, family = map(statistics.median, zip(*made, strict=True))
        detail = f"p50, {_span([run.value for run in made])}; p99 {p99:.1f} ms; {_processor(kind, own, family)}"
        yield Figure(f"{NAMES[kind]}, {where}", p50, "ms", detail=detail + "; does not keep up" * (p50 > LATE))
    for other, most in MOST.items():
        ratios = [mine.value / its.value for mine, its in _pairs(runs, other)]
        yield from _ratio(f"worker / {NAMES[other]}, {where}, p50", ratios, most=most[rate])
    own_ratios = [mine.own / its.own for mine, its in _pairs(runs, "aiokafka")]
    name = f"worker / {NAMES['aiokafka']}, {where}, processor"
    yield from _ratio(name, own_ratios, most=MOST_PROCESSOR.get(rate))


def backlog_figures(_: int, runs: Runs) -> Iterator[Figure]:
    """Yield the arrivals per second on a backlog, and the ratio of the worker to idiomatic Faust."""
    for kind, made in runs.items():
        value, _, own, family = map(statistics.median, zip(*made, strict=True))
        detail = f"{_span([run.value for run in made])}; {_processor(kind, own, family)}"
        yield Figure(f"{NAMES[kind]}, backlog", value, "arrivals/s", detail=detail)
    ratios = [mine.value / its.value for mine, its in _pairs(runs, "faust")]
    yield from _ratio(f"worker / {NAMES['faust']}, backlog", ratios, least=LEAST_BACKLOG)


def _pairs(runs: Runs, other: str) -> list[tuple[Run, Run]]:
    """Return the runs of the worker and of another, round by round; the last round may be incomplete."""
    return list(zip(runs.get("worker", ()), runs.get(other, ()), strict=False))


def _processor(kind: str, own: float, family: float) -> str:
    return f"processor {own:.3g} ms/arrival" + (f", {family:.3g} with its learner" if kind == "worker" else "")


def _ratio(name: str, ratios: Sequence[float], **bound: float | None) -> Iterator[Figure]:
    if ratios:
        yield Figure(name, statistics.median(ratios), "×", detail=_span(ratios), **bound)


def _span(values: Sequence[float]) -> str:
    low, high = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in (min(values), max(values)))
    return f"{low} to {high} in {len(values)} round{'s' if len(values) > 1 else ''}"
