"""A small web server beside the work: /metrics, /livez, /readyz, and whatever pages are given to it.

It runs in threads of its own and only reads, so a slow or curious client costs the worker nothing but a moment of the
interpreter. Bound to this machine unless told otherwise: there is no login.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker.errors import FailedError

LOOPBACK = "127.0.0.1"

_PATIENCE = 10.0  # seconds that a client may take to send its request
_WORTH_PACKING = 1_000  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is answered."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Route: TypeAlias = Callable[[Mapping[str, str]], Page]  # headers of the request, by lower-case name


def operations(registry: CollectorRegistry, unready: Callable[[], str | None]) -> dict[str, Route]:
    """Return the routes for whoever runs the process.

    `unready` says why no traffic should be sent here yet, or None if all is well. `/livez` only says that the process
    answers: whoever restarts it because of anything else would restart it for nothing.
    """

    def metrics(headers: Mapping[str, str]) -> Page:
        encode, kind = choose_encoder(headers.get("accept", ""))
        return Page(body=encode(registry), kind=kind)

    def ready(_: Mapping[str, str]) -> Page:
        reason = unready()
        return Page(body=b"ready\n") if reason is None else Page(body=f"not ready: {reason}\n".encode(), status=503)

    return {"/metrics": metrics, "/livez": lambda _: Page(body=b"alive\n"), "/readyz": ready}


class WebServer:
    """Answers GET and HEAD on the routes given; a context manager.

    Parameters
    ----------
    routes : by path
    host : an address of this machine; by default only this machine can ask
    port : 0 takes any that is free, see `port`

    Examples
    --------
    >>> from urllib.request import urlopen
    >>> with WebServer({"/": lambda headers: Page(body=b"hello")}) as server, urlopen(server.url) as answer:
    ...     answer.read()
    b'hello'
    """

    def __init__(self, routes: Mapping[str, Route], *, host: str = LOOPBACK, port: int = 0) -> None:
        try:
            self._server = _Server((host, port), _handler(dict(routes)))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FailedError(f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any") from None
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        """The address of `/`, without the slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that keeps its connection open must not hold up the end

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away in the middle is not our trouble."""


def _handler(routes: Mapping[str, Route]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "adcascade"
        sys_version = ""
        timeout = _PATIENCE
        # Head and content leave in one write: beside work that holds the interpreter, every write is a wait for it.
        wbufsize = 1 << 18

        def do_GET(self) -> None:
            """Answer."""
            self._answer(body=True)

        def do_HEAD(self) -> None:
            """Answer without the content."""
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            route = routes.get(urlsplit(self.path).path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            if route is None:
                page = Page(body=f"not found; there is {', '.join(sorted(routes))}\n".encode(), status=404)
            else:
                try:
                    page = route(headers)
                except Exception as error:  # a page that fails must not take the others with it
                    page = Page(body=f"failed: {type(error).__name__}\n".encode(), status=500)
            self._send(page, packed="gzip" in headers.get("accept-encoding", ""), body=body)

        def _send(self, page: Page, *, packed: bool, body: bool) -> None:
            content = page.body
            packed = packed and len(content) >= _WORTH_PACKING
            if packed:
                content = gzip.compress(content, compresslevel=1, mtime=0)
            self.send_response(page.status)
            self.send_header("Content-Type", page.kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if packed:
                self.send_header("Content-Encoding", "gzip")
            for name, value in page.headers:
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: a scrape every few seconds is no news."""

    return Handler
