"""The HTTP server, and the two ways to run it.

`http_server` runs on the loop of `adcascade serve` and `adcascade gateway`: requests for ads, their description, the
page to try it out, metrics and health. `WebServer` serves pages from a thread with a loop of its own: a worker answers
health checks while its own loop is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from worker.errors import FailedError
from worker.http.api import BATCH_SIZE, ApiSettings, HttpApi
from worker.http.application import Gatekeeper, add_pages, is_loopback
from worker.http.connections import ConnectionLimits, Connections, listening
from worker.http.metrics import HttpMetrics
from worker.http.pages import HEALTH, Route, description_routes, operations
from worker.http.service import AdService

LOOPBACK: Final = "127.0.0.1"

_WEB_LIMITS: Final = ConnectionLimits(max_connections=64, max_body_bytes=1_000, idle_timeout=10.0)


@asynccontextmanager
async def http_server(
    service: AdService,
    settings: ApiSettings,
    *,
    host: str,
    port: int,
    registry: CollectorRegistry,
    pages: Mapping[str, Route] | None = None,
    troubles: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[str]:
    """Serve while the context is open; yield the URL. Port 0 is any free port.

    `registry` is what /metrics shows, with the metrics of this server; `troubles` is what /readyz lists.
    """
    limits, described = settings.connections, description_routes()
    connections = Connections(limits)
    metrics = HttpMetrics(connections)
    registry.register(metrics)
    gatekeeper = Gatekeeper(
        settings.allowed_hosts, keys=settings.keys, open_pages=(*HEALTH, *described), metrics=metrics
    )
    app = web.Application(middlewares=[gatekeeper.handle], client_max_size=BATCH_SIZE * limits.max_body_bytes)
    HttpApi(service, settings, metrics).add_to(app)
    add_pages(app, {**operations(registry, service.ready, troubles), **described, **(pages or {})})
    async with listening(app, connections, limits, host=host, port=port) as bound:
        yield _url(host, bound)


class WebServer:
    """Answer GET and HEAD requests while the context is open; port 0 is any free port.

    There is no login. On loopback, requests must be for this machine.

    >>> from urllib.request import urlopen
    >>> from worker.http.pages import Page
    >>> with WebServer({"/": lambda headers: Page(body=b"hello")}) as server, urlopen(server.url) as answer:
    ...     answer.read()
    b'hello'
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        limits: ConnectionLimits = _WEB_LIMITS,
    ) -> None:
        self._routes, self._limits = dict(routes), limits
        self.host, self.port = host, port
        self._bound: Future[int] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), name="web", daemon=True)

    @property
    def url(self) -> str:
        """The base URL, without a final slash."""
        return _url(self.host, self.port)

    def __enter__(self) -> WebServer:
        self._thread.start()
        self.port = self._bound.result()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        gatekeeper = Gatekeeper(() if is_loopback(self.host) else None)
        app = web.Application(middlewares=[gatekeeper.handle], client_max_size=self._limits.max_body_bytes)
        add_pages(app, self._routes)
        try:
            connections = Connections(self._limits)
            async with listening(app, connections, self._limits, host=self.host, port=self.port) as bound:
                self._bound.set_result(bound)
                await self._stop.wait()
        except FailedError as error:
            self._bound.set_exception(error)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
