"""Real workers at 200 arrivals per second, judged by the clock: `ADCASCADE_THOROUGH=1 pytest -n 0 -s tests/kafka`.

The figures are printed. Each bar is that of the issue that set it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from tests.programs import eventually, show
from worker.bandit.arrays import Floats
from worker.bench import kafka as bench
from worker.bench.core import Scene, Size
from worker.bench.kafka import decisions_in, learned, new_topics, worker_process, write_backlog
from worker.bench.processes import ChildProcess
from worker.bench.stream import HORIZON, SECOND
from worker.client import Client
from worker.kafka.clients import admin_client
from worker.kafka.connection import Connection
from worker.kafka.parameters import published_versions
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import Topics

pytestmark = pytest.mark.thorough

RATE = 200.0  # arrivals per second
PARTITIONS = 8
MEMBER_TIMEOUT = 10


@pytest.fixture
def connection(address: str) -> Connection:
    return Connection(servers=(address,))


# ── rebalances ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Group:
    """Workers of one group, and arrivals for them."""

    def __init__(self, connection: Connection, names: Topics, folder: Path, stack: ExitStack) -> None:
        self._connection, self._names, self._folder, self._stack = connection, names, folder, stack
        self.workers: list[ChildProcess] = []

    def start(self) -> None:
        worker = worker_process(
            self._connection.servers[0], self._names, self._folder, member_timeout=f"{MEMBER_TIMEOUT}s"
        )
        self.workers.append(self._stack.enter_context(worker))

    def wait_for_members(self, count: int) -> None:
        """Wait until the group is stable with `count` members, and serves every partition."""
        admin = admin_client(self._connection)

        def is_formed() -> bool:
            self.workers[-1].check()
            group = admin.describe_consumer_groups([self._names.prefix])[self._names.prefix].result()
            return group.state.name == "STABLE" and len(group.members) == count

        eventually(is_formed, what=f"a group of {count}")
        self.play(1.0)  # more arrivals than partitions, all answered

    def play(self, seconds: float) -> Floats:
        """Send arrivals; return the milliseconds until their decisions."""
        return bench.play(self._connection, self._names, RATE, seconds, self.workers[-1].check)

    def longest_wait(self, seconds: float, happening: Callable[[], object]) -> float:
        """Send arrivals; after 2 s something happens. Return the longest wait in seconds: every arrival is answered."""
        timer = Timer(2.0, happening)
        timer.start()
        try:
            return float(self.play(seconds).max() / 1000)
        finally:
            timer.cancel()


def test_every_arrival_is_answered_in_time_while_workers_join_stop_and_die(
    connection: Connection, tmp_path: Path
) -> None:
    with new_topics(connection, PARTITIONS, learned()) as names, ExitStack() as stack:
        group = Group(connection, names, tmp_path, stack)
        for _ in range(3):
            group.start()
        group.wait_for_members(3)
        joins = group.longest_wait(12.0, group.start)
        group.wait_for_members(4)
        stops = group.longest_wait(8.0, lambda: group.workers[0].process.send_signal(signal.SIGTERM))
        assert group.workers[0].process.wait(300) == 0
        group.wait_for_members(3)
        dies = group.longest_wait(MEMBER_TIMEOUT + 8.0, group.workers[1].process.kill)
    show(f"longest waits: a worker joins {joins:.2f} s, SIGTERM {stops:.2f} s, kill -9 {dies:.2f} s")
    assert joins <= 3
    assert stops <= 3
    assert dies <= MEMBER_TIMEOUT + 3


# ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_worker_recovers_100_000_open_sessions_in_time(connection: Connection, tmp_path: Path) -> None:
    sessions, admin, broker = 100_000, admin_client(connection), connection.servers[0]
    with new_topics(connection, PARTITIONS, learned()) as names:
        write_backlog(connection, names, sessions, PARTITIONS)
        with worker_process(broker, names, tmp_path) as first:

            def are_answered() -> bool:
                first.check()
                return decisions_in(admin, names, PARTITIONS) >= sessions

            eventually(are_answered, what="all sessions are open")
            first.process.terminate()
            assert first.process.wait(300) == 0, first.last_error()
        began = time.monotonic()
        with worker_process(broker, names, tmp_path) as second:
            bench.play(connection, names, 1_000, 0.1, second.check)
            seconds = time.monotonic() - began
    show(f"recovery of {sessions:,} open sessions: {seconds:.1f} s from the start of the process to decisions")
    assert seconds <= 15


# ── new versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

DIM, ARMS = 32, 1_000
TIMEOUT = 5 * SECOND
WARM, COUNTED = 20.0, 30.0  # seconds; the first version comes a window, the timeout and the lateness after the start
CLICK = 0.2  # probability of a click on a display


@pytest.fixture(scope="module")
def large_version() -> Parameters:
    """A version of the personal model with 1,000 ads and contexts of 32 numbers: 6.6 MB."""
    scene = Scene.of(Size(dim=DIM, arms=ARMS, horizon=HORIZON))
    settings = LearningSettings(dim=DIM, horizon=HORIZON, model="personal")
    arms = tuple(scene.world.catalogue())
    return Parameters(version=1, settings=settings, arms=arms, model=scene.tastes(), folds=1)


async def session(client: Client, chance: random.Random, context: list[float]) -> float:
    """Play a whole session; return the milliseconds until its first decision."""
    began = time.monotonic()
    decision = await client.arrive(context)
    wait = 1000 * (time.monotonic() - began)
    assert not decision.timed_out
    while not decision.ended:
        if chance.random() < CLICK:
            await client.clicked(decision)
            break
        decision = await client.passed(decision)
    return wait


async def play(connection: Connection, names: Topics, seconds: float) -> Floats:
    """Play sessions that begin at random times; return the waits of those after the warm-up."""
    chance, contexts = random.Random(7), np.random.default_rng(7).standard_normal((512, DIM)).round(6).tolist()
    loop, sessions = asyncio.get_running_loop(), []
    async with Client(connection, prefix=names.prefix, timeout=30.0) as client:
        begun, due = loop.time(), 0.0
        while due < seconds:
            await asyncio.sleep(begun + due - loop.time())
            sessions.append((due, asyncio.create_task(session(client, chance, chance.choice(contexts)))))
            due += chance.expovariate(RATE)
        waits = [(began, await task) for began, task in sessions]
    return np.array([wait for began, wait in waits if began >= WARM])


def high_wait(connection: Connection, first: Parameters, folder: Path, window: int) -> tuple[float, int]:
    """Return the p99 of the waits in milliseconds, and the number of versions that came."""
    settings = replace(first.settings, window=window, session_timeout=TIMEOUT)
    with new_topics(connection, PARTITIONS, replace(first, settings=settings)) as names:
        options = {"window": f"{window}ms", "session_timeout": f"{TIMEOUT}ms"}
        with worker_process(connection.servers[0], names, folder, **options) as worker:
            eventually(lambda: is_served(connection, names, worker), what="the worker serves")
            waits = asyncio.run(play(connection, names, WARM + COUNTED))
            worker.check()
        versions = published_versions(connection, names)[-1].version - first.version
    return float(np.quantile(waits, 0.99)), versions


def is_served(connection: Connection, names: Topics, worker: ChildProcess) -> bool:
    """Whether a first arrival is answered; the worker handles it when it has started."""

    async def arrives() -> bool:
        async with Client(connection, prefix=names.prefix, timeout=60.0) as client:
            return not (await client.arrive([0.0] * DIM)).timed_out

    worker.check()
    return asyncio.run(arrives())


def test_large_versions_that_come_every_ten_seconds_delay_few_decisions(
    connection: Connection, large_version: Parameters, tmp_path: Path
) -> None:
    rounds = []
    for _ in range(3):
        without, none = high_wait(connection, large_version, tmp_path, 3_600 * SECOND)
        while_they_come, versions = high_wait(connection, large_version, tmp_path, 10 * SECOND)
        assert (none, versions >= COUNTED / 10) == (0, True)
        rounds.append((while_they_come / without, while_they_come, without))
        show(f"p99 {while_they_come:.1f} ms while {versions} versions come, {without:.1f} ms without")
    ratio = float(np.median([one[0] for one in rounds]))
    show(f"p99 with / without versions: {ratio:.2f} ×")
    assert ratio <= 2.5
