"""A long run: a worker under live traffic, slowed down twice, whose memory has to stay flat.

The traffic is `adcascade traffic`. Timeouts and windows are short, so sessions end, table values are deleted and
windows are folded all the time, and the open work does not grow. Twice, for a while, the worker is stopped and
continued in turns: it falls behind and has to catch up. The first backlog raises its memory, and the allocator keeps
that; the second one must add nothing.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError

from worker.bench.figures import Figure
from worker.bench.kafka.broker import running_broker
from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.topics import PATIENCE, EndOffsets, delete, end_offsets, partitions, prepare
from worker.bench.stream import ARMS, DIM, HORIZON
from worker.errors import FailedError
from worker.kafka.clients import admin_client, run_client
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

FIGURES = 3  # number of figures that `measure` yields
EVENTS = 1_000_000
USERS_PER_SECOND = 1_500
LOOK = 0.25  # seconds between two samples
STOPPED, RUNNING = 0.2, 0.05  # seconds, in turn, while the worker is slow
# Parts of the run, as shares of the events: the worker is slow twice; memory counts before and after the second time.
SLOW = ((0.15, 0.3), (0.55, 0.7))
BEFORE, AFTER = (0.45, 0.55), (0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Events sent, events not yet committed by the worker, and its memory, at one time."""

    events: int
    behind: int
    memory: int


def measure(address: str | None, *, count: int, events: int = EVENTS) -> Iterator[Figure | str]:
    """Yield the figures of a long run on topics of `count` partitions."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        run = Soak(connection, Path(folder), events, count)
        try:
            yield f"{events:,} events"
            samples = run_client(connection, run.samples())
            yield from figures(samples)
        finally:
            run_client(connection, delete(connection, run.names.prefix))


class Soak:
    """One long run."""

    def __init__(self, connection: Connection, folder: Path, events: int, count: int) -> None:
        self._connection = connection
        self.names = Topics(f"bench-{uuid.uuid4().hex[:8]}")
        self._folder = folder
        self._events = events
        self._partitions = count
        self._common = ["--broker", connection.servers[0], "--prefix", self.names.prefix]
        self._size = ["--dim", str(DIM), "--horizon", str(HORIZON)]
        self._inputs = partitions(self.names.arrivals, count) + partitions(self.names.clicks, count)

    async def samples(self) -> list[Sample]:
        """Run until all events are sent and committed."""
        await prepare(self._connection, self.names, self._partitions)
        catalog = self._folder / "arms.json"
        written = self._traffic("--write-arms", str(catalog))
        await asyncio.to_thread(written.process.wait)
        with (
            self._worker(catalog) as worker,
            self._traffic("--rate", str(USERS_PER_SECOND), "--look", "0.1s-0.5s") as users,
        ):
            async with end_offsets(self._connection) as look:
                slow = asyncio.create_task(self._slow_down(worker, look))
                try:
                    return await self._watch(worker, users, look)
                finally:
                    slow.cancel()
                    worker.process.send_signal(signal.SIGCONT)

    def _worker(self, catalog: Path) -> ChildProcess:
        times = ["--window", "5s", "--session-timeout", "6s", "--lateness", "1s"]
        more = ["--group", self.names.prefix, "--catalog", str(catalog), "--log-level", "warning"]
        return ChildProcess("the worker", ["worker", "worker", *self._common, *self._size, *times, *more], self._folder)

    def _traffic(self, *more: str) -> ChildProcess:
        users = ["--arms", str(ARMS), "--patience", "5s", "--disorder", "0.5s", "--poison", "0"]
        return ChildProcess(
            "the traffic", ["worker", "traffic", *self._common, *self._size, *users, *more], self._folder
        )

    async def _watch(self, worker: ChildProcess, users: ChildProcess, look: EndOffsets) -> list[Sample]:
        samples: list[Sample] = []
        deadline = time.monotonic() + PATIENCE
        async with admin_client(self._connection) as admin:
            while True:
                sent = await look.count(self._inputs)
                done = await self._committed(admin)
                samples.append(Sample(events=sent, behind=sent - done, memory=worker.resident_memory()))
                worker.check()
                if sent < self._events:
                    users.check()
                    deadline = time.monotonic() + PATIENCE
                else:
                    users.kill()
                    if sent == done:
                        return samples
                if time.monotonic() > deadline:
                    raise FailedError(f"the worker is still {sent - done:,} events behind: {worker.last_error()}")
                await asyncio.sleep(LOOK)

    async def _committed(self, admin: AIOKafkaAdminClient) -> int:
        try:
            committed = await admin.list_consumer_group_offsets(self.names.prefix)
        except GroupCoordinatorNotAvailableError:
            return 0  # a new broker has none before the first group joins
        return sum(committed[tp].offset for tp in self._inputs if tp in committed)

    async def _slow_down(self, worker: ChildProcess, look: EndOffsets) -> None:
        """Stop and continue the worker in turns during the slow parts of the run."""
        while (share := await look.count(self._inputs) / self._events) < 1:
            if not any(start <= share < end for start, end in SLOW):
                await asyncio.sleep(LOOK)
                continue
            worker.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED)
            worker.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(RUNNING)


def figures(samples: list[Sample]) -> Iterator[Figure]:
    """Yield the figures of the samples of a whole run."""
    total = samples[-1].events
    before, after = (_memory(samples, total, part) for part in (BEFORE, AFTER))
    events = total * (statistics.mean(AFTER) - statistics.mean(BEFORE))
    first = min(sample.memory for sample in samples if sample.events >= total * SLOW[0][0])
    yield Figure(
        "memory growth",
        (after - before) / events * 100_000 / 1e6,
        "MB per 100,000 events",
        most=1,
        detail=f"{first / 1e6:.0f} MB before the worker was ever slow, {before / 1e6:.1f} MB before the second time, "
        f"{after / 1e6:.1f} MB at the end",
    )
    yield Figure("most memory", max(sample.memory for sample in samples) / 1e6, "MB", detail=f"{total:,} events")
    yield Figure(
        "events behind at the end",
        samples[-1].behind,
        "events",
        most=0,
        detail=f"{max(sample.behind for sample in samples):,} while the worker was slow",
    )


def _memory(samples: list[Sample], total: int, part: tuple[float, float]) -> float:
    inside = [sample.memory for sample in samples if part[0] * total <= sample.events <= part[1] * total]
    if not inside:
        raise FailedError("the run was too short to measure memory")
    return statistics.median(inside)
