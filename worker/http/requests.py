"""Bodies of requests, to the records that they ask for.

A body is decoded twice: here only as far as it takes to make a record of it, then as that record, by the rules for
records. So there is one set of rules, and a context may take every form that an arrival's context may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import unquote
from uuid import uuid4

from msgspec import Raw, Struct

from worker.http.service import ArriveRequest, FeedbackRequest
from worker.stream.decoding import Reader, Rejected

#: Most requests in a batch.
MOST_BATCH: Final = 1_000

_T = TypeVar("_T")
_ABSENT: Final = Raw(b"")


class _Arrive(Struct, gc=False):
    session_id: str | None = None
    occurred_at: Raw = _ABSENT
    context: Raw = _ABSENT
    exclude: Raw = _ABSENT


class _Feedback(Struct, gc=False):
    session_id: str | None = None
    occurred_at: Raw = _ABSENT
    position: Raw = _ABSENT
    arm: Raw = _ABSENT
    clicked: Raw = _ABSENT
    token: Raw = _ABSENT


class _Batch(Struct):
    requests: list[Raw]


_read_arrive: Final = Reader[_Arrive](_Arrive)
_read_feedback: Final = Reader[_Feedback](_Feedback)
_read_batch: Final = Reader[_Batch](_Batch)


def read_arrive(body: bytes, most: int) -> ArriveRequest:
    """Read the body of an arrival, of at most `most` bytes; one without a session id gets a new one."""
    given = _read_arrive(body, most)
    session_id = uuid4().hex if given.session_id is None else given.session_id
    return ArriveRequest(session_id, bytes(given.context), bytes(given.exclude), _time(given.occurred_at))


def read_feedback(body: bytes, most: int, session_id: str | None = None) -> FeedbackRequest:
    """Read the body of feedback, of at most `most` bytes; `session_id` is that of the path, if it has one."""
    given = _read_feedback(body, most)
    session_id = given.session_id if session_id is None else session_id
    if session_id is None:
        raise Rejected("invalid", "Object missing required field `session_id`")
    members = (b"position", given.position), (b"arm", given.arm), (b"clicked", given.clicked), (b"token", given.token)
    sent = b"".join(b',"%b":%b' % (name, bytes(raw)) for name, raw in members if bytes(raw))
    return FeedbackRequest(session_id, sent, _time(given.occurred_at))


def read_batch(body: bytes, most: int, read: Callable[[bytes, int], _T], each: int) -> list[_T | Rejected]:
    """Read a batch, each of its requests with `read` and of at most `each` bytes; rejections take their places."""
    given = _read_batch(body, most).requests
    if len(given) > MOST_BATCH:
        raise Rejected("too-large", f"$.requests has {len(given)} requests, more than {MOST_BATCH}")
    return [_read_one(bytes(raw), read, each) for raw in given]


def _read_one(raw: bytes, read: Callable[[bytes, int], _T], most: int) -> _T | Rejected:
    try:
        return read(raw, most)
    except Rejected as rejected:
        return rejected


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


def _time(raw: Raw) -> bytes:
    given = bytes(raw)
    return b"" if given == b"null" else given
