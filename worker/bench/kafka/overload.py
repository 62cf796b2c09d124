"""More traffic than the learner carries, and a low budget of learning: it keeps up, and every arrival is answered.

The traffic is `adcascade traffic --flat-out`: as many users as the worker can serve. One worker on the machine of its
clients is no match for a learner, so the learner is stopped and continued in turns, and has a part of the time only.
Windows are short. The first ones are journaled whole, because nothing is counted yet, and the learner falls behind;
from the first version in force on, a share is journaled, and it has to catch up. Sampled once a second: the records of
the journal that the learner has not read, from the metrics of the worker. Afterwards: when each version was published,
compared with the time from which it serves, and what the users were answered. The second half of the time is judged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import orjson
from aiokafka import TopicPartition

from worker.bench.figures import Figure
from worker.bench.kafka.broker import running_broker
from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.topics import PATIENCE, delete, end_offsets, partitions, prepare
from worker.bench.stream import ARMS, DIM, HORIZON
from worker.errors import FailedError
from worker.kafka.clients import run_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.stream.parameters import Parameters
from worker.stream.topology import ONLY_PARTITION, Topics
from worker.stream.version_decoding import decode_parameters

FIGURES = 6  # number of figures that `measure` yields
SECONDS = 300
AT_MOST = 1_000  # sessions per window that are learned from
WINDOW, TIMEOUT, LATENESS = 5_000, 5_000, 3_000
LOOK = 1.0  # seconds between two samples
STOPPED, RUNNING = 0.2, 0.1  # seconds, in turn, of the learner
SERIES = "adcascade_consumer_lag_records", 'topic="journal"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """What came of a run: the unread journal records at each sample, the versions, and the summary of the traffic."""

    lags: list[int]
    versions: list[tuple[int, Parameters]]  # with their times of publication
    facts: int
    traffic: dict[str, Any]


def measure(
    address: str | None, *, count: int, seconds: int = SECONDS, at_most: int = AT_MOST
) -> Iterator[Figure | str]:
    """Yield the figures of an overloaded run on topics of `count` partitions."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        names = Topics(f"bench-{uuid.uuid4().hex[:8]}")
        try:
            yield f"flat out for {seconds} s, learning from {at_most:,} sessions per window of {WINDOW // 1000} s"
            yield from figures(run_client(connection, _run(connection, names, Path(folder), count, seconds, at_most)))
        finally:
            run_client(connection, delete(connection, names.prefix))


async def _run(connection: Connection, names: Topics, folder: Path, count: int, seconds: int, at_most: int) -> Overload:
    await prepare(connection, names, count)
    common = ["--broker", connection.servers[0], "--prefix", names.prefix, "--dim", str(DIM), "--horizon", str(HORIZON)]
    users = ["worker", "traffic", *common, "--arms", str(ARMS), "--patience", f"{TIMEOUT - 1000}ms", "--poison", "0"]
    catalog, result = folder / "arms.json", folder / "traffic.json"
    await asyncio.to_thread(ChildProcess("the arms", [*users, "--write-arms", str(catalog)], folder).process.wait)
    port = _free_port()
    times = ["--window", f"{WINDOW}ms", "--session-timeout", f"{TIMEOUT}ms", "--lateness", f"{LATENESS}ms"]
    more = ["--group", names.prefix, "--catalog", str(catalog), "--web-port", str(port), "--log-level", "warning"]
    serve = ["worker", "worker", *common, *times, "--learn-at-most", str(at_most), *more]
    flat_out = ["--flat-out", "--duration", f"{seconds}s", "--json", str(result)]
    with ChildProcess("the worker", serve, folder) as worker:
        await _ready(worker, port)
        with ChildProcess("the traffic", [*users, *flat_out], folder) as traffic:
            slow = asyncio.create_task(_slow_down(worker))
            try:
                lags = await _watch(worker, traffic, port, seconds)
            finally:
                slow.cancel()
                await asyncio.wait([slow])
        async with end_offsets(connection) as look:
            facts = await look.count(partitions(names.journal, 1))
    versions = await _versions(connection, names)
    return Overload(lags=lags, versions=versions, facts=facts, traffic=orjson.loads(result.read_bytes()))


async def _ready(worker: ChildProcess, port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        worker.check()
        try:
            await asyncio.to_thread(_fetch, port, "readyz")
        except OSError:
            await asyncio.sleep(LOOK / 4)
        else:
            return
    raise FailedError(f"the worker is not ready: {worker.last_error()}")


async def _slow_down(worker: ChildProcess) -> None:
    """Stop and continue the learner process of the worker in turns, until cancelled."""

    def send(signum: int) -> None:
        for child in worker.children("worker.cli.learner_process"):
            with suppress(ProcessLookupError):
                os.kill(child, signum)

    try:
        while True:
            send(signal.SIGSTOP)
            await asyncio.sleep(STOPPED)
            send(signal.SIGCONT)
            await asyncio.sleep(RUNNING)
    finally:
        send(signal.SIGCONT)  # it ends with its parent, unless it is stopped


async def _watch(worker: ChildProcess, traffic: ChildProcess, port: int, seconds: int) -> list[int]:
    """Sample the lag of the learner until the traffic has ended."""
    lags: list[int] = []
    deadline = time.monotonic() + seconds + PATIENCE
    while traffic.process.poll() is None:
        await asyncio.sleep(LOOK)
        worker.check()
        lags.append(_lag(await asyncio.to_thread(_fetch, port, "metrics")))
        if time.monotonic() > deadline:
            raise FailedError(f"the traffic does not end: {traffic.last_error()}")
    if traffic.process.returncode:
        raise FailedError(f"the traffic ended with {traffic.process.returncode}: {traffic.last_error()}")
    return lags


async def _versions(connection: Connection, names: Topics) -> list[tuple[int, Parameters]]:
    """Return the published versions that the topic has, in their order, with the times of their first publication."""
    found: dict[int, tuple[int, Parameters]] = {}
    topic = TopicPartition(names.parameters, ONLY_PARTITION)
    async with standalone_consumer(connection) as consumer:
        consumer.assign([topic])
        await consumer.seek_to_beginning(topic)
        end = (await consumer.end_offsets([topic]))[topic]
        while await consumer.position(topic) < end:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                for record in records:
                    made = decode_parameters(bytes(record.value))
                    found.setdefault(made.version, (record.timestamp, made))
    return [found[version] for version in sorted(found)]


def _lag(text: str) -> int:
    """Return the lag of the journal in an exposition of metrics; 0 before it is known.

    >>> _lag('adcascade_consumer_lag_records{topic="journal"} 12.0')
    12
    """
    name, label = SERIES
    lines = (line for line in text.splitlines() if line.startswith(name) and label in line)
    return next((int(float(line.rpartition(" ")[2])) for line in lines), 0)


def _fetch(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE) as response:
        text: str = response.read().decode()
        return text


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def figures(run: Overload) -> Iterator[Figure]:
    """Yield the figures of a run."""
    sessions, seconds = run.traffic["sessions"], run.traffic["seconds"]
    yield Figure(
        "sessions per second",
        sessions / seconds,
        "sessions/s",
        detail=f"{sessions:,} sessions, {run.traffic['records']['total']:,} events; p50 of the first decision "
        f"{1000 * run.traffic['latency']['p50']:.0f} ms",
    )
    half = len(run.lags) // 2
    first, last = (statistics.median(part) for part in (run.lags[:half], run.lags[half:]))
    per_second = run.facts / seconds
    behind = [at for at, lag in enumerate(run.lags) if lag > per_second * WINDOW / 1000]
    yield Figure(
        "highest lag of the journal in the second half",
        max(run.lags[half:]) / per_second,
        "s of writing",
        most=WINDOW / 1000,
        detail=f"medians {first:,.0f} and {last:,.0f} records in the halves, at most {max(run.lags):,}; after "
        f"{max(behind, default=0) * LOOK:.0f} s never more than a window; {run.facts:,} records written",
    )
    middle = run.versions[-1][0] - 500 * seconds
    delays = [at - made.effective_at for at, made in run.versions if made.version]
    judged = [at - made.effective_at for at, made in run.versions if at > middle]
    yield Figure("versions in the second half", len(judged), "versions", least=0.9 * 500 * seconds / WINDOW)
    yield Figure(
        "of these published after they were to serve",
        sum(delay > 0 for delay in judged),
        "versions",
        most=0,
        detail=f"the latest {max(judged) / 1000:+.1f} s, the median {statistics.median(judged) / 1000:+.1f} s; in the "
        f"first half, while the learner catches up, {max(delays) / 1000:+.1f} s",
    )
    shares = [made.shares.others for _, made in run.versions]
    yield Figure(
        "lowest share of sessions that is journaled",
        min(shares),
        "",
        most=0.99,
        detail=f"{run.versions[-1][1].expected_sessions:,} sessions in the last window",
    )
    yield Figure("arrivals without an answer", run.traffic["undecided"], "arrivals", most=0)
