"""`adcascade bench kafka --versions`: what a client waits for while large versions come every ten seconds.

The worker has a catalogue of 1,000 ads and contexts of 32 numbers: a version has 6.6 MB. Its own learner makes the
versions: with windows of ten seconds from the answers of the clients, or none at all with windows of an hour. Both
begin with the same learned version, on topics of their own, and take turns.

The clients are simulated users, played by this process: they answer the slates that they get, which differ from version
to version. Each shows its whole slate and reports once. A wait is from sending an arrival to reading its decision.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from worker.bandit.arrays import Floats
from worker.bench.figures import Figure
from worker.bench.kafka.broker import running_broker
from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.recording import LATENESS, QUICK, learned_from
from worker.bench.kafka.topics import delete, end_offsets, fill, partitions, prepare
from worker.bench.stream import HORIZON, SECOND
from worker.client.kafka import KafkaTransport
from worker.client.transport import Keyed
from worker.errors import FailedError
from worker.kafka.clients import run_client
from worker.kafka.connection import Connection
from worker.kafka.parameters import published_versions
from worker.simulation.environments import seeded_environment
from worker.simulation.users import TIDY, Users
from worker.stream.decoding import decode_decision
from worker.stream.encoding import encode_arrival
from worker.stream.events import Arrival
from worker.stream.settings import LearningSettings
from worker.stream.topology import Record, Topics
from worker.stream.version_encoding import encode_parameters

DIM, ARMS = 32, 1_000
ARRIVALS = 200  # per second
PARTITIONS = 4
TIMEOUT = 5 * SECOND
HABITS = replace(TIDY, look=(200, 400), transit=(0, 0), prefetching=1.0)
#: Milliseconds of a window, by the name of the variant.
WINDOWS = {"without": 3_600 * SECOND, "with": 10 * SECOND}
AHEAD = 2 * SECOND  # until the first arrival: users are drawn and encoded meanwhile
TICK = 0.003  # seconds between two looks at what is due: not a divisor of the periods of a worker
FIGURES = 4
MOST = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of a run: rounds, seconds that count in each, seconds before them, and the size of the model.

    The first version of a window comes `TIMEOUT` + lateness after its end, so the warm-up is longer than that.
    """

    rounds: int = 3
    seconds: int = 30
    warm: int = 12
    arms: int = ARMS
    dim: int = DIM


def measure(address: str | None, scale: Scale) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        yield "learning the first version"
        run = NewVersions(connection, Path(folder), scale)
        waits: dict[str, list[float]] = {name: [] for name in WINDOWS}
        middles: dict[str, list[float]] = {name: [] for name in WINDOWS}
        try:
            for turn in range(scale.rounds):
                for name in WINDOWS:
                    yield f"{name} new versions, round {turn + 1} of {scale.rounds}"
                    seen = run.play(name)
                    waits[name].append(float(np.quantile(seen, 0.99)))
                    middles[name].append(float(np.quantile(seen, 0.5)))
        finally:
            run.delete_topics()
        yield from _figures(scale, waits, middles, run.version_bytes)


def _figures(
    scale: Scale, waits: dict[str, list[float]], middles: dict[str, list[float]], size: int
) -> Iterator[Figure]:
    where = f"d={scale.dim} K={scale.arms:,} H={HORIZON}, {ARRIVALS} arrivals/s, {scale.seconds} s"
    yield Figure("a version", size / 1e6, "MB")
    for name in WINDOWS:
        high, middle = statistics.median(waits[name]), statistics.median(middles[name])
        detail = f"from arrival to decision, {where}; p50 {middle:.2f} ms, medians of {scale.rounds} rounds"
        yield Figure(f"p99 {name} new versions", high, "ms", detail=detail)
    ratios = [one / other for one, other in zip(waits["with"], waits["without"], strict=True)]
    detail = f"p99, a version every {WINDOWS['with'] // SECOND} s; {min(ratios):.3g} to {max(ratios):.3g}"
    yield Figure("with / without new versions", statistics.median(ratios), "×", most=MOST, detail=detail)


class NewVersions:
    """One run; every play has topics and a worker of its own, all under one prefix."""

    def __init__(self, connection: Connection, folder: Path, scale: Scale) -> None:
        self._connection, self._folder, self._scale = connection, folder, scale
        self._prefix = f"bench-{uuid.uuid4().hex[:8]}"
        self._made = 0
        self._world = seeded_environment("tastes", dim=scale.dim, arms=scale.arms, seed=3)
        self._names = [arm.arm for arm in self._world.catalogue()]
        settings = LearningSettings(dim=scale.dim, horizon=HORIZON)
        users = Users(self._world, self._names, horizon=HORIZON, rate=1_000, period=SECOND, habits=QUICK)
        self._first = learned_from(settings, users)
        self.version_bytes = len(encode_parameters(self._first))

    def delete_topics(self) -> None:
        """Delete all topics of the run."""
        run_client(self._connection, delete(self._connection, self._prefix))

    def play(self, variant: str) -> Floats:
        """Serve users live; return their waits in milliseconds."""
        return run_client(self._connection, self._play(variant))

    async def _play(self, variant: str) -> Floats:
        self._made += 1
        names, window = Topics(f"{self._prefix}-{self._made}"), WINDOWS[variant]
        settings = replace(self._first.settings, window=window, session_timeout=TIMEOUT)
        first = replace(self._first, settings=settings)
        await prepare(self._connection, names, PARTITIONS, parameters=first)
        with self._worker(names, window) as child:
            await self._served(names, child)
            start = time.time_ns() // 1_000_000 + AHEAD
            users = Users(
                self._world, self._names, horizon=HORIZON, rate=ARRIVALS, period=SECOND, start=start, habits=HABITS
            )
            clients = Clients(KafkaTransport(self._connection, names), users, self._scale.warm + self._scale.seconds)
            await clients.play(child)
        await self._check(names, variant)
        return clients.waits(self._scale.warm)

    async def _served(self, names: Topics, child: ChildProcess) -> None:
        """Wait until the worker serves every partition."""
        now, context = time.time_ns() // 1_000_000, (0.0,) * self._scale.dim
        probes = [Arrival(session_id=f"probe-{n}", occurred_at=now, context=context) for n in range(PARTITIONS)]
        await fill(
            self._connection,
            {(names.arrivals, n): [(one.session_id.encode(), encode_arrival(one))] for n, one in enumerate(probes)},
        )
        async with end_offsets(self._connection) as look:
            await look.reached(partitions(names.decisions, PARTITIONS), PARTITIONS, child)

    async def _check(self, names: Topics, variant: str) -> None:
        """Raise `FailedError` if there were dead letters, or another number of versions than there should be."""
        async with end_offsets(self._connection) as look:
            dead = await look.count(partitions(names.dead_letters, 1))
        new = (await published_versions(self._connection, names))[-1].version - self._first.version
        least = 0 if variant == "without" else self._scale.seconds * SECOND // WINDOWS[variant]
        if dead or new < least or (new and not least):
            raise FailedError(f"{dead} dead letters and {new} new versions, at least {least} expected: no measurement")

    def _worker(self, names: Topics, window: int) -> ChildProcess:
        options = {
            "broker": self._connection.servers[0],
            "prefix": names.prefix,
            "group": names.prefix,
            "horizon": HORIZON,
            "window": f"{window}ms",
            "session-timeout": f"{TIMEOUT}ms",
            "lateness": f"{LATENESS}ms",
            "log-level": "warning",
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return ChildProcess("the worker", ["worker", "worker", *flags], self._folder)


class Clients:
    """Users who are played live; the times are nanoseconds of the monotonic clock, by session."""

    def __init__(self, transport: KafkaTransport, users: Users, seconds: int) -> None:
        self._transport, self._users = transport, users
        self._due = [sent for second in range(seconds) for sent in users.arrivals(second)]
        heapq.heapify(self._due)
        self._ends = users.start + seconds * SECOND + TIMEOUT
        self._sent: dict[bytes, int] = {}
        self._answered: dict[bytes, int] = {}

    async def play(self, child: ChildProcess) -> None:
        """Send arrivals when they are due, and the answers of users to what they are shown, until all are gone."""
        await self._transport.start(self._receive)
        gc.collect()
        gc.freeze()
        try:
            while self._due or len(self._answered) < len(self._sent):
                now = time.time_ns() // 1_000_000
                if now > self._ends:
                    break
                child.check()
                self._send(now)
                await asyncio.sleep(TICK)
        finally:
            await self._transport.stop()
            gc.unfreeze()

    def _send(self, now: int) -> None:
        due = []
        while self._due and self._due[0].time <= now:
            due.append(heapq.heappop(self._due))
        if due:
            self._transport.send_all([Keyed(sent.topic, sent.key, sent.value) for sent in due])
            self._sent |= dict.fromkeys((sent.key for sent in due if sent.topic == "arrivals"), time.monotonic_ns())

    def _receive(self, records: Sequence[Record]) -> None:
        now, clock = time.monotonic_ns(), time.time_ns() // 1_000_000
        for record in records:
            if record.key in self._sent and record.value is not None:
                self._answered.setdefault(record.key, now)
                # The last report says it all: what comes before a click, or before the last ad, was passed over.
                for answer in self._users.answer(decode_decision(record.value), clock)[-1:]:
                    heapq.heappush(self._due, answer)

    def waits(self, warm: int) -> Floats:
        """Return the waits of users after the warm-up, in milliseconds; raise `FailedError` if some wait for ever."""
        begun = min(self._sent.values()) + warm * 1_000_000_000
        counted = [key for key, sent in self._sent.items() if sent >= begun]
        lost = sum(key not in self._answered for key in counted)
        if lost or not counted:
            raise FailedError(f"{lost} of {len(counted)} arrivals were not answered: no measurement")
        return np.array([self._answered[key] - self._sent[key] for key in counted]) / 1e6
