"""The web server of a worker, in a thread of its own: /metrics, /livez, /readyz, and any other routes.

It only reads. There is no login, so it listens on loopback by default.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker.errors import FailedError

LOOPBACK = "127.0.0.1"

_REQUEST_TIMEOUT = 10.0  # seconds for a whole request to come in, however slowly its bytes do
_MOST_CONNECTIONS = 64
_LEAST_COMPRESSED = 1_000  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A response."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Route: TypeAlias = Callable[[Mapping[str, str]], Page]  # from the request headers, by lower-case name


def operations(
    registry: CollectorRegistry,
    unready: Callable[[], str | None],
    troubles: Callable[[], Sequence[str]] = tuple,
) -> dict[str, Route]:
    """Return the routes for monitoring.

    `unready` returns the reason why the process is not ready, or None; `troubles` returns what else is wrong, which
    `/readyz` lists. `/livez` succeeds whenever the process answers: a restart would help with nothing else.
    """

    def metrics(headers: Mapping[str, str]) -> Page:
        encode, kind = choose_encoder(headers.get("accept", ""))
        return Page(body=encode(registry), kind=kind)

    def ready(_: Mapping[str, str]) -> Page:
        reason, wrong = unready(), troubles()
        state = f"not ready: {reason}" if reason is not None else "ready, but there is trouble:" if wrong else "ready"
        lines = [state, *(f"- {text}" for text in wrong)]
        return Page(body="".join(f"{line}\n" for line in lines).encode(), status=200 if reason is None else 503)

    return {"/metrics": metrics, "/livez": lambda _: Page(body=b"alive\n"), "/readyz": ready}


def answer(routes: Mapping[str, Route], method: str, path: str, headers: Mapping[str, str]) -> Page:
    """Return the page for a GET or HEAD request; it is compressed if that is worth it and the client takes it."""
    if method not in ("GET", "HEAD"):
        return Page(body=b"only GET and HEAD\n", status=501)
    route = routes.get(path)
    if route is None:
        return Page(body=f"not found; available: {', '.join(sorted(routes))}\n".encode(), status=404)
    try:
        page = route(headers)
    except Exception as error:  # one failing route must not stop the server
        return Page(body=f"failed: {type(error).__name__}\n".encode(), status=500)
    if len(page.body) < _LEAST_COMPRESSED or "gzip" not in headers.get("accept-encoding", ""):
        return page
    body = gzip.compress(page.body, compresslevel=1, mtime=0)
    return Page(body=body, kind=page.kind, status=page.status, headers=(*page.headers, ("Content-Encoding", "gzip")))


class WebServer:
    """Answer GET and HEAD requests while the context is open; port 0 is any free port.

    >>> from urllib.request import urlopen
    >>> with WebServer({"/": lambda headers: Page(body=b"hello")}) as server, urlopen(server.url) as answer:
    ...     answer.read()
    b'hello'
    """

    def __init__(self, routes: Mapping[str, Route], *, host: str = LOOPBACK, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FailedError(f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any") from None
        self._routes = dict(routes)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._thread = Thread(target=self._run, name="web", daemon=True)
        self._started = Event()

    @property
    def url(self) -> str:
        """The base URL, without a final slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()
            self._started.set()

    async def _serve(self) -> None:
        # aiohttp takes a while to import; --help and wrong options need not wait for it.
        from aiohttp import web

        from worker.web.connections import ConnectionLimits, LimitedServer

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            headers = {name.lower(): value for name, value in request.headers.items()}
            path = request.raw_path.partition("?")[0]
            # In a thread: the figures of a large catalogue take a while, and health checks must not wait for them.
            page = await asyncio.to_thread(answer, self._routes, request.method, path, headers)
            server.received(request)
            more = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "adcascade"}
            return web.Response(
                body=page.body, status=page.status, headers={"Content-Type": page.kind, **more, **dict(page.headers)}
            )

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        limits = ConnectionLimits(
            max_connections=_MOST_CONNECTIONS, request_timeout=_REQUEST_TIMEOUT, idle_timeout=_REQUEST_TIMEOUT
        )
        server = LimitedServer(handle, limits)
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            sweeping = asyncio.create_task(server.cut_slow_clients())
            self._started.set()
            await self._stop.wait()
            sweeping.cancel()
        finally:
            await runner.cleanup()
