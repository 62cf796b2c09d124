"""An HTTP server in a thread, services that keep sessions in memory, and clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from worker.http.server import http_server
from worker.http.service import AdRequest, Answer, UnavailableError, UnknownSessionError
from worker.http.settings import HttpSettings
from worker.stream.decoding import Limits, decode_arrival, decode_feedback
from worker.stream.events import encode_event
from worker.stream.parameters import Parameters
from worker.stream.session import Session
from worker.stream.settings import Arm, LearningSettings

NOW = 1_700_000_000_000
DIM, SLATE = 2, ("a", "b", "c")


class Memory:
    """A service that keeps sessions in memory; with `slow` set, it answers only fallback ads."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.why_not: str | None = None
        self.slow = False
        self.broken = False

    async def arrive(self, request: AdRequest, deadline: float) -> Answer:
        if self.broken:
            raise RuntimeError("a defect")
        if request.session_id.startswith("unavailable"):
            raise UnavailableError("as a test")
        arrival = decode_arrival(
            request.record(NOW), LearningSettings(dim=DIM, standardise=False), limits=Limits(), timestamp=NOW
        )
        session = Session(NOW, NOW + 60_000, b"", (), 0, SLATE, ("exploit",) * 3, None, (0.3, 0.2, 0.1))
        if self.slow:
            return Answer(arrival.session_id, _decision(arrival.session_id, session), fallback=True)
        return _answer(arrival.session_id, self.sessions.setdefault(arrival.session_id, session))

    async def feedback(self, request: AdRequest, deadline: float) -> Answer:
        feedback = decode_feedback(request.record(NOW), limits=Limits(), horizon=3, timestamp=NOW)
        session = self.sessions.get(feedback.session_id)
        if session is None:
            raise UnknownSessionError("no such session")
        session.apply(feedback)
        return _answer(feedback.session_id, session)

    async def session(self, session_id: str) -> Answer | None:
        session = self.sessions.get(session_id)
        return None if session is None else _answer(session_id, session)

    def newest(self) -> Parameters:
        return Parameters.first(LearningSettings(dim=DIM), tuple(Arm(arm=name, reward=1.0) for name in SLATE))

    def ready(self) -> str | None:
        return self.why_not


class Held(Memory):
    """Answers arrivals when `release` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def arrive(self, request: AdRequest, deadline: float) -> Answer:
        loop = asyncio.get_running_loop()
        self._waiting.append((loop, loop.create_future()))
        self.asked.set()
        await self._waiting[-1][1]
        return await super().arrive(request, deadline)

    def release(self) -> None:
        assert self.asked.wait(120)
        self.asked.clear()
        loop, future = self._waiting.pop()
        loop.call_soon_threadsafe(future.set_result, None)


def _decision(session_id: str, session: Session) -> bytes:
    return encode_event(session.decision(session_id, None))


def _answer(session_id: str, session: Session) -> Answer:
    if session.is_open:
        return Answer(session_id, _decision(session_id, session))
    return Answer(session_id, None, session.ending)


@contextmanager
def http(service: Any, settings: HttpSettings | None = None) -> Iterator[HttpClient]:
    """Serve in a thread while the context is open."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        registry = CollectorRegistry()
        async with http_server(service, replace(settings or HttpSettings(), port=0), registry=registry) as url:
            found.extend((url, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(120)
    try:
        yield HttpClient(found[0])
    finally:
        found[1].call_soon_threadsafe(stop.set)
        thread.join(120)
        assert not thread.is_alive()


class HttpClient:
    """Asks one request per connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and document."""
        status, _, answer = self.ask(method, path, body, **headers)
        return status, json.loads(answer)


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(client: Any) -> socket.socket:
    """Connect to a server that has a host and a port."""
    return socket.create_connection((client.host, client.port), timeout=120)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes a connection within its timeout."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def answer_to(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next answer."""
    received = b""
    while True:
        head, end, body = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if end and len(body) >= int(headers["content-length"]):
            return int(lines[0].split()[1]), headers, body
        data = connection.recv(65_536)
        assert data, received
        received += data
