"""Bodies of requests, to the records that they ask for.

A body is decoded twice: here only as far as it takes to make a record of it, then as that record, by the rules for
records. So there is one set of rules, and a context may take every form that an arrival's context may.

Other fields are ignored, unless one looks like a misspelling of a field that the request lacks: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

from msgspec import Raw, Struct

from worker.http.service import AdRequest
from worker.stream.decoding import Reader, Rejected, near_name

#: Most requests in a batch.
MOST_BATCH: Final = 1_000


class _Named(Struct):
    session_id: str | None


class _Batch(Struct):
    requests: list[Raw]


_read_batch: Final = Reader[_Batch](_Batch)
_read_members: Final = Reader[dict[str, Raw]](dict[str, Raw])
_read_name: Final = Reader[_Named](_Named)

_ARRIVE: Final = ("session_id", "occurred_at", "context", "exclude", "user_id")
_FEEDBACK: Final = ("session_id", "occurred_at", "position", "arm", "clicked", "token")


def _read(body: bytes, most: int, fields: Sequence[str], session_id: str | None) -> tuple[str | None, bytes, bytes]:
    """Return the session id (that of the path, if it has one), and the other members and the time of a request."""
    given = _read_members(body, most)
    if unknown := [name for name in given if name not in fields]:
        for field in fields if session_id is None else fields[1:]:
            if field not in given and (near := near_name(field, unknown)) is not None:
                raise Rejected("invalid", f"{near!r} is not a field of this request; did you mean {field}?")
    sent = {name: bytes(given[name]) for name in fields if name in given}
    name, time = sent.pop("session_id", b"null"), sent.pop("occurred_at", b"null")
    if session_id is None:
        session_id = _read_name(b'{"session_id":%b}' % name).session_id
    members = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in sent.items())
    return session_id, members, b"" if time == b"null" else time


def read_arrive(body: bytes, most: int) -> AdRequest:
    """Read the body of an arrival, of at most `most` bytes; one without a session id gets a new one."""
    session_id, members, time = _read(body, most, _ARRIVE, None)
    return AdRequest(uuid4().hex if session_id is None else session_id, members, time)


def read_feedback(body: bytes, most: int, session_id: str | None = None) -> AdRequest:
    """Read the body of feedback, of at most `most` bytes; `session_id` is that of the path, if it has one."""
    session_id, members, time = _read(body, most, _FEEDBACK, session_id)
    if session_id is None:
        raise Rejected("invalid", "Object missing required field `session_id`")
    return AdRequest(session_id, members, time)


def read_batch(
    body: bytes, most: int, read: Callable[[bytes, int], AdRequest], each: int
) -> list[AdRequest | Rejected]:
    """Read a batch, each of its requests with `read` and of at most `each` bytes; rejections take their places."""
    given = _read_batch(body, most).requests
    if len(given) > MOST_BATCH:
        raise Rejected("too-large", f"$.requests has {len(given)} requests, more than {MOST_BATCH}")
    requests: list[AdRequest | Rejected] = []
    for raw in given:
        try:
            requests.append(read(bytes(raw), each))
        except Rejected as rejected:
            requests.append(rejected)
    return requests


def session_in_path(segment: str) -> str:
    """Return the session id that a segment of a path stands for.

    >>> session_in_path("a%2Fb")
    'a/b'
    """
    if "%" not in segment:
        return segment
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise Rejected("invalid", "the session id in the path is not UTF-8") from None
