"""Requests to a broker without a task, a timer or a turn of the loop for each of them.

aiokafka runs a task per request, and between the bytes of an answer and whoever asked for it are four to eight turns of
the event loop. A client that waits for every answer pays for each. Here an answer is handed over by the call that
reads its bytes. Connecting, TLS, SASL and versions of the protocol stay aiokafka's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from aiokafka.client import ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

log = logging.getLogger(__name__)

_SIZE: Final = Struct(">i")
_HEADER: Final = Struct(">ihhih")  # size, kind, version, number of the request, length of the client's name


class PendingAnswer:
    """What waits for an answer, in place of a future: one of two functions is called at once.

    Parameters
    ----------
    take : called with the answer
    fail : called with the error if the connection is lost; it must send nothing over that connection
    sent : when the request was sent, a time of the loop's clock
    """

    __slots__ = ("_done", "_fail", "_take", "sent")

    def __init__(self, take: Callable[[Any], None], fail: Callable[[BaseException], None], sent: float) -> None:
        self._take, self._fail, self.sent = take, fail, sent
        self._done = False

    def done(self) -> bool:
        """Return whether there is nothing more to wait for."""
        return self._done

    def set_result(self, answer: Any) -> None:
        """Hand the answer over."""
        self._done = True
        try:
            self._take(answer)
        except Exception:  # the answers behind it are read all the same
            log.exception("an answer of a broker cannot be handled")

    def set_exception(self, error: BaseException) -> None:
        """Hand the error over."""
        self._done = True
        self._fail(error)


def send(connection: AIOKafkaConnection, request: Any, answer: PendingAnswer) -> None:
    """Send a request; raise `KafkaError` if the connection is closed."""
    writer = connection._writer
    if writer is None:
        raise KafkaConnectionError(f"no connection to {connection.host}:{connection.port}")
    message = request.prepare(connection._versions)
    if not message.FLEXIBLE_VERSION:
        send_encoded(connection, message, message.encode(), answer)
        return
    number = connection._next_correlation_id()
    head = message.build_request_header(correlation_id=number, client_id=connection._client_id).encode()
    body = message.encode()
    writer.write(b"".join((_SIZE.pack(len(head) + len(body)), head, body)))
    connection._requests.append((number, message, answer))


def send_encoded(connection: AIOKafkaConnection, message: Any, body: bytes, answer: PendingAnswer) -> None:
    """Send the bytes of a message of this kind, without tags in its header; raise as `send` does."""
    writer = connection._writer
    if writer is None:
        raise KafkaConnectionError(f"no connection to {connection.host}:{connection.port}")
    number, name = connection._next_correlation_id(), connection._client_id.encode()
    size = _HEADER.size - _SIZE.size + len(name) + len(body)
    head = _HEADER.pack(size, message.API_KEY, message.API_VERSION, number, len(name))
    writer.write(b"".join((head, name, body)))
    connection._requests.append((number, message, answer))


def open_connection(client: Any, node: int) -> AIOKafkaConnection | None:
    """Return the connection of an aiokafka client to a broker, if there is one."""
    connection: AIOKafkaConnection | None = client._conns.get((node, ConnectionGroup.DEFAULT))
    if connection is None or not connection.connected():
        return None
    read_directly(connection)
    return connection


def read_directly(connection: AIOKafkaConnection) -> None:
    """Have the answers of a connection handled as their bytes come; later, if some are on their way already."""
    transport = connection._writer.transport
    if not connection._requests and not isinstance(transport.get_protocol(), _Frames):
        transport.set_protocol(_Frames(connection, transport.get_protocol()))


def close_if_silent(client: Any, before: float) -> None:
    """Close the connections of a client on which an answer is missing to a request sent before a time."""
    for connection in list(client._conns.values()):
        oldest = connection._requests[0][2] if connection._requests else None
        if isinstance(oldest, PendingAnswer) and oldest.sent < before:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)


class SilenceWatch:
    """Closes connections of a client whose oldest request has waited for an answer longer than `timeout` seconds.

    It has one timer for all requests, and none while nothing is sent.
    """

    def __init__(self, client: Any, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._client, self._timeout = client, timeout
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look later whether what was sent has been answered."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout / 2, self._look)

    def _look(self) -> None:
        self._timer = None
        close_if_silent(self._client, self._loop.time() - self._timeout)
        if any(connection._requests for connection in self._client._conns.values()):
            self.watch()


class _Frames(asyncio.Protocol):
    """Splits what a broker sends into answers; everything else is left to aiokafka's protocol."""

    def __init__(self, connection: AIOKafkaConnection, protocol: Any) -> None:
        self._connection, self._protocol = connection, protocol
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        buffer, connection = self._buffer, self._connection
        if not buffer and len(data) >= _SIZE.size and _SIZE.unpack_from(data)[0] == len(data) - _SIZE.size:
            self._handle(data[_SIZE.size :])  # nearly always
            return
        buffer += data
        at, end = 0, len(buffer)
        while end - at >= _SIZE.size and connection._requests:
            begin = at + _SIZE.size
            size = _SIZE.unpack_from(buffer, at)[0]
            if end - begin < size:
                break
            at = begin + size
            self._handle(bytes(buffer[begin:at]))
        del buffer[:at]

    def _handle(self, frame: bytes) -> None:
        connection = self._connection
        requests = connection._requests
        try:
            number, message, answer = requests[0]
            if (
                type(answer) is not PendingAnswer
                or message.FLEXIBLE_VERSION
                or _SIZE.unpack_from(frame)[0] != number
                or answer.done()
            ):
                connection._handle_frame(frame)
                return
            # As `_handle_frame`, without reading the header through a description of it.
            answer.set_result(message.RESPONSE_TYPE.decode(frame[_SIZE.size :]))
            connection._last_action = time.monotonic()
            requests.popleft()
        except Exception as error:
            log.exception("an answer of %s:%d cannot be read", connection.host, connection.port)
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)

    def eof_received(self) -> bool | None:
        ended: bool | None = self._protocol.eof_received()
        return ended

    def connection_lost(self, exc: BaseException | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
