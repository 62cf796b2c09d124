"""Bytes to events and back: msgspec in, orjson out.

Rules that hold here, in `worker.stream.decoding` (in) and in `worker.stream.encoding` (out):

- A record either becomes an event or raises `Rejected`, with a reason of the closed list and one line that says what
  was wrong and where, never the payload. Nothing else escapes from a ``decode_`` function, whatever the bytes.
- Whether a record is rejected depends on the record and the settings alone (see `MAX_DEPTH`), so every runner agrees.
- Unknown fields are ignored, so that a producer may be newer than the worker.
- The same event gives the same bytes, always; decoding them gives the same event. A field that is optional and absent
  is left out. A number that is not finite is refused, because orjson would write `null` in its place.

Most of these functions run once or more per event; what looks repetitive in them is so to spare a call.
"""

from __future__ import annotations

from worker.stream.decoding import (
    MAX_DEPTH,
    Limits,
    Rejected,
    decode_arrival,
    decode_decision,
    decode_episode,
    decode_feedback,
    decode_journal,
)
from worker.stream.encoding import (
    encode_arm_change,
    encode_arrival,
    encode_command,
    encode_decision,
    encode_episode,
    encode_feedback,
    encode_feedback_fact,
    encode_journal,
    encode_many,
    encode_opened,
    encode_progress,
    feedback_document,
    opened_document,
    session_key,
)

__all__ = [
    "MAX_DEPTH",
    "Limits",
    "Rejected",
    "decode_arrival",
    "decode_decision",
    "decode_episode",
    "decode_feedback",
    "decode_journal",
    "encode_arm_change",
    "encode_arrival",
    "encode_command",
    "encode_decision",
    "encode_episode",
    "encode_feedback",
    "encode_feedback_fact",
    "encode_journal",
    "encode_many",
    "encode_opened",
    "encode_progress",
    "feedback_document",
    "opened_document",
    "session_key",
]
