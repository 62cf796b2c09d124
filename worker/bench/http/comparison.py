"""Measure the two servers in turn: as fast as they answer, and at a rate."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from worker.bench.figures import Figure
from worker.bench.http.client import CONNECTIONS, DIM, HORIZON, Load
from worker.bench.http.servers import ServerProcess, idle_connections, played
from worker.simulation.environments import make_environment

ARMS: Final = 50
RATE: Final = 500.0
ROUNDS: Final = 3
SECONDS: Final = 5.0
FIGURES: Final = 9
IDLE: Final = 10_000  # connections that do nothing


def measure(*, quick: bool = False) -> Iterator[Figure | str]:
    """Yield the figures."""
    seconds, rounds = (0.5, 1) if quick else (SECONDS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder, ExitStack() as stack:
        yield "starting the servers"
        served = stack.enter_context(ServerProcess("serve", Path(folder), _serve(Path(folder))))
        constant = stack.enter_context(ServerProcess("constant", Path(folder), ["worker.bench.http.constant"]))
        spent: dict[str, list[float]] = {"serve": [], "constant": []}
        fast: dict[str, list[Load]] = {"serve": [], "constant": []}
        steady: dict[str, list[Load]] = {"serve": [], "constant": []}
        crowded: list[Load] = []
        held: list[int] = []
        for _ in range(rounds):
            for name, server in (("serve", served), ("constant", constant)):
                yield f"{name}, as fast as it answers"
                before = server.processor_seconds()
                fast[name].append(_load(server.url, seconds, 0))
                spent[name].append((server.processor_seconds() - before) / max(1, fast[name][-1].answers))
                yield f"{name}, at {RATE:.0f} requests/s"
                steady[name].append(_load(server.url, seconds, RATE))
            yield f"serve, at {RATE:.0f} requests/s beside idle connections"
            with idle_connections(served.url, 100 if quick else IDLE) as idle:
                held.append(idle)
                crowded.append(_load(served.url, seconds, RATE))
        server_memory = served.resident_memory()
    yield from _figures(fast, steady)
    failed = sum(load.failed for loads in (*fast.values(), *steady.values(), crowded) for load in loads)
    yield Figure("failed requests", float(failed), "", most=0)
    yield _beside_idle(min(held), crowded, steady["serve"])
    mine, other = (statistics.median(spent[name]) * 1e6 for name in ("serve", "constant"))
    detail = f"of the serving process, for a request; {other:.0f} µs with plain aiohttp"
    yield Figure("processor time of serve", mine, "µs", detail=detail)
    yield Figure("memory of serve", server_memory / 1e6, "MB", detail="with its learner, at the end")


def _figures(fast: dict[str, list[Load]], steady: dict[str, list[Load]]) -> Iterator[Figure]:
    rates = {name: statistics.median(load.rate for load in loads) for name, loads in fast.items()}
    ratios = sorted(mine.rate / other.rate for mine, other in zip(fast["serve"], fast["constant"], strict=True))
    given_up = sum(load.fallbacks for load in (*fast["serve"], *steady["serve"]))
    shape = f"d={DIM} K={ARMS} H={HORIZON}, whole sessions, {CONNECTIONS} connections"
    yield Figure(
        "serve", rates["serve"], "requests/s", least=3_000, detail=f"{shape}; {given_up} answers came too late"
    )
    yield Figure("plain aiohttp, a constant", rates["constant"], "requests/s", detail="the same loop")
    spread = f"rounds from {ratios[0]:.3g} to {ratios[-1]:.3g}"
    yield Figure("serve / plain aiohttp", statistics.median(ratios), "×", least=0.35, detail=spread)
    for name, percentile, most in (("p50", "p50", 2.0), ("p99", "p99", 10.0)):
        mine = statistics.median(getattr(load, percentile) for load in steady["serve"])
        other = statistics.median(getattr(load, percentile) for load in steady["constant"])
        detail = f"{steady['serve'][0].rate:.0f} requests/s; {other:.3g} ms with plain aiohttp"
        yield Figure(f"answer of serve, {name}", mine, "ms", most=most, detail=detail)


def _beside_idle(idle: int, crowded: list[Load], alone: list[Load]) -> Figure:
    ratios, highest = (
        sorted(getattr(one, part) / getattr(other, part) for one, other in zip(crowded, alone, strict=True))
        for part in ("p50", "p99")
    )
    fewer = "" if idle == IDLE else f"; this system allows no more than {idle:,}"
    detail = (
        f"p50 at {RATE:.0f} requests/s, with and without them, rounds from {ratios[0]:.3g} to {ratios[-1]:.3g}; "
        f"p99 {statistics.median(highest):.3g} ×{fewer}"
    )
    return Figure(f"beside {idle:,} idle connections", statistics.median(ratios), "×", most=2, detail=detail)


def _serve(folder: Path) -> list[str]:
    environment = make_environment("opposite", dim=DIM, arms=ARMS, generator=np.random.default_rng(3))
    catalogue = folder / "arms.json"
    arms = [{"arm": arm.arm, "reward": arm.reward} for arm in environment.catalogue()]
    catalogue.write_text(json.dumps({"arms": arms}), encoding="utf-8")
    return [
        *("worker", "serve", "--dim", str(DIM), "--horizon", str(HORIZON), "--catalog", str(catalogue)),
        *("--state", str(folder / "state"), "--port", "0", "--log-format", "text"),
        *("--window", "5s", "--session-timeout", "5s", "--lateness", "1s", "--warmup", "1"),
        *("--max-connections", str(IDLE + 1_000)),
        *("--deadline", "5s"),  # an answer that was given up would not be measured
    ]


def _load(url: str, seconds: float, rate: float) -> Load:
    return played(Load, seconds, "worker.bench.http.load", url, str(seconds), str(rate))
