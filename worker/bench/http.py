"""`adcascade serve` against a plain aiohttp handler that answers a constant.

Servers and the client (`load`) are separate processes. `serve` keeps its sessions on disk, as always; both servers
answer the same sessions in turn, as fast as they can and at a rate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from worker.bench.figures import Figure
from worker.bench.load import CONNECTIONS, Load
from worker.bench.processes import ChildProcess
from worker.bench.stream import DIM, HORIZON, SIZE, environment
from worker.errors import FailedError
from worker.runtime import child

RATE: Final = 500.0  # requests per second
ROUNDS: Final = 3
SECONDS: Final = 5.0


def run_load(url: str, seconds: float, rate: float) -> Load:
    """Run the client in a separate process; return what it has seen."""
    arguments = child.command("worker.bench.load", url, str(seconds), str(rate))
    ended = subprocess.run(arguments, env=child.environment(), capture_output=True, check=False, timeout=seconds + 60)
    if ended.returncode:
        raise FailedError(f"the client failed: {ended.stderr.decode(errors='replace')[-500:]}")
    return msgspec.json.decode(ended.stdout, type=Load)


def measure(*, seconds: float = SECONDS, rounds: int = ROUNDS) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    with (
        tempfile.TemporaryDirectory(prefix="adcascade-bench-", ignore_cleanup_errors=True) as folder,
        serve_process(Path(folder)) as serve,
        ChildProcess("plain aiohttp", ["worker.bench.baselines", "aiohttp"], Path(folder)) as plain,
    ):
        yield "starting the servers"
        fast: dict[str, list[Load]] = {serve.name: [], plain.name: []}
        steady: dict[str, list[Load]] = {serve.name: [], plain.name: []}
        spent: dict[str, list[float]] = {serve.name: [], plain.name: []}
        for turn in range(rounds):
            for server in (serve, plain):
                yield f"{server.name}, round {turn + 1} of {rounds}"
                before, _ = server.processor_seconds()
                fast[server.name].append(run_load(server.url(), seconds, 0))
                spent[server.name].append((server.processor_seconds()[0] - before) / fast[server.name][-1].requests)
                steady[server.name].append(run_load(server.url(), seconds, RATE))
    yield from figures(fast, steady, {name: statistics.median(each) for name, each in spent.items()})


def serve_process(folder: Path) -> ChildProcess:
    """Start `adcascade serve` with a state folder."""
    arms = [{"arm": arm.arm, "reward": arm.reward} for arm in environment().catalogue()]
    (folder / "arms.json").write_text(json.dumps({"arms": arms}), encoding="utf-8")
    arguments = [
        *("worker", "serve", "--dim", str(DIM), "--horizon", str(HORIZON), "--catalog", str(folder / "arms.json")),
        *("--state", str(folder / "state"), "--port", "0", "--log-format", "text"),
        *("--window", "5s", "--session-timeout", "5s", "--lateness", "1s", "--warmup", "1"),
        *("--deadline", "5s"),  # an answer that was given up would not be measured
    ]
    return ChildProcess("serve", arguments, folder)


def figures(fast: dict[str, list[Load]], steady: dict[str, list[Load]], spent: dict[str, float]) -> Iterator[Figure]:
    """Yield the figures of rounds: as fast as possible, at a rate, and the processor seconds of a request."""
    for name, loads in fast.items():
        rate = statistics.median(load.rate for load in loads)
        detail = f"{SIZE}, whole sessions, {CONNECTIONS} connections; processor {spent[name] * 1e6:.0f} µs/request"
        yield Figure(f"{name}, flat out", rate, "requests/s", detail=detail)
    ratios = sorted(mine.rate / other.rate for mine, other in zip(*fast.values(), strict=True))
    spread = f"flat out, rounds from {ratios[0]:.3g} to {ratios[-1]:.3g}"
    yield Figure("serve / plain aiohttp", statistics.median(ratios), "×", least=0.25, detail=spread)
    for field, most in (("p50", 3.0), ("p99", 15.0)):
        mine, other = (statistics.median(getattr(load, field) for load in loads) for loads in steady.values())
        detail = f"{field}, durable; {other:.3g} ms with plain aiohttp"
        yield Figure(f"serve, {RATE:.0f} requests/s, {field}", mine, "ms", most=most, detail=detail)
    loads = [load for rounds in (*fast.values(), *steady.values()) for load in rounds]
    wrong, requests = sum(load.failed + load.fallbacks for load in loads), sum(load.requests for load in loads)
    yield Figure("failed or fallback answers", wrong, "", most=0, detail=f"of {requests:,} requests")
