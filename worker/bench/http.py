"""`adcascade serve` against a plain aiohttp handler that answers a constant.

Servers and the client are separate processes. `serve` keeps its sessions on disk, as always; both servers answer the
same sessions alternately, at a rate and as fast as they can.

    python -m worker.bench.http URL SECONDS RATE

runs the client: whole sessions over keep-alive connections. It prints its result as JSON. A rate of 0 is as fast as the
server answers. At a rate, requests are due at random times, and the time of an answer counts from when its request was
due, whether or not a connection was free.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import numpy as np
import orjson

from worker.bench.figures import Figure
from worker.bench.processes import PREFIX, ChildProcess
from worker.bench.stream import CONTEXTS, DIM, HORIZON, SIZE, environment
from worker.errors import FailedError
from worker.runtime import process

RATE: Final = 500.0  # requests per second
ROUNDS: Final = 3
SECONDS: Final = 5.0
CONNECTIONS: Final = 128  # so many that a disk which takes 4 ms for a sync, once a batch, does not bound `serve`
CLICK: Final = 0.2  # probability of a click at each position
WARM: Final = 0.5  # seconds that do not count
POST: Final = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has seen: all requests, and after the warm-up answers per second and their times in ms.

    `wrong` are failed requests, and fallback answers.
    """

    requests: int
    wrong: int
    rate: float
    p50: float
    p99: float


class LoadClient:
    """Plays sessions over connections and measures the answers.

    Requests are written by hand: a client library takes more processor time than the servers that are measured.
    """

    def __init__(self, url: str, seconds: float, rate: float) -> None:
        self._server, self._rate, self._seconds = urlsplit(url), rate, seconds
        self._chance = random.Random(7)
        self._contexts = [orjson.dumps(context) for context in CONTEXTS]
        self._due: asyncio.Queue[float] = asyncio.Queue()
        self._times: list[float] = []
        self._requests = self._wrong = 0

    async def run(self) -> Load:
        """Play until the time is over."""
        self._loop = asyncio.get_running_loop()
        self._counts_from = self._loop.time() + WARM
        tasks = [self._loop.create_task(self._play()) for _ in range(CONNECTIONS)]
        if self._rate:
            tasks.append(self._loop.create_task(self._schedule()))
        ended, running = await asyncio.wait(tasks, timeout=WARM + self._seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        for task in ended:
            task.result()  # raises what it raised
        p50, p99 = 1000 * np.percentile(self._times, (50, 99))
        return Load(
            requests=self._requests,
            wrong=self._wrong,
            rate=len(self._times) / self._seconds,
            p50=float(p50),
            p99=float(p99),
        )

    async def _schedule(self) -> None:
        due = self._loop.time()
        while True:
            due += self._chance.expovariate(self._rate)
            await asyncio.sleep(due - self._loop.time())
            self._due.put_nowait(due)

    async def _play(self) -> None:
        """Play one session after another over one connection."""
        reader, writer = await asyncio.open_connection(self._server.hostname, self._server.port)

        async def ask(path: bytes, body: bytes) -> dict[str, Any]:
            due = await self._due.get() if self._rate else self._loop.time()
            writer.write(POST % (path, len(body), body))
            status, received = await _answer(reader)
            now, answer = self._loop.time(), orjson.loads(received)
            if due >= self._counts_from:
                self._times.append(now - due)
            self._requests += 1
            self._wrong += status != b"200" or "fallback" in answer
            return cast("dict[str, Any]", answer)

        while True:
            name = uuid4().hex.encode()  # not by chance that repeats: the next round would send the same sessions
            body = b'{"session_id":"%b","context":%b}' % (name, self._chance.choice(self._contexts))
            answer, clicked, position = await ask(b"/v1/sessions", body), False, 1
            while "arm" in answer and "fallback" not in answer and position <= HORIZON and not clicked:
                clicked = self._chance.random() < CLICK
                body = orjson.dumps({"position": position, "arm": answer["arm"], "clicked": clicked})
                answer = await ask(b"/v1/sessions/%b/feedback" % name, body)
                position += 1


async def _answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the status and the body of the next answer."""
    received = b""
    while part := await reader.read(1 << 16):
        received += part
        head, _, body = received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if length and len(body) == int(length):
            return head[9:12], body
    raise ConnectionError("the server has closed a connection")


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose timers are exact to microseconds.

    With epoll they are whole milliseconds, rounded up: requests would leave 0.6 ms after they were due, in bunches, and
    that would count as a wait for the server.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


# ── the servers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run_load(url: str, seconds: float, rate: float) -> Load:
    """Run the client in a separate process; return what it has seen."""
    arguments = process.command("worker.bench.http", url, str(seconds), str(rate))
    ended = subprocess.run(arguments, env=process.environment(), capture_output=True, check=False, timeout=seconds + 60)
    if ended.returncode:
        raise FailedError(f"the client failed: {ended.stderr.decode(errors='replace')[-500:]}")
    return msgspec.json.decode(ended.stdout, type=Load)


class ServerRound(NamedTuple):
    """What a server did in one round, and its processor seconds per request."""

    load: Load
    spent: float


def measure(*, seconds: float = SECONDS, rounds: int = ROUNDS) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    with (
        TemporaryDirectory(prefix=PREFIX) as folder,
        serve_process(Path(folder)) as serve,
        ChildProcess("plain aiohttp", ["worker.bench.baselines", "aiohttp"], Path(folder)) as plain,
    ):
        yield "starting the servers"
        steady, fast = ({serve.name: list[ServerRound](), plain.name: list[ServerRound]()} for _ in range(2))
        # At the rate first: flat out, sessions come that are learned from long afterwards.
        for pace, rate, measured in ((f"{RATE:.0f} requests/s", RATE, steady), ("flat out", 0, fast)):
            for turn in range(rounds):
                for server in (serve, plain):
                    yield f"{server.name}, {pace}, round {turn + 1} of {rounds}"
                    before, _ = server.processor_seconds()
                    load = run_load(server.url(), seconds, rate)
                    spent = (server.processor_seconds()[0] - before) / load.requests
                    measured[server.name].append(ServerRound(load, spent))
    yield from figures(steady, fast)


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


def figures(steady: dict[str, list[ServerRound]], fast: dict[str, list[ServerRound]]) -> Iterator[Figure]:
    """Yield the figures of the rounds of `serve` and of plain aiohttp, at the rate and flat out."""
    median = statistics.median
    for name, rounds in fast.items():
        spent = median(each.spent for each in rounds)
        detail = f"{SIZE}, whole sessions, {CONNECTIONS} connections; processor {spent * 1e6:.0f} µs/request"
        yield Figure(f"{name}, flat out", median(each.load.rate for each in rounds), "requests/s", detail=detail)
    ratios = sorted(mine.load.rate / other.load.rate for mine, other in zip(*fast.values(), strict=True))
    spread = f"flat out, rounds from {ratios[0]:.3g} to {ratios[-1]:.3g}"
    yield Figure("serve / plain aiohttp", median(ratios), "×", least=0.25, detail=spread)
    for field, most in (("p50", 3.0), ("p99", 15.0)):
        mine, other = (median(getattr(each.load, field) for each in rounds) for rounds in steady.values())
        detail = f"{field}, durable; {other:.3g} ms with plain aiohttp"
        yield Figure(f"serve, {RATE:.0f} requests/s, {field}", mine, "ms", most=most, detail=detail)
    loads = [each.load for rounds in (*steady.values(), *fast.values()) for each in rounds]
    wrong, requests = sum(load.wrong for load in loads), sum(load.requests for load in loads)
    yield Figure("failed or fallback answers", wrong, "", most=0, detail=f"of {requests:,} requests")


if __name__ == "__main__":
    rate = float(sys.argv[3])
    with asyncio.Runner(loop_factory=precise_loop if rate else None) as runner:
        result = runner.run(LoadClient(sys.argv[1], float(sys.argv[2]), rate).run())
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
