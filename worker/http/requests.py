"""Bodies of requests, to the records that they ask for.

A body is decoded twice: here only as far as it takes to make a record of it, then as that record, by the rules for
records. So there is one set of rules, and a context may take every form that an arrival's context may.

Other fields are ignored, unless one looks like a misspelling of a field that the request lacks: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

from msgspec import Raw, Struct

from worker.http.service import AdRequest
from worker.stream.decoding import Reader, Rejected, near_name

#: Most requests in a batch.
MOST_BATCH: Final = 1_000

_ABSENT: Final = Raw(b"")


class _Request(Struct, gc=False, forbid_unknown_fields=True):
    """Everything that a request may have; the record of an arrival or of feedback has a part of it."""

    session_id: str | None = None
    occurred_at: Raw = _ABSENT
    context: Raw = _ABSENT
    exclude: Raw = _ABSENT
    position: Raw = _ABSENT
    arm: Raw = _ABSENT
    clicked: Raw = _ABSENT
    token: Raw = _ABSENT

    def of(self, session_id: str, *names: str) -> AdRequest:
        """Return the request of a session, with the members of these names that were sent."""
        sent = [(name.encode(), bytes(getattr(self, name))) for name in names]
        members = b"".join(b',"%b":%b' % member for member in sent if member[1])
        time = bytes(self.occurred_at)
        return AdRequest(session_id, members, b"" if time == b"null" else time)


class _TolerantRequest(_Request, gc=False, forbid_unknown_fields=False):
    """A request with further fields."""


class _Batch(Struct):
    requests: list[Raw]


_read_request: Final = Reader[_Request](_Request)
_read_tolerant: Final = Reader[_Request](_TolerantRequest)
_read_names: Final = Reader[dict[str, Raw]](dict[str, Raw])
_ARRIVE: Final = ("session_id", "occurred_at", "context", "exclude")
_FEEDBACK: Final = ("session_id", "occurred_at", "position", "arm", "clicked", "token")
_read_batch: Final = Reader[_Batch](_Batch)


def _read(body: bytes, most: int, fields: Iterable[str]) -> _Request:
    try:
        return _read_request(body, most)
    except Rejected as rejected:
        if "unknown field" not in rejected.error:
            raise
    names = _read_names(body, most)
    unknown = [name for name in names if name not in _Request.__struct_fields__]
    for field in fields:
        if field not in names and (near := near_name(field, unknown)) is not None:
            raise Rejected("invalid", f"{near!r} is not a field of this request; did you mean {field}?")
    return _read_tolerant(body, most)


def read_arrive(body: bytes, most: int) -> AdRequest:
    """Read the body of an arrival, of at most `most` bytes; one without a session id gets a new one."""
    given = _read(body, most, _ARRIVE)
    return given.of(uuid4().hex if given.session_id is None else given.session_id, "context", "exclude")


def read_feedback(body: bytes, most: int, session_id: str | None = None) -> AdRequest:
    """Read the body of feedback, of at most `most` bytes; `session_id` is that of the path, if it has one."""
    given = _read(body, most, _FEEDBACK if session_id is None else _FEEDBACK[1:])
    session_id = given.session_id if session_id is None else session_id
    if session_id is None:
        raise Rejected("invalid", "Object missing required field `session_id`")
    return given.of(session_id, "position", "arm", "clicked", "token")


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
