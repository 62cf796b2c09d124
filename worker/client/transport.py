"""The records of a client, and the seam between its rules and Kafka: a `ClientTransport` that moves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import orjson

from worker.errors import FailedError, InputError
from worker.stream.decoding import Limits
from worker.stream.topology import Record

#: The topics that clients write to, without the prefix.
Input: TypeAlias = Literal["arrivals", "clicks"]

#: Called with the decisions of every poll.
Receive: TypeAlias = Callable[[Sequence[Record]], None]

#: A context: numbers in the order of the model's features, or features by name.
Context: TypeAlias = Sequence[float] | Mapping[str, Any]

_LONGEST_ID = Limits().max_session_id


class UndeliveredError(FailedError):
    """The brokers did not accept a record within the time for delivery."""


class Keyed(NamedTuple):
    """A record for an input topic."""

    topic: Input
    key: bytes
    value: bytes


class ClientTransport(Protocol):
    """Moves records to and from the workers."""

    @property
    def trouble(self) -> str | None:
        """Why no records can be exchanged at present; None if they can."""

    async def start(self, receive: Receive) -> None:
        """Connect; from the return on, `receive` is called with every new decision. Raises `FailedError`."""

    def send(self, record: Keyed) -> asyncio.Future[None]:
        """Send a record immediately; the future resolves when all replicas have it, or raises `UndeliveredError`."""

    async def stop(self) -> None:
        """Wait until everything sent is delivered or given up, and disconnect."""


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_arrival(
    session_id: str, occurred_at: int, context: Context, exclude: Sequence[str], user_id: str | None = None
) -> tuple[bytes, bytes]:
    """Return the record of an arrival, and the part of it that a repetition must share.

    >>> encode_arrival("s", 5, [1.0, 2.0], ["shoes"], "u")[0]
    b'{"session_id":"s","occurred_at":5,"user_id":"u","context":[1.0,2.0],"exclude":["shoes"]}'
    """
    numbers = context.values() if isinstance(context, Mapping) else context
    for number in numbers:
        if isinstance(number, float) and not isfinite(number):
            raise InputError(f"the context has {number}: only finite numbers can be sent")
    document: dict[str, Any] = {"context": context if isinstance(context, Mapping) else list(context)}
    if exclude:
        document["exclude"] = list(exclude)
    try:
        request = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InputError(f"the context or the exclusions cannot be written as JSON: {error}") from None
    head: dict[str, Any] = {"session_id": session_id, "occurred_at": occurred_at}
    if user_id is not None:
        head["user_id"] = user_id
    return b"%b,%b" % (orjson.dumps(head)[:-1], request[1:]), request


def check_id(one: str, kind: str) -> None:
    """Raise `InputError` if the workers would refuse the id of a session or a user."""
    if not 0 < len(one) <= _LONGEST_ID or not one.isprintable():
        raise InputError(f"a {kind} id has 1 to {_LONGEST_ID} printable characters, not {one[:200]!r}")
