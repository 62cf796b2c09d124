"""Requests that need no HTTP library: nearly all of a client that keeps its connections.

A client sends an arrival or feedback in one piece, or in two, and waits for the answer. The general parser makes a
message, a stream, a request and two tasks of each. Here it is a match and a loop over the headers, a fifth of that.

Rules that hold in this file:

- Only what is beyond doubt is read here: a path of its own letters, header lines of visible ASCII, one length. Anything
  else is for aiohttp, whether it is wrong, unusual, or simply rare.
- A header that changes what the request means or how it is answered is for aiohttp, too.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

#: Most bytes of a request line with its headers.
MOST_HEAD: Final = 8_190

_START: Final = b"POST /v1/sessions"
_HEAD: Final = re.compile(
    rb"POST /v1/sessions(?:/([A-Za-z0-9._~-]{1,128})/feedback)? HTTP/1\.1((?:\r\n[A-Za-z0-9_-]+:[\t -~]*)*)\Z"
)
_NOT_PLAIN: Final = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"trailer", b"te", b"origin")
)


class Plain(NamedTuple):
    """A request; `session_id` is that of the path of feedback, None for an arrival."""

    session_id: str | None
    authorization: str | None
    body: bytes


def read_plain(data: bytes, most: int) -> Plain | Literal["partial", "other"]:
    r"""Read a request of at most so many bytes of body; `other` is for aiohttp, of `partial` more must come.

    >>> read_plain(b'POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}', 10)
    Plain(session_id=None, authorization=None, body=b'{}')
    >>> read_plain(b'GET /livez HTTP/1.1\r\n\r\n', 10)
    'other'
    """
    head, end, body = data.partition(b"\r\n\r\n")
    if len(head) > MOST_HEAD or not head.startswith(_START):
        return "other"
    if not end:
        return "partial"
    found = _HEAD.match(head)
    if found is None:
        return "other"
    length, authorization = -1, None
    for line in found[2].split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"content-length":
            value = value.strip()
            if length >= 0 or not value.isdigit() or len(value) > 9:
                return "other"
            length = int(value)
        elif name == b"authorization":
            if authorization is not None:
                return "other"
            authorization = value.strip().decode("ascii")
        elif name in _NOT_PLAIN or (name == b"connection" and value.strip().lower() != b"keep-alive"):
            return "other"
    if not 0 < length <= most or len(body) > length:
        return "other"
    if len(body) < length:
        return "partial"
    session = found[1]
    return Plain(None if session is None else session.decode("ascii"), authorization, body)
