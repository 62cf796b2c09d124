"""`adcascade serve` against a plain aiohttp handler that answers a constant.

Servers and the client (`load`) are separate processes. `serve` keeps its sessions on disk, as always; both servers
answer the same sessions in turn, as fast as they can and at a rate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from worker.bench.figures import Figure
from worker.bench.load import CONNECTIONS, Load
from worker.bench.processes import ChildProcess, bench_folder
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


class ServerRound(NamedTuple):
    """What a server did in one round: as fast as possible with its processor seconds per request, and at a rate."""

    fast: Load
    spent: float
    steady: Load


def measure(*, seconds: float = SECONDS, rounds: int = ROUNDS) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    with (
        bench_folder() as folder,
        serve_process(folder) as serve,
        ChildProcess("plain aiohttp", ["worker.bench.baselines", "aiohttp"], folder) as plain,
    ):
        yield "starting the servers"
        measured: dict[str, list[ServerRound]] = {serve.name: [], plain.name: []}
        for turn in range(rounds):
            for server in (serve, plain):
                yield f"{server.name}, round {turn + 1} of {rounds}"
                before, _ = server.processor_seconds()
                fast = run_load(server.url(), seconds, 0)
                spent = (server.processor_seconds()[0] - before) / fast.requests
                measured[server.name].append(ServerRound(fast, spent, run_load(server.url(), seconds, RATE)))
    yield from figures(measured)


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


def figures(measured: dict[str, list[ServerRound]]) -> Iterator[Figure]:
    """Yield the figures of the rounds of `serve` and of plain aiohttp."""
    median = statistics.median
    for name, rounds in measured.items():
        spent = median(each.spent for each in rounds)
        detail = f"{SIZE}, whole sessions, {CONNECTIONS} connections; processor {spent * 1e6:.0f} µs/request"
        yield Figure(f"{name}, flat out", median(each.fast.rate for each in rounds), "requests/s", detail=detail)
    ratios = sorted(mine.fast.rate / other.fast.rate for mine, other in zip(*measured.values(), strict=True))
    spread = f"flat out, rounds from {ratios[0]:.3g} to {ratios[-1]:.3g}"
    yield Figure("serve / plain aiohttp", median(ratios), "×", least=0.25, detail=spread)
    for field, most in (("p50", 3.0), ("p99", 15.0)):
        mine, other = (median(getattr(each.steady, field) for each in rounds) for rounds in measured.values())
        detail = f"{field}, durable; {other:.3g} ms with plain aiohttp"
        yield Figure(f"serve, {RATE:.0f} requests/s, {field}", mine, "ms", most=most, detail=detail)
    loads = [load for rounds in measured.values() for each in rounds for load in (each.fast, each.steady)]
    wrong, requests = sum(load.failed + load.fallbacks for load in loads), sum(load.requests for load in loads)
    yield Figure("failed or fallback answers", wrong, "", most=0, detail=f"of {requests:,} requests")
