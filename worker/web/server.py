"""A small HTTP server in threads of its own: /metrics, /livez, /readyz, and any other routes.

It only reads. There is no login, so it listens on loopback by default.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from socket import SHUT_RDWR, socket
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker.errors import FailedError

LOOPBACK = "127.0.0.1"

_REQUEST_TIMEOUT = 10.0  # seconds for a whole request to come in, however slowly its bytes do
_MOST_CONNECTIONS = 64  # each has a thread; beyond that the oldest is closed
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


class WebServer:
    """Answer GET and HEAD requests while the context is open; port 0 is any free port.

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
        """The base URL, without a final slash."""
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
    request_queue_size = 128
    block_on_close = False  # open connections must not delay the shutdown

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._lock = Lock()
        self._open: dict[socket, None] = {}  # the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; the oldest of too many connections makes room."""
        with self._lock:
            self._open[request] = None
            surplus = list(self._open)[: max(0, len(self._open) - _MOST_CONNECTIONS)]
            for oldest in surplus:
                del self._open[oldest]
        for oldest in surplus:
            with suppress(OSError):
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _TimedReader(RawIOBase):
    """Reads from a connection until a deadline."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; raise `TimeoutError` at the deadline."""
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _handler(routes: Mapping[str, Route]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "adcascade"
        sys_version = ""
        # Send header and body in one write: each write waits for the interpreter lock.
        wbufsize = 1 << 18

        def setup(self) -> None:
            """Read with a deadline for the whole request."""
            super().setup()
            self._timed = _TimedReader(self.connection)
            self.rfile = BufferedReader(self._timed)

        def handle_one_request(self) -> None:
            """Read and answer one request."""
            self._timed.deadline = monotonic() + _REQUEST_TIMEOUT
            super().handle_one_request()

        def do_GET(self) -> None:
            """Answer a GET or HEAD request."""
            route = routes.get(urlsplit(self.path).path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            if route is None:
                page = Page(body=f"not found; available: {', '.join(sorted(routes))}\n".encode(), status=404)
            else:
                try:
                    page = route(headers)
                except Exception as error:  # one failing route must not stop the server
                    page = Page(body=f"failed: {type(error).__name__}\n".encode(), status=500)
            self._send(page, "gzip" in headers.get("accept-encoding", "") and len(page.body) >= _LEAST_COMPRESSED)

        do_HEAD = do_GET  # noqa: N815 (the name is that of http.server)

        def _send(self, page: Page, compressed: bool) -> None:
            content = gzip.compress(page.body, compresslevel=1, mtime=0) if compressed else page.body
            self.connection.settimeout(_REQUEST_TIMEOUT)
            self.send_response(page.status)
            for name, value in (
                ("Content-Type", page.kind),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                *((("Content-Encoding", "gzip"),) if compressed else ()),
                *page.headers,
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests: scrapes come every few seconds."""

    return Handler
