"""Unusable records, one kind for each dead-letter reason that a client can cause."""

from __future__ import annotations

from typing import Any, Final, Literal

import orjson

from worker.stream.decoding import LARGEST_NUMBER, Limits
from worker.stream.events import DEAD_LETTER_REASONS, Reason

#: The reasons that need more than one record of a session, or a secret.
_OTHERS: Final = frozenset(("arm-mismatch", "token", "parked-overflow"))

#: All kinds: the dead-letter reasons that a single record can have.
KINDS: Final[tuple[Reason, ...]] = tuple(reason for reason in DEAD_LETTER_REASONS if reason not in _OTHERS)

_LIMITS = Limits()


def spoilt(kind: Reason, arrival: bytes, *, arm: str, horizon: int) -> tuple[Literal["arrivals", "clicks"], bytes]:
    """Turn a good arrival into a record of a kind; return its topic and value.

    `arm` is an arm of the worker. Workers with other limits than the default may accept some of the records.

    >>> good = b'{"session_id":"s","occurred_at":5,"context":[1.0]}'
    >>> spoilt("dimension", good, arm="a", horizon=5)
    ('arrivals', b'{"session_id":"s","occurred_at":5,"context":[1.0,1.0]}')
    """
    if kind == "undecodable":
        return "arrivals", arrival[: len(arrival) // 2]
    record: dict[str, Any] = orjson.loads(arrival)
    if kind in ("position", "unknown-arm"):
        del record["context"]
        record |= {
            "position": horizon + 1 if kind == "position" else 1,
            "arm": f"no-{arm}" if kind == "unknown-arm" else arm,
            "clicked": True,
        }
        return "clicks", orjson.dumps(record)
    match kind:
        case "invalid":
            record["occurred_at"] = "noon"
        case "too-large":
            record["padding"] = "x" * _LIMITS.max_record_bytes
        case "dimension":
            record["context"] = [*record["context"], 1.0]
        case "norm":
            record["context"][0] = 2 * LARGEST_NUMBER
        case "future":
            record["occurred_at"] += 60 * _LIMITS.max_ahead_ms
        case "past":
            record["occurred_at"] //= 1_000  # seconds
        case "session-reused":
            record["context"][0] += 1.0
    return "arrivals", orjson.dumps(record)
