"""Answers to nearly all requests, written to the connection in one piece.

A response of aiohttp makes a mapping of its headers, completes it and encodes it again, for every request. Here all but
the length and the date is the same for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


class DirectResponse(web.StreamResponse):
    """An answer with status 200 to a request that `takes_direct`; `headers` are encoded ones."""

    def __init__(self, body: bytes, headers: bytes) -> None:
        # Not the initialiser of aiohttp: nothing of what it makes is read here.
        self._parts = headers, body

    @property
    def status(self) -> int:
        """The status."""
        return 200

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open."""
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the answer."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        headers, body = self._parts
        transport.write(whole_answer(200, headers, body))
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: the answer is written."""


def takes_direct(request: web.BaseRequest) -> bool:
    """Return whether a request can be answered so: HTTP/1.1 over a connection that stays."""
    return request.version == HttpVersion11 and request.keep_alive and request.method != "HEAD"


def whole_answer(status: int, headers: bytes, body: bytes) -> bytes:
    """Return an answer as it is written; `headers` are encoded ones."""
    parts = status, _PHRASES[status], headers, len(body), _DATE.now(), body
    return b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\nDate: %b\r\n\r\n%b" % parts


def encoded(headers: Mapping[str, str]) -> bytes:
    r"""Return headers as they are written.

    >>> encoded({"Server": "adcascade"})
    b'Server: adcascade\r\n'
    """
    return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items())


class _Date:
    """The header Date, made once a second."""

    def __init__(self) -> None:
        self._second, self._text = -1, b""

    def now(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True).encode()
        return self._text


_DATE: Final = _Date()
