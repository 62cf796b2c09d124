"""The HTTP server, and the two ways to run it.

`http_server` runs on the loop of `adcascade serve` and `adcascade gateway`: requests for ads, their description, the
page to try it out, metrics and health. `WebServer` serves pages from a thread with a separate loop: a worker answers
health checks while its own loop is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from threading import Thread
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry

from worker.errors import FailedError
from worker.http.api import HttpApi
from worker.http.application import Gatekeeper, add_pages, is_loopback
from worker.http.connections import Connections, listening
from worker.http.metrics import HTTP_CATALOGUE, HttpMetrics
from worker.http.pages import HEALTH, Page, Route, description_routes, operations
from worker.http.service import AdService, example_context
from worker.http.settings import HttpSettings
from worker.metrics.exposition import Series
from worker.stream.ad_figures import all_figures

#: For pages only: few connections, hardly a body.
PAGES: Final = HttpSettings(max_connections=64, max_record_bytes=1_000)


@asynccontextmanager
async def http_server(
    service: AdService,
    settings: HttpSettings,
    *,
    registry: CollectorRegistry,
    pages: Mapping[str, Route] | None = None,
    troubles: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[str]:
    """Serve while the context is open; yield the URL.

    `registry` is what /metrics shows, with the metrics of this server; `troubles` is what /readyz lists.
    """
    described, connections = description_routes(), Connections(settings)
    metrics = HttpMetrics(connections)
    registry.register(Series(HTTP_CATALOGUE, lambda: metrics))
    gatekeeper = Gatekeeper(
        settings.allowed_hosts, keys=settings.keys, open_pages=(*HEALTH, *described), metrics=metrics
    )
    app = web.Application(middlewares=[gatekeeper.handle], client_max_size=settings.max_record_bytes)
    HttpApi(service, settings, metrics).add_to(app)
    newest: dict[str, Route] = {
        "/v1/arms": lambda _: Page(body=orjson.dumps(all_figures(service.newest())), kind="application/json"),
        "/v1/example.json": lambda _: Page(body=example_context(service.newest().settings), kind="application/json"),
    }
    add_pages(app, {**operations(registry, service.ready, troubles), **described, **newest, **(pages or {})})
    async with listening(app, connections, settings) as url:
        yield url


class WebServer:
    """Answer GET and HEAD requests while the context is open, at `url`, which has no final slash.

    There is no login. On loopback, requests must be for this machine.

    >>> from urllib.request import urlopen
    >>> from worker.http.pages import Page
    >>> with WebServer({"/": lambda headers: Page(body=b"hello")}) as server, urlopen(server.url) as answer:
    ...     answer.read()
    b'hello'
    """

    url: str

    def __init__(self, routes: Mapping[str, Route], *, host: str = PAGES.host, port: int = 0) -> None:
        self._routes, self._settings = dict(routes), replace(PAGES, host=host, port=port)
        self._bound: Future[str] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), name="web", daemon=True)

    def __enter__(self) -> WebServer:
        self._thread.start()
        self.url = self._bound.result()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        settings = self._settings
        gatekeeper = Gatekeeper(() if is_loopback(settings.host) else None)
        app = web.Application(middlewares=[gatekeeper.handle], client_max_size=settings.max_record_bytes)
        add_pages(app, self._routes)
        try:
            async with listening(app, Connections(settings), settings) as url:
                self._bound.set_result(url)
                await self._stop.wait()
        except FailedError as error:
            self._bound.set_exception(error)
