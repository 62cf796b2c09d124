"""The load: whole sessions over keep-alive connections, as fast as they are answered or at a rate.

A rate of 0 is as fast as possible. At a rate, the time of an answer counts from when its request was due, whether or
not a connection was free.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import numpy as np
import orjson

DIM: Final = 16
HORIZON: Final = 5
CONNECTIONS: Final = 32
CLICK: Final = 0.2  # probability of a click at each position
WARM_UP: Final = 0.5  # seconds that do not count


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has seen; times in milliseconds. `answers` has those of the warm-up, too."""

    answers: int
    requests: int
    seconds: float
    sessions: int
    failed: int
    fallbacks: int
    p50: float
    p99: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds


class LoadClient:
    """Runs sessions over connections and measures the answers."""

    def __init__(self, seconds: float, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._rate = rate
        self._counts_from = self._loop.time() + WARM_UP
        self._ends = self._counts_from + seconds
        self._chance = random.Random(7)
        self._contexts = [
            orjson.dumps(row) for row in np.random.default_rng(7).standard_normal((512, DIM)).round(6).tolist()
        ]
        self._free: deque[_Connection] = deque()
        self._due: deque[float] = deque()
        self.times: list[float] = []
        self.answers = self.sessions = self.failed = self.fallbacks = 0
        self.done = self._loop.create_future()

    async def run(self, host: str, port: int) -> Load:
        """Send requests until the time is over."""
        for _ in range(CONNECTIONS):
            await self._loop.create_connection(lambda: _Connection(self), host, port)
        if self._rate:
            self._loop.call_soon(self._schedule, self._loop.time())
        await self.done
        p50, p99 = np.percentile(self.times, (50, 99)) * 1000 if self.times else (0.0, 0.0)
        return Load(
            answers=self.answers,
            requests=len(self.times),
            seconds=self._ends - self._counts_from,
            sessions=self.sessions,
            failed=self.failed,
            fallbacks=self.fallbacks,
            p50=float(p50),
            p99=float(p99),
        )

    def _schedule(self, due: float) -> None:
        """Send what is due, and plan the next one."""
        now = self._loop.time()
        while due <= now:
            if self._free:
                self._free.popleft().send(due)
            else:
                self._due.append(due)
            due += self._chance.expovariate(self._rate)
        if now >= self._ends:
            self._finish()
        else:
            self._loop.call_at(due, self._schedule, due)

    def is_free(self, connection: _Connection) -> None:
        """Give a connection its next request, now or when it is due."""
        if not self._rate:
            connection.send(self._loop.time())
        elif self._due:
            connection.send(self._due.popleft())
        else:
            self._free.append(connection)

    def answered(self, sent: float, status: int, fallback: bool) -> None:
        """Count an answer."""
        now = self._loop.time()
        self.answers += 1
        if sent >= self._counts_from and now <= self._ends:
            self.times.append(now - sent)
        self.failed += status != 200
        self.fallbacks += fallback
        if now > self._ends:
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def arrival(self) -> bytes:
        """Return the request of a new session."""
        self.sessions += 1
        session = uuid4().hex.encode()  # not by chance that repeats: the next round would send the same sessions
        return post(
            b"/v1/sessions", b'{"session_id":"%b","context":%b}' % (session, self._chance.choice(self._contexts))
        )

    def feedback(self, session: str, position: int, arm: str) -> tuple[bytes, bool]:
        """Return the request of a click or a pass, and whether it was a click."""
        clicked = self._chance.random() < CLICK
        body = b'{"position":%d,"arm":"%b","clicked":%b}' % (position, arm.encode(), b"true" if clicked else b"false")
        return post(b"/v1/sessions/%b/feedback" % session.encode(), body), clicked


def post(path: bytes, body: bytes) -> bytes:
    """Return a request with a body."""
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        len(body),
        body,
    )


def whole_answer(received: bytes) -> tuple[int, bytes] | None:
    """Return the status and the body of an answer; None if it is not whole yet."""
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return None
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return None if len(body) < length else (int(head[9:12]), body)


class _Connection(asyncio.Protocol):
    """One session after the other."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._buffer = b""
        self._sent = 0.0
        self._next: tuple[str, int, str] | None = None  # session, position and arm to answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self._client.is_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count what the server closed."""
        if not self._client.done.done():
            self._client.failed += 1

    def send(self, due: float) -> None:
        """Send the next request, which was due then."""
        self._sent = due
        if self._next is None:
            request = self._client.arrival()
            self._position = 0
        else:
            session, position, arm = self._next
            request, clicked = self._client.feedback(session, position, arm)
            self._position = HORIZON if clicked else position
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take an answer."""
        self._buffer += data
        found = whole_answer(self._buffer)
        if found is None:
            return
        self._buffer = b""
        answer = orjson.loads(found[1])
        self._client.answered(self._sent, found[0], "fallback" in answer)
        goes_on = "arm" in answer and self._position < HORIZON and "fallback" not in answer
        self._next = (answer["session_id"], self._position + 1, answer["arm"]) if goes_on else None
        if not self._client.done.done():
            self._client.is_free(self)


async def load(url: str, seconds: float, rate: float) -> Load:
    """Send sessions to a server for so many seconds."""
    parts = urlsplit(url)
    return await LoadClient(seconds, rate).run(parts.hostname or "", parts.port or 0)
