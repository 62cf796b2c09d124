"""Bounds that take long to measure, or are judged by the clock: `ADCASCADE_THOROUGH=1 pytest -n 0 -s tests/bench`."""

from __future__ import annotations

import multiprocessing
import resource
import socket
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.kafka.conftest import address  # noqa: F401 (a fixture)
from tests.programs import show
from worker.bench.core import LARGE, MEDIUM, Scene
from worker.bench.http import RATE, run_load, serve_process
from worker.bench.kafka import learned, new_topics, play, worker_process
from worker.bench.processes import ChildProcess
from worker.bench.stream import CONTEXTS, runner
from worker.kafka.connection import Connection
from worker.stream.events import Arrival, encode_event

pytestmark = pytest.mark.thorough

IDLE = 2_000  # connections; the limit of open files of this process is raised to twice as many


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def peak_of(work: Callable[[], None]) -> float:
    """Return the peak memory in MB of a separate process that does some work and nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, work).result()


def _measured(work: Callable[[], None]) -> float:
    work()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def _import_only() -> None:
    runner()


def _open_sessions() -> None:
    served, start = runner(), 1_700_000_000_000
    for number in range(100_000):
        name, now = f"{number:032x}", start + number // 2
        arrival = Arrival(session_id=name, occurred_at=now, context=tuple(CONTEXTS[number % len(CONTEXTS)]))
        served.send(served.topics.arrivals, encode_event(arrival), key=name.encode(), timestamp=now)
        if number % 1_000 == 999:
            served.pump()
            served.advance(now)


def test_100_000_open_sessions_take_at_most_300_megabytes() -> None:
    grown = peak_of(_open_sessions) - peak_of(_import_only)
    show(f"100,000 open sessions: {grown:.0f} MB")
    assert grown <= 300


def _close_a_large_episode() -> None:
    scene = Scene.of(replace(LARGE, dim=MEDIUM.dim))
    scene.belief.fold(scene.episode(10_000), estimator="laplace")


def _close_a_large_personal_episode() -> None:
    Scene.of(LARGE).tastes(sessions=100_000)


@pytest.mark.parametrize(
    ("episode", "most"), [(_close_a_large_episode, 1_000), (_close_a_large_personal_episode, 2_000)]
)
def test_an_episode_with_100_000_ads_fits_into_memory(episode: Callable[[], None], most: float) -> None:
    peak = peak_of(episode)
    show(f"{episode.__name__}: {peak:.0f} MB at its peak")
    assert peak <= most


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_idle_connections_do_not_slow_serve_down(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * IDLE, hard), hard))
    with serve_process(tmp_path) as serve:
        ratios, server = [], urlsplit(serve.url())
        for _ in range(3):
            alone = run_load(serve.url(), 3.0, RATE)
            with ExitStack() as stack:
                for _ in range(IDLE):
                    stack.enter_context(socket.create_connection((server.hostname, server.port), timeout=120))
                beside = run_load(serve.url(), 3.0, RATE)
            assert alone.failed == beside.failed == 0
            ratios.append(beside.p50 / alone.p50)
    show(f"p50 with {IDLE:,} idle connections / without: {statistics.median(ratios):.2f} ×")
    assert statistics.median(ratios) <= 2


def test_the_gateway_adds_little_to_the_time_of_the_client(
    address: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    connection = Connection(servers=(address,))
    with new_topics(connection, 8, learned()) as names, worker_process(address, names, tmp_path) as worker:
        options = ["--broker", address, "--prefix", names.prefix, "--port", "0", "--deadline", "5s"]
        with ChildProcess("gateway", ["worker", "gateway", *options, "--log-format", "text"], tmp_path) as gateway:
            play(connection, names, 200.0, 1.0, worker.check)  # waits until the worker serves
            added = []
            for _ in range(3):
                own = float(np.median(play(connection, names, 200.0, 4.0, worker.check)))
                over = run_load(gateway.url(), 4.0, 200.0)
                assert over.failed == over.fallbacks == 0
                added.append(over.p50 - own)
    show(f"gateway − worker.client, p50: {statistics.median(added):.2f} ms")
    assert statistics.median(added) <= 2
