"""Whole sessions at a rate, over keep-alive connections: the wait of a client from its arrival to the decision.

python -m worker.bench.http.sessions URL SECONDS RATE

It prints its result as JSON. Sessions begin in ticks, and every display is answered a fixed time after it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import numpy as np
import orjson

from worker.bench.http.client import CLICK, DIM, post, whole_answer

TICK: Final = 0.007  # seconds between two batches of arrivals: not a divisor of the periods of a worker
WARM: Final = 1.5  # seconds that do not count
LOOK: Final = 0.2  # seconds between a display and its feedback
CONNECTIONS: Final = 64

Answered = Callable[[int, dict[str, Any]], None]


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients have seen after the warm-up; waits in milliseconds."""

    sessions: int
    failed: int
    fallbacks: int
    arrivals: list[float]
    feedback: list[float]


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, free: Callable[[_Connection], None]) -> None:
        self._free = free
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self._free(self)

    def ask(self, request: bytes, answered: Answered) -> None:
        """Send a request."""
        self._answered = answered
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take an answer."""
        self._buffer += data
        found = whole_answer(self._buffer)
        if found is not None:
            self._buffer = b""
            self._answered(found[0], orjson.loads(found[1]))
            self._free(self)


class SessionPlayer:
    """Plays sessions; `rate` is the number that begin per second."""

    def __init__(self, seconds: float, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._rate, self._seconds = rate, WARM + seconds
        self._chance = random.Random(7)
        contexts = np.random.default_rng(7).standard_normal((512, DIM)).round(6)
        self._contexts = [orjson.dumps(row) for row in contexts.tolist()]
        self._free: deque[_Connection] = deque()
        self._due: deque[tuple[bytes, Answered]] = deque()
        self._open = self._begun = 0
        self._failed = self._fallbacks = 0
        self._waits: dict[str, list[float]] = {"arrivals": [], "feedback": []}
        self._done = self._loop.create_future()

    async def run(self, host: str, port: int) -> Played:
        """Play until the time is over and all sessions have ended."""
        opened = [
            await self._loop.create_connection(lambda: _Connection(self._is_free), host, port)
            for _ in range(CONNECTIONS)
        ]
        self._start = self._loop.time()
        self._tick(0)
        await self._done
        for transport, _ in opened:
            transport.abort()
        return Played(sessions=self._begun, failed=self._failed, fallbacks=self._fallbacks, **self._waits)

    def _tick(self, number: int) -> None:
        elapsed = number * TICK
        if elapsed >= self._seconds:
            self._finish_if_over()
            return
        for _ in range(self._begun, int(self._rate * (elapsed + TICK))):
            self._begun += 1
            self._open += 1
            context = self._chance.choice(self._contexts)
            body = b'{"session_id":"%b","context":%b}' % (uuid4().hex.encode(), context)
            self._ask("arrivals", post(b"/v1/sessions", body))
        self._loop.call_at(self._start + elapsed + TICK, self._tick, number + 1)

    def _finish_if_over(self) -> None:
        over = self._loop.time() - self._start >= self._seconds
        if over and not self._open and not self._done.done():
            self._done.set_result(None)

    def _ask(self, kind: str, request: bytes) -> None:
        due = self._loop.time()

        def answered(status: int, answer: dict[str, Any]) -> None:
            now = self._loop.time()
            if due - self._start > WARM:
                self._waits[kind].append((now - due) * 1000)
            self._failed += status != 200
            self._fallbacks += "fallback" in answer
            if "arm" in answer and "fallback" not in answer:
                self._loop.call_later(LOOK, self._report, answer)
            else:
                self._open -= 1
                self._finish_if_over()

        if self._free:
            self._free.popleft().ask(request, answered)
        else:
            self._due.append((request, answered))

    def _report(self, answer: dict[str, Any]) -> None:
        clicked = self._chance.random() < CLICK
        body = orjson.dumps({"position": answer["position"], "arm": answer["arm"], "clicked": clicked})
        self._ask("feedback", post(b"/v1/sessions/%b/feedback" % answer["session_id"].encode(), body))

    def _is_free(self, connection: _Connection) -> None:
        if self._due:
            connection.ask(*self._due.popleft())
        else:
            self._free.append(connection)


async def play(url: str, seconds: float, rate: float) -> Played:
    """Play sessions against a server."""
    parts = urlsplit(url)
    return await SessionPlayer(seconds, rate).run(parts.hostname or "", parts.port or 0)


if __name__ == "__main__":
    result = asyncio.run(play(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
