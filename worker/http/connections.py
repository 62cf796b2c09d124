"""Connections with limits: how many there may be, and how long a request may take to come in.

Rules that hold in this file:

- A request has `request_timeout` seconds to come in whole, however slowly its bytes do. Then the connection is cut.
- A client that does not read its answers is cut after the same time.
- One connection more than allowed cuts the one that has gone without an answer for longest, unless its request is being
  answered. So connections that do nothing, or too little, cannot keep others out.
- What is not HTTP is answered with problem details. Nothing of it is shown or logged: it may be a key.

`web.TCPSite` has no place for any of this. So the server listens with a subclass of aiohttp's protocol, which overrides
public methods only.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from worker.errors import FailedError
from worker.http.problems import ProblemError, problem_response
from worker.http.settings import HttpSettings

log = logging.getLogger(__name__)

#: Seconds for answers, once the server ends; clients that keep it waiting have less.
END_PATIENCE: Final = 5.0
END_TIMEOUT: Final = 0.5

_LINGER: Final = 1.0  # seconds for which the rest of a rejected body is read, so that the client sees the answer
_RESERVED_FILES: Final = 128  # file descriptors for everything but connections
_SILENT: Final = logging.Logger("aiohttp", logging.CRITICAL + 1)  # errors of aiohttp may have what a client has sent


class HttpConnection(web.RequestHandler):
    """A connection, and since when its client has kept the server waiting."""

    __slots__ = ("connections", "is_answering", "waiting_since")

    def __init__(self, server: web.Server, connections: Connections, **options: Any) -> None:
        super().__init__(server, loop=connections.loop, **options)
        self.connections = connections
        #: Whether a request has come in, whole, and its answer has not gone out.
        self.is_answering = False
        #: When the present request began to come in, or when the client stopped reading; 0 if neither.
        self.waiting_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for the connection."""
        super().connection_made(transport)
        self.connections.admit(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Free its room."""
        self.connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request start its time."""
        if data and not self.waiting_since:  # aiohttp passes nothing on when it resumes
            self.waiting_since = self.connections.loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self.waiting_since = self.connections.loop.time()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self.waiting_since = 0.0

    def received(self) -> None:
        """Note that the present request is here, whole."""
        self.is_answering, self.waiting_since = True, 0.0

    def answered(self) -> None:
        """Note that the answer is ready."""
        self.is_answering, self.waiting_since = False, 0.0
        self.connections.used(self)

    def cut(self) -> None:
        """End the connection immediately."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP; aiohttp would show and log what the client has sent."""
        log.debug("a connection has failed: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        reason, detail = ("unreadable", "this is not HTTP/1.1") if status == 400 else ("internal", "")
        response = problem_response(ProblemError(reason, detail))
        response.force_close()
        return response


class Connections:
    """The open connections of a server."""

    def __init__(self, settings: HttpSettings) -> None:
        self.loop = asyncio.get_running_loop()
        self.patience = settings.request_timeout
        self._most = _that_fit(settings.max_connections)
        self._by_use: dict[HttpConnection, None] = {}  # the one whose last answer is oldest first

    def __len__(self) -> int:
        return len(self._by_use)

    def admit(self, connection: HttpConnection) -> None:
        """Add a new connection; cut another one for it, or the new one itself."""
        self._by_use[connection] = None
        if len(self._by_use) > self._most:
            oldest = next(one for one in self._by_use if not one.is_answering)
            self.forget(oldest)
            oldest.cut()

    def forget(self, connection: HttpConnection) -> None:
        """Remove a connection."""
        self._by_use.pop(connection, None)

    def used(self, connection: HttpConnection) -> None:
        """Note that a request of a connection is answered."""
        if connection in self._by_use:
            del self._by_use[connection]
            self._by_use[connection] = None

    async def cut_slow_clients(self) -> None:
        """Cut connections whose clients keep the server waiting, until cancelled."""
        while True:
            await asyncio.sleep(min(0.25, self.patience / 4))
            before = self.loop.time() - self.patience
            for connection in [one for one in self._by_use if 0.0 < one.waiting_since < before]:
                connection.cut()


@asynccontextmanager
async def listening(app: web.Application, connections: Connections, settings: HttpSettings) -> AsyncIterator[str]:
    """Serve an application while the context is open; yield the URL. At the end, requests are still answered.

    Raises `FailedError` if the port cannot be used.
    """
    runner = web.AppRunner(app, shutdown_timeout=END_PATIENCE)
    await runner.setup()
    assert runner.server is not None
    options = {
        "access_log": None,
        "auto_decompress": False,
        "lingering_time": _LINGER,
        "logger": _SILENT,
    }
    host, port = settings.host, settings.port
    sweeping = asyncio.create_task(connections.cut_slow_clients())
    try:
        server = runner.server
        try:
            listener = await connections.loop.create_server(
                lambda: HttpConnection(server, connections, **options), host, port, backlog=1024
            )
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FailedError(f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any") from None
        try:
            bound = listener.sockets[0].getsockname()[1]
            yield f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        finally:
            listener.close()
    finally:
        connections.patience = min(connections.patience, END_TIMEOUT)
        await runner.cleanup()
        sweeping.cancel()


def _that_fit(wanted: int) -> int:
    """Return how many connections this process may have files for; ask the system for more files first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + _RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _RESERVED_FILES))
