"""Events to bytes; see `worker.stream.codec` for the rules.

One dictionary display per event that comes often: the order of its fields is what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec
import orjson

from worker.stream.events import (
    ArmChange,
    Arrival,
    Command,
    Decision,
    Episode,
    Feedback,
    FeedbackFact,
    JournalEvent,
    Mode,
    Opened,
    Progress,
)


def encode_arrival(event: Arrival) -> bytes:
    """Write an arrival."""
    if not isfinite(sum(event.context)):
        _refuse_not_finite(event.context, "context")
    record = {"session_id": event.session_id, "occurred_at": event.occurred_at, "context": event.context}
    if event.exclude:
        record["exclude"] = event.exclude
    return orjson.dumps(record)


def encode_feedback(event: Feedback) -> bytes:
    """Write a click or a pass."""
    record = {
        "session_id": event.session_id,
        "occurred_at": event.occurred_at,
        "position": event.position,
        "arm": event.arm,
        "clicked": event.clicked,
    }
    if event.token is not None:
        record["token"] = event.token
    return orjson.dumps(record)


def encode_decision(event: Decision) -> bytes:
    """Write a decision as it is, also one whose arm is not the first of its slate (a log may hold anything)."""
    if not isfinite(event.propensity + event.value):
        _refuse_not_finite((event.propensity, event.value), "propensity, value")
    record = {
        "session_id": event.session_id,
        "arrived_at": event.arrived_at,
        "position": event.position,
        "arm": event.arm,
        "slate": event.slate,
        "mode": event.mode,
        "propensity": event.propensity,
        "parameters_version": event.parameters_version,
        "value": event.value,
    }
    if event.tokens is not None:
        record["tokens"] = event.tokens
    return orjson.dumps(record)


def encode_opened(event: Opened) -> bytes:
    """Write the journal's fact that a session was opened."""
    return orjson.dumps(
        opened_document(
            event.session_id,
            event.arrived_at,
            event.context,
            event.slate,
            event.modes,
            event.exclude,
            event.parameters_version,
        )
    )


def opened_document(
    session_id: str,
    arrived_at: int,
    context: tuple[float, ...],
    slate: tuple[str, ...],
    modes: tuple[Mode, ...],
    exclude: tuple[str, ...],
    parameters_version: int,
) -> dict[str, Any]:
    """Return `opened` as it is to be written, without making it an event first."""
    if not isfinite(sum(context)):
        _refuse_not_finite(context, "context")
    return {
        "kind": "opened",
        "session_id": session_id,
        "arrived_at": arrived_at,
        "context": context,
        "slate": slate,
        "modes": modes,
        "exclude": exclude,
        "parameters_version": parameters_version,
    }


def encode_feedback_fact(event: FeedbackFact | Feedback) -> bytes:
    """Write the journal's fact that feedback came, from the fact or from the feedback itself."""
    return orjson.dumps(feedback_document(event))


def feedback_document(event: FeedbackFact | Feedback) -> dict[str, Any]:
    """Return the fact that feedback came, as it is to be written."""
    return {
        "kind": "feedback",
        "session_id": event.session_id,
        "occurred_at": event.occurred_at,
        "position": event.position,
        "arm": event.arm,
        "clicked": event.clicked,
    }


def encode_progress(event: Progress) -> bytes:
    """Write how far a partition is."""
    return orjson.dumps(
        {
            "kind": "progress",
            "partition": event.partition,
            "partitions": event.partitions,
            "time": event.time,
        }
    )


def encode_arm_change(event: ArmChange) -> bytes:
    """Write a change of an arm."""
    return _encode_rare(event)


def encode_command(event: Command) -> bytes:
    """Write an order to the learner."""
    return _encode_rare(event)


def encode_episode(event: Episode) -> bytes:
    """Write an episode record."""
    return _encode_rare(event)


def encode_journal(event: JournalEvent) -> bytes:
    """Write a journal record of any kind.

    >>> encode_journal(Progress(partition=0, partitions=4, time=1_700_000_000_000))
    b'{"kind":"progress","partition":0,"partitions":4,"time":1700000000000}'
    """
    if type(event) is Opened:
        return encode_opened(event)
    if type(event) is FeedbackFact:
        return encode_feedback_fact(event)
    if type(event) is Progress:
        return encode_progress(event)
    return _encode_rare(event)


def _encode_rare(event: msgspec.Struct) -> bytes:
    """Write an event that comes once per window or less, and so needs no lines of its own."""
    config = event.__struct_config__
    record: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if value is None and field.default is None:
            continue
        if isinstance(value, float | tuple):
            _refuse_not_finite(value if isinstance(value, tuple) else (value,), field.name)
        record[field.name] = value
    return orjson.dumps(record)


#: Documents written in one call: what they take together should stay in the processor's cache.
_AT_ONCE = 256


def encode_many(documents: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Write documents that all begin with the same field and have no others in them, each as if by itself.

    orjson takes a kilobyte for every result and then shrinks it. For results that are kept by the hundred, as those of
    a batch are, that takes ten times as long as to write them: 2 to 3 µs each. In one call it is a quarter of one.

    >>> encode_many([{"session_id": "a", "position": 1}, {"session_id": "b", "position": 2}])
    [b'{"session_id":"a","position":1}', b'{"session_id":"b","position":2}']
    """
    values: list[bytes] = []
    if not documents:
        return values
    # Within a text a quote has a backslash before it, and behind the quote that ends one comes no letter. So this, a
    # brace, a quote and a letter, stands where a document begins and nowhere else. JSON has no newlines of its own.
    head = b'{"%b":' % next(iter(documents[0])).encode()
    for first in range(0, len(documents), _AT_ONCE):
        together = orjson.dumps(documents[first : first + _AT_ONCE])
        values += together[1:-1].replace(b"," + head, b"\n" + head).split(b"\n")
    return values


def _refuse_not_finite(numbers: Sequence[float], name: str) -> None:
    """Raise if a number is not finite; the callers' quick tests also trip over a sum that overflows."""
    for number in numbers:
        if not isfinite(number):
            raise ValueError(f"{name}: {number} cannot be written as JSON")


def session_key(session_id: str) -> bytes:
    """Return the key of a session's records.

    >>> session_key("zoë").decode()
    'zoë'
    """
    return session_id.encode()
