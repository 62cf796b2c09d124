"""The records that a client sends, from the values of its caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import orjson

from worker.errors import InputError
from worker.stream.decoding import Limits

#: A context: numbers in the order of the model's features, or features by name.
Context: TypeAlias = Sequence[float] | Mapping[str, Any]

_LONGEST_ID = Limits().max_session_id


def encode_request(context: Context, exclude: Sequence[str]) -> bytes:
    """Return what an arrival asks for, as the members of a JSON object without its braces.

    >>> encode_request([1.0, 2.0], ["shoes"])
    b'"context":[1.0,2.0],"exclude":["shoes"]'
    """
    numbers = context.values() if isinstance(context, Mapping) else context
    for number in numbers:
        if isinstance(number, float) and not isfinite(number):
            raise InputError(f"the context has {number}: only finite numbers can be sent")
    document: dict[str, Any] = {"context": context if isinstance(context, Mapping) else list(context)}
    if exclude:
        document["exclude"] = list(exclude)
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    except TypeError as error:
        raise InputError(f"the context or the exclusions cannot be written as JSON: {error}") from None


def encode_arrival(session_id: str, occurred_at: int, request: bytes) -> bytes:
    """Return the record of an arrival.

    >>> encode_arrival("s", 5, b'"context":[1.0]')
    b'{"session_id":"s","occurred_at":5,"context":[1.0]}'
    """
    return b'{"session_id":%b,"occurred_at":%d,%b}' % (orjson.dumps(session_id), occurred_at, request)


def check_session_id(session_id: str) -> None:
    """Raise `InputError` if the workers would refuse a session id."""
    if not 0 < len(session_id) <= _LONGEST_ID or not session_id.isprintable():
        raise InputError(f"a session id has 1 to {_LONGEST_ID} printable characters, not {session_id[:200]!r}")
