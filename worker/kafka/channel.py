"""Messages between two processes of a machine: lines over a socket, some with an open file."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

#: Bytes and files that are received at once.
_AT_ONCE, _FILES = 1 << 16, 8


class Channel:
    """One end of a pair of connected sockets; every message is a line.

    A file is sent with the bytes of its message, so it is there when the line is.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._received = bytearray()
        self._files: deque[int] = deque()
        self._sending = asyncio.Lock()

    async def send(self, line: bytes, file: int | None = None) -> None:
        """Send a line, which has no line break itself, and perhaps an open file, which stays open here."""
        data = memoryview(line + b"\n")
        async with self._sending:
            while data:
                try:
                    sent = self._end.send(data) if file is None else socket.send_fds(self._end, [data], [file])
                except BlockingIOError:
                    await _ready(self._end, asyncio.get_running_loop().add_writer)
                    continue
                data, file = data[sent:], None

    async def receive(self) -> bytes | None:
        """Return the next line without its line break; None when the other end is closed."""
        while (end := self._received.find(b"\n")) < 0:
            try:
                data, files, _, _ = socket.recv_fds(self._end, _AT_ONCE, _FILES)
            except BlockingIOError:
                await _ready(self._end, asyncio.get_running_loop().add_reader)
                continue
            except ConnectionResetError:
                return None
            self._files.extend(files)
            if not data:
                return None
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def take_file(self) -> int | None:
        """Return the oldest file that was received and not taken, to be closed by the caller; None if there is none."""
        return self._files.popleft() if self._files else None

    def close(self) -> None:
        """Close this end, and the files that nobody took."""
        self._end.close()
        while self._files:
            os.close(self._files.popleft())


async def _ready(end: socket.socket, watch: Callable[..., None]) -> None:
    """Wait until a socket can be read or written."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    watch(end, settle)
    try:
        await ready
    finally:
        stop = loop.remove_reader if watch == loop.add_reader else loop.remove_writer
        stop(end)
