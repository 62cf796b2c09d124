"""Events to bytes; see `worker.stream.codec` for the rules.

One dictionary display per event that comes often: the order of its fields is what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    return orjson.dumps(opened_document(event))


def opened_document(event: Opened) -> dict[str, Any]:
    """Return the fact that a session was opened, as it is to be written."""
    if not isfinite(sum(event.context)):
        _refuse_not_finite(event.context, "context")
    return {
        "kind": "opened",
        "session_id": event.session_id,
        "arrived_at": event.arrived_at,
        "context": event.context,
        "slate": event.slate,
        "modes": event.modes,
        "exclude": event.exclude,
        "parameters_version": event.parameters_version,
    }


def encode_feedback_fact(event: FeedbackFact | Feedback) -> bytes:
    """Write the journal's fact that feedback came, from the fact or from the feedback itself."""
    return orjson.dumps(
        {
            "kind": "feedback",
            "session_id": event.session_id,
            "occurred_at": event.occurred_at,
            "position": event.position,
            "arm": event.arm,
            "clicked": event.clicked,
        }
    )


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
