"""The worker on a real broker against plain echoes and an idiomatic Faust agent, in one run with the same arrivals.

In every round each of the four starts on new topics, is measured, and ends; so a machine that is slower for a
while is slower for all of them. Ratios are taken round by round.

Latency: `worker.client` in this process sends arrivals at random times, and the wait for each decision is measured.
Backlog: arrivals are written first, then a server starts, and decisions are counted by end offsets, from the first ones
to the last. Processor time is that of the server's process; the worker's is given without and with its learner process.

The topics have a learned version. No window closes and no session expires during a run, so a worker plans with the same
version all the time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import orjson
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from worker.bandit.arrays import Floats
from worker.bench.figures import Figure
from worker.bench.processes import PREFIX, ChildProcess, running_broker
from worker.bench.stream import CONTEXTS, HORIZON, SECOND, closed_journal, fold, record_traffic
from worker.client import Client
from worker.errors import FailedError
from worker.kafka.clients import END, REQUEST_TIMEOUT, admin_client, durable_producer, offsets_of, write
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, check
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

NAMES: Final = {
    "aiokafka": "raw aiokafka",
    "librdkafka": "plain librdkafka",
    "faust": "idiomatic Faust",
    "worker": "worker",
}
RATES: Final = {20: 12.0, 200: 6.0, 1_000: 6.0}  # seconds of a play, by arrivals per second
WARM: Final = 1.5  # seconds before each play that do not count
ROUNDS: Final = {"latency": 5, "backlog": 3}
ARRIVALS: Final = {"aiokafka": 100_000, "librdkafka": 100_000, "faust": 6_000, "worker": 100_000}  # of a backlog
LOOK: Final = 0.02  # seconds between two looks at the end offsets
WINDOW, TIMEOUT, LATENESS = 3_600 * SECOND, 3_600 * SECOND, 5 * SECOND  # settings of the measured worker
LEARNED_FROM: Final = 20  # seconds of event time that a version is learned from
BATCH: Final = 16 << 10  # bytes of a batch of the backlog: the default of Kafka's own producers
PATIENCE: Final = 60.0  # seconds for a decision, or to write a backlog


class ServerRun(NamedTuple):
    """A measurement: p50 and p99 in milliseconds, or arrivals per second of a backlog.

    `own` and `family` are milliseconds of processor time per arrival, without and with child processes.
    """

    value: float
    p99: float
    own: float
    family: float


#: The ratios of the worker to another server in each part: its name, a field of `ServerRun`, at most, at least.
RATIOS: Final[dict[str, list[tuple[str, str, float | None, float | None]]]] = {
    **{
        f"{rate:,} arrivals/s": [
            ("aiokafka", "value", p50, None),
            ("librdkafka", "value", 2.5, None),
            ("faust", "value", 1.0, None),
            ("aiokafka", "own", processor, None),
        ]
        for rate, p50, processor in ((20, 1.0, None), (200, 1.0, 1.4), (1_000, 1.5, None))
    },
    "backlog": [("faust", "value", None, 15.0)],
}


def measure(
    address: str | None, partitions: int, what: Sequence[str] = ("latency", "backlog"), *, share: float = 1.0
) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows; `share` is the part of the whole that is played."""
    yield "starting the broker"
    with TemporaryDirectory(prefix=PREFIX) as folder, running_broker(address, Path(folder)) as connection:
        servers = Servers(connection, Path(folder), partitions, share)
        yield "a backlog, for the broker to warm up"
        servers.work_off("librdkafka")
        for name in what:
            measure_one = servers.play if name == "latency" else servers.work_off
            yield from in_turn(name, max(1, round(ROUNDS[name] * share)), measure_one)


def in_turn(name: str, rounds: int, measure_one: Callable[[str], Mapping[str, ServerRun]]) -> Iterator[Figure | str]:
    """Measure all servers alternating, and yield the figures."""
    seen: dict[str, dict[str, list[ServerRun]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds):
        for kind in NAMES:
            yield f"{name}, round {turn + 1} of {rounds}, {NAMES[kind]}"
            for part, run in measure_one(kind).items():
                seen[part][kind].append(run)
    for part, runs in seen.items():
        yield from figures(part, runs)


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
        return ChildProcess(NAMES[kind], ["worker.bench.baselines", *arguments], self._folder)

    def play(self, kind: str) -> dict[str, ServerRun]:
        """Start a server and play all rates, one after the other."""
        with (
            new_topics(self._connection, self._partitions, self._parameters) as names,
            self._start(kind, names) as child,
        ):
            return {f"{rate:,} arrivals/s": self._play(names, child, rate) for rate in RATES}

    def _play(self, names: Topics, child: ChildProcess, rate: int) -> ServerRun:
        play(self._connection, names, rate, WARM * self._share, child.check)
        before = child.processor_seconds()
        waits = play(self._connection, names, rate, RATES[rate] * self._share, child.check)
        spent = np.subtract(child.processor_seconds(), before) * 1000 / len(waits)
        return ServerRun(*np.quantile(waits, (0.5, 0.99)).tolist(), *spent.tolist())

    def work_off(self, kind: str) -> dict[str, ServerRun]:
        """Write a backlog, start a server, and wait until it has answered every arrival."""
        count = round(self._share * ARRIVALS[kind])
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
        return {"backlog": ServerRun(answered / (ended - began), nan, *(spent / answered).tolist())}


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


def figures(part: str, runs: Mapping[str, Sequence[ServerRun]]) -> Iterator[Figure]:
    """Yield the medians of each server, then the ratios of the worker to others, round by round."""
    for kind, made in runs.items():
        value, p99, own, family = map(statistics.median, zip(*made, strict=True))
        detail = f"{_span([run.value for run in made])}; processor {own:.3g} ms/arrival"
        detail += f", {family:.3g} with its learner" if kind == "worker" else ""
        if part == "backlog":
            yield Figure(f"{NAMES[kind]}, {part}", value, "arrivals/s", detail=detail)
        else:
            yield Figure(f"{NAMES[kind]}, {part}", value, "ms", detail=f"p50, {detail}; p99 {p99:.1f} ms")
    for other, field, most, least in RATIOS[part]:
        pairs = zip(runs["worker"], runs[other], strict=True)
        ratios = [getattr(mine, field) / getattr(its, field) for mine, its in pairs]
        name = f"worker / {NAMES[other]}, {part}{', processor' if field == 'own' else ''}"
        yield Figure(name, statistics.median(ratios), "×", most=most, least=least, detail=_span(ratios))


def _span(values: Sequence[float]) -> str:
    low, high = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in (min(values), max(values)))
    return f"{low} to {high} in {len(values)} round{'s' if len(values) > 1 else ''}"


# ── topics and workers ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def new_topics(connection: Connection, partitions: int, parameters: Parameters) -> Iterator[Topics]:
    """Yield new topics with a published version; delete them at the end."""
    names = Topics(f"bench-{uuid.uuid4().hex[:8]}")
    check(connection, names, TopicLayout(partitions=partitions), create=True)
    admin = admin_client(connection)
    try:
        with closing(durable_producer(connection)) as producer:
            write(producer, names.parameters, encode_parameters(parameters), b"%d" % parameters.version)
        yield names
    finally:
        ours = [name for name in admin.list_topics(timeout=REQUEST_TIMEOUT).topics if name.startswith(names.prefix)]
        for deleted in admin.delete_topics(ours).values():
            deleted.exception()  # waits: the broker may be stopped right after this


def learned() -> Parameters:
    """Return a version that was learned from simulated users; it precedes any journal."""
    newest = fold(closed_journal(record_traffic(LEARNED_FROM).journal)).current
    return replace(
        newest,
        version=1,
        settings=replace(newest.settings, window=WINDOW, session_timeout=TIMEOUT, lateness=LATENESS),
        effective_at=0,
        made_at=0,
        window_end=None,
        journal_offset=-1,
        resume_offset=0,
        progress={},
    )


def worker_process(broker: str, names: Topics, folder: Path, **more: str) -> ChildProcess:
    """Start a worker, with `more` options. Its arms and its dimension come from the published version."""
    options = {"broker": broker, "prefix": names.prefix, "group": names.prefix, "horizon": HORIZON}
    options |= {"window": f"{WINDOW}ms", "session_timeout": f"{TIMEOUT}ms", "lateness": f"{LATENESS}ms"}
    options |= {"max_open_sessions": 10 * ARRIVALS["worker"], "log_level": "warning", **more}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ChildProcess("the worker", ["worker", "worker", *flags], folder)


# ── arrivals at a rate ───────────────────────────────────────────────────────────────────────────────────────────────


def play(connection: Connection, names: Topics, rate: float, seconds: float, check: Callable[[], None]) -> Floats:
    """Send arrivals at random times, `rate` per second on average; return the waits for decisions in milliseconds.

    Raises `FailedError` if an arrival gets no decision, or what `check` raises then.
    """
    waits = asyncio.run(_play(connection, names, rate, seconds))
    if unanswered := int(np.isnan(waits).sum()):
        check()
        raise FailedError(f"{unanswered} of {len(waits)} arrivals got no decision within {PATIENCE:.0f} s")
    return waits


async def _play(connection: Connection, names: Topics, rate: float, seconds: float) -> Floats:
    loop = asyncio.get_running_loop()
    async with Client(connection, prefix=names.prefix, timeout=PATIENCE) as client:

        async def arrive(number: int) -> float:
            began = loop.time()
            decision = await client.arrive(CONTEXTS[number % len(CONTEXTS)])
            return np.nan if decision.timed_out else 1000 * (loop.time() - began)

        begun, waits = loop.time(), []
        gaps = np.random.default_rng(7).exponential(1 / rate, round(rate * seconds))
        for number, due in enumerate(np.cumsum(gaps).tolist()):
            await asyncio.sleep(begun + due - loop.time())
            waits.append(loop.create_task(arrive(number)))
        return np.array(await asyncio.gather(*waits))


# ── a backlog ────────────────────────────────────────────────────────────────────────────────────────────────────────


def arrival(session: bytes, number: int) -> bytes:
    """Return an arrival at this moment; `number` chooses its context.

    >>> orjson.loads(arrival(b"s", 3)).keys()
    dict_keys(['session_id', 'occurred_at', 'context'])
    """
    now, context = time.time_ns() // 1_000_000, orjson.dumps(CONTEXTS[number % len(CONTEXTS)])
    return b'{"session_id":"%b","occurred_at":%d,"context":%b}' % (session, now, context)


def write_backlog(connection: Connection, names: Topics, count: int, partitions: int) -> None:
    """Write `count` arrivals, evenly over the partitions."""
    settings = connection.configuration(acks="all", batch_size=BATCH, queue_buffering_max_messages=count)
    with closing(Producer(settings)) as producer:
        for partition in range(partitions):
            sessions = ((b"waiting-%d" % number, number) for number in range(partition, count, partitions))
            records = [{"key": session, "value": arrival(session, number)} for session, number in sessions]
            producer.produce_batch(names.arrivals, records, partition)
        if left := producer.flush(PATIENCE):
            raise FailedError(f"{left} of {count} arrivals could not be written within {PATIENCE:.0f} s")


def decisions_in(admin: AdminClient, names: Topics, partitions: int) -> int:
    """Return the number of decisions that were written so far."""
    places = [(names.decisions, number) for number in range(partitions)]
    return sum(offsets_of(admin, places, END).values())
