"""Many records in one call: what `decoding` and `encoding` do one by one, with the same outcome.

A call for each record costs more than the work in it, and so does its memory: orjson takes a kilobyte for every result
and then shrinks it, which for thousands that are kept at a time is 2.7 µs a decision. In bulk it is 0.5.

Only what is plain is done here. If anything about some records is not, they are read one by one, and that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from operator import itemgetter
from typing import Any, Final, TypeVar

import msgspec
import orjson

from worker.stream.decoding import MAX_DEPTH, Limits, Rejected, check_exclude, decode_arrival, decode_feedback
from worker.stream.encoding import opened_document
from worker.stream.events import Arrival, Feedback, FeedbackFact, Opened
from worker.stream.topology import Record

E = TypeVar("E")

#: Records read in one call: few enough that a bad one among them sends few to be read one by one.
AT_ONCE: Final = 256

# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arrivals(records: Sequence[Record], *, limits: Limits, dim: int) -> list[Arrival | Rejected]:
    """Read arrivals, or say of each that cannot be used why; see `decode_arrival`."""

    def one(record: Record) -> Arrival:
        return decode_arrival(record.value, limits=limits, dim=dim, timestamp=record.timestamp)

    def are_plain(events: Sequence[Arrival], latest: int) -> bool:
        for event in events:
            if len(event.context) != dim or not hypot(1.0, *event.context) <= limits.max_norm:
                return False
            if event.exclude:
                check_exclude(event.exclude, limits)
        return (
            _are_plain([event.session_id for event in events], limits.max_session_id)
            and max([event.occurred_at for event in events]) <= latest
        )

    return _read(records, _arrivals, limits, one, are_plain)


class Heard(Feedback, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag_field="kind", tag="feedback"):
    """Feedback that is written, but for its token, as the journal's fact that it came."""


def read_feedback(records: Sequence[Record], *, limits: Limits, horizon: int) -> list[Heard | Rejected]:
    """Read clicks and passes, or say of each that cannot be used why; see `decode_feedback`."""

    def one(record: Record) -> Heard:
        event = decode_feedback(record.value, limits=limits, horizon=horizon, timestamp=record.timestamp)
        return Heard(**msgspec.structs.asdict(event))

    def are_plain(events: Sequence[Heard], latest: int) -> bool:
        positions = {event.position for event in events}
        return (
            _are_plain([event.session_id for event in events], limits.max_session_id)
            and _are_plain({event.arm for event in events}, limits.max_arm_id)
            and max([event.occurred_at for event in events]) <= latest
            and min(positions) >= 1
            and max(positions) <= horizon
        )

    return _read(records, _heard, limits, one, are_plain)


def _read(
    records: Sequence[Record],
    decode: Callable[[bytes], list[E]],
    limits: Limits,
    one: Callable[[Record], E],
    are_plain: Callable[[Sequence[E], int], bool],
) -> list[E | Rejected]:
    events: list[E | Rejected] = []
    for first in range(0, len(records), AT_ONCE):
        some = records[first : first + AT_ONCE]
        try:
            together = _read_together([record.value for record in some], decode, limits.max_record_bytes)
            latest = min([record.timestamp for record in some]) + limits.max_ahead_ms
            if are_plain(together, latest):
                events += together
                continue
        except Exception:  # noqa: S110 - whatever it is, it comes again, by itself
            pass
        events += [_read_one(record, one) for record in some]
    return events


def _read_one(record: Record, one: Callable[[Record], E]) -> E | Rejected:
    try:
        return one(record)
    except Rejected as rejected:
        return rejected


def _read_together(values: Sequence[bytes | None], decode: Callable[[bytes], list[E]], most: int) -> list[E]:
    """Read values as the items of one JSON array, or raise.

    Each has to be one JSON object by itself, which is more than that all together make an array of as many objects: a
    value could end in the middle of an object that the next one completes. So each begins with a brace and has no other.
    Then as many objects as braces means that each brace begins an object of the array, and what lies from one brace to
    the comma before the next is that object and nothing else.
    """
    if max(map(len, values)) > min(most, 2 * MAX_DEPTH) or set(map(_first, values)) != _BRACES:
        raise ValueError
    joined = b",".join(values)
    if joined.count(b"{") != len(values):
        raise ValueError
    if not joined.isascii():
        joined.decode()
    events = decode(b"[%b]" % joined)
    if len(events) != len(values):
        raise ValueError
    return events


def _are_plain(texts: Sequence[str] | set[str], most: int) -> bool:
    """Whether none of these ids is empty, too long, or in need of a closer look at its characters."""
    return all(texts) and max(map(len, texts)) <= most and "".join(texts).isprintable()


_first: Final = itemgetter(0)
_BRACES: Final = {ord("{")}
_arrivals: Final = msgspec.json.Decoder(list[Arrival]).decode
_heard: Final = msgspec.json.Decoder(list[Heard]).decode
_encoder: Final = msgspec.json.Encoder()


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_decisions(documents: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Write decisions.

    >>> write_decisions([{"session_id": "a", "position": 1}, {"session_id": "b", "position": 2}])
    [b'{"session_id":"a","position":1}', b'{"session_id":"b","position":2}']
    """
    return _write(documents, b'{"session_id":')


def write_facts(facts: Sequence[Opened | Heard]) -> list[bytes]:
    """Write facts of the journal."""
    heard = _write_heard([fact for fact in facts if type(fact) is Heard])
    if len(heard) == len(facts):
        return heard
    opened = _write([opened_document(fact) for fact in facts if type(fact) is Opened], b'{"kind":')
    first, second = iter(opened), iter(heard)
    return [next(first) if type(fact) is Opened else next(second) for fact in facts]


def _write_heard(heard: Sequence[Heard]) -> list[bytes]:
    # Without a number that is not whole, msgspec writes the same as orjson, and needs no dictionaries.
    facts: Sequence[Feedback | FeedbackFact] = heard
    if {fact.token for fact in heard} - {None}:
        facts = [
            FeedbackFact(
                session_id=fact.session_id,
                occurred_at=fact.occurred_at,
                position=fact.position,
                arm=fact.arm,
                clicked=fact.clicked,
            )
            for fact in heard
        ]
    return _encoder.encode_lines(facts).split(b"\n")[:-1]


def _write(documents: Sequence[Mapping[str, Any]], head: bytes) -> list[bytes]:
    """Write documents that all begin alike and have no others in them.

    Within a string a quote has a backslash before it, and after the quote that ends one comes no letter: so `head`, a
    brace, a quote and a letter, stands at the beginning of documents only. JSON has no newlines of its own.
    """
    values: list[bytes] = []
    for first in range(0, len(documents), AT_ONCE):
        lines = orjson.dumps(documents[first : first + AT_ONCE]).replace(b"," + head, b"\n" + head).split(b"\n")
        lines[0] = lines[0][1:]
        lines[-1] = lines[-1][:-1]
        values += lines
    return values
