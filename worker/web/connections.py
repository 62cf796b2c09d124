"""Connections with limits: how many there may be, and how long a request may take to come in.

Rules that hold in this file:

- A request has `request_timeout` seconds to come in whole, however slowly its bytes do. Then the connection is cut.
- A client that does not read its answers gets no further ones, and is cut after the same time.
- Whole requests may be taken past aiohttp (`LimitedServer.take`), one at a time. What is not taken is aiohttp's, and so
  is all that the connection sends from then on. So the bytes of a request are read by one parser alone.
- One connection more than allowed closes the one that has been idle for longest; if none is idle, the one whose client
  has kept the server waiting for longest. If there is none either, the new one is closed. So connections that do
  nothing, or too little, cannot keep others out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
#: From a connection and bytes to what they are: a request that is `taken`, `partial`, or for aiohttp.
Take = Callable[["Connection", bytes], Literal["taken", "partial", "other"]]

_LINGER: Final = 1.0  # seconds for which the rest of a rejected body is read, so that the client sees the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections; times are in seconds. `max_body_bytes` is for single requests."""

    max_connections: int = 10_000
    max_body_bytes: int = 65_536
    request_timeout: float = 10.0
    idle_timeout: float = 300.0


class Connection(RequestHandler):
    """A connection, and since when its client has kept the server waiting."""

    __slots__ = ("_answered", "_held", "_is_asked", "_is_offered", "_limited", "_unblocked", "waiting_since")

    def __init__(self, server: LimitedServer, **options: Any) -> None:
        super().__init__(server, **options)
        self._limited = server
        self._unblocked: asyncio.Future[None] | None = None
        self._is_offered = server.take is not None  # whether requests may be taken past aiohttp
        self._is_asked = False  # whether one is taken and not answered yet
        self._held = b""  # the first part of a request, or what came in before the answer to the last one
        self._answered: asyncio.Future[None] | None = None  # at the end, for the last answer
        #: When the present request began to come in, or when the client stopped reading; 0 if neither.
        self.waiting_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, if there is room."""
        super().connection_made(transport)
        self._limited.admit(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let the room go."""
        self._limited.forget(self)
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request start its time."""
        if data and not self.waiting_since:  # aiohttp passes nothing on when it resumes
            self.waiting_since = self._loop.time()
            self._limited.busy(self)
        if self._is_offered and data:
            self._offer(data)
        else:
            super().data_received(data)

    def _offer(self, data: bytes) -> None:
        """Offer bytes as a request. One that has not come in with its second part is aiohttp's, too."""
        take = self._limited.take
        if self._is_asked:  # the client sends ahead: not further than this
            self._held += data
            if self.transport is not None:
                self.transport.pause_reading()
        elif take is not None and not (self._close or self._force_close):
            is_first, data, self._held = not self._held, self._held + data, b""
            found = take(self, data)
            if found == "taken":
                self._is_asked = True
                self.received()
            elif found == "partial" and is_first:
                self._held = data
            else:
                self._is_offered = False
                super().data_received(data)

    def answer(self, data: bytes) -> None:
        """Write the answer to the request that was taken."""
        self._is_asked = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)
        self._limited.idle(self)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if self._held and self.transport is not None:
            data, self._held, self._is_offered = self._held, b"", False
            self._limited.busy(self)
            self.transport.resume_reading()
            super().data_received(data)

    def _process_keepalive(self) -> None:
        if self._is_asked:  # not idle, as aiohttp would think
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109  as aiohttp calls it
        """Close the connection, after the answer to the present request."""
        if self._is_asked:
            self._answered = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._answered
        await super().shutdown(timeout)

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self.waiting_since = self._loop.time()
        self._unblocked = self._loop.create_future()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self.waiting_since = 0.0
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)
        self._unblocked = None

    def received(self) -> None:
        """Note that the present request is here, whole."""
        if self._unblocked is None:
            self.waiting_since = 0.0

    @property
    def is_blocked(self) -> bool:
        """Whether the client does not read its answers."""
        return self._unblocked is not None

    async def unblocked(self) -> None:
        """Wait until it does, or has gone."""
        if self._unblocked is not None:
            await asyncio.shield(self._unblocked)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log the kind of an error and nothing else: aiohttp would log what the client has sent."""
        log.debug("a connection has failed: %s", type(kw.get("exc_info")).__name__)

    def cut(self) -> None:
        """End the connection at once."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()


class LimitedServer(web.Server):
    """An aiohttp server of one handler, with limits on its connections; `take` may take requests past aiohttp."""

    def __init__(self, handler: Handler, limits: ConnectionLimits, take: Take | None = None) -> None:
        super().__init__(handler, request_factory=self._request)
        self.take = take
        self.limits = limits
        self._idle: dict[Connection, None] = {}  # the one that has been idle for longest first
        self._busy: dict[Connection, None] = {}  # in the order in which their requests began

    def __call__(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(
            self,
            loop=self._loop,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self.limits.idle_timeout,
            lingering_time=_LINGER,
        )

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: AbstractStreamWriter, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        # The handler bounds bodies itself: a batch may have more than a single request.
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=0)

    @property
    def open_connections(self) -> int:
        """The number of connections."""
        return len(self._idle) + len(self._busy)

    def admit(self, connection: Connection) -> None:
        """Take a new connection; make room for it, or close it."""
        if self.open_connections >= self.limits.max_connections:
            oldest = next(iter(self._idle), None) or next((one for one in self._busy if one.waiting_since), None)
            if oldest is None:
                connection.cut()
                return
            self.forget(oldest)
            oldest.cut()
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """Let a connection go."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)

    def busy(self, connection: Connection) -> None:
        """Note that a request comes in."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy[connection] = None

    def idle(self, connection: Connection) -> None:
        """Note that a request is answered."""
        if connection in self._busy:
            del self._busy[connection]
            self._idle[connection] = None

    def received(self, request: web.BaseRequest) -> None:
        """Note that a request is here and its answer ready."""
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.received()
            self.idle(connection)

    async def cut_slow_clients(self) -> None:
        """Cut connections whose clients keep the server waiting, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.request_timeout / 4))
            before = self._loop.time() - self.limits.request_timeout
            for connection in [one for one in self._busy if 0.0 < one.waiting_since < before]:
                connection.cut()
            # A client may stop reading when its last answer is on its way.
            for connection in [one for one in self._idle if 0.0 < one.waiting_since < before]:
                connection.cut()
