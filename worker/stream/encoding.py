"""Events to bytes, with msgspec.

Rules that hold here:

- The same event gives the same bytes, always; decoding them gives the same event. Fields are in the order of the type.
- An optional field that is absent is left out.
- A number that is not finite is refused, because `null` would be written in its place. Only in the context of `opened`,
  `null` stands for a number that is missing, which is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec

from worker.stream.events import (
    ArmEntry,
    Arrival,
    CatalogueChange,
    Decision,
    Episode,
    Feedback,
    FeedbackFact,
    JournalEvent,
    Opened,
)

_encode = msgspec.json.Encoder().encode


def encode_arrival(event: Arrival) -> bytes:
    """Encode an arrival."""
    _check_finite(event.context, "context")
    return _encode(event)


def encode_feedback(event: Feedback) -> bytes:
    """Encode a click or a pass."""
    return _encode(event)


def fact_of(event: Feedback) -> FeedbackFact:
    """Return the journal's fact that feedback arrived."""
    return FeedbackFact(
        session_id=event.session_id,
        occurred_at=event.occurred_at,
        position=event.position,
        arm=event.arm,
        clicked=event.clicked,
    )


def encode_episode(event: Episode) -> bytes:
    """Encode an episode record."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        _check_finite(value if isinstance(value, tuple) else (value,), name)
    return _encode(event)


def encode_decision(event: Decision) -> bytes:
    """Encode a decision."""
    if not isfinite((event.propensity or 0.0) + event.value):
        _check_finite((event.propensity,), "propensity")
        _check_finite((event.value,), "value")
    return _encode(event)


def encode_journal(event: JournalEvent) -> bytes:
    """Encode a journal record of any kind.

    >>> from worker.stream.events import Progress
    >>> encode_journal(Progress(partition=0, partitions=4, time=1_700_000_000_000))
    b'{"kind":"progress","partition":0,"partitions":4,"time":1700000000000}'
    """
    if type(event) is Opened:
        if not isfinite(sum(event.context)):
            _check_finite([number for number in event.context if number == number], "context")
    elif isinstance(event, CatalogueChange | ArmEntry):
        for change in event.changes if isinstance(event, CatalogueChange) else (event,):
            _check_finite((change.reward,), "reward")
            _check_finite((change.features or {}).values(), "features")
    return _encode(event)


def _check_finite(values: Iterable[Any], name: str) -> None:
    """Raise if a number is not finite."""
    for value in values:
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name}: {value} cannot be written as JSON")
