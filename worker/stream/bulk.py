"""Many records in one call: what `decoding` and `encoding` do one by one, with the same outcome.

A call for each record costs more than the work in it, and so does its memory: orjson takes a kilobyte for every result
and then shrinks it, which for thousands that are kept at a time is 2.7 µs a decision. In bulk it is 0.5.

Only what is plain is done here. If anything about some records is not, they are read one by one, and that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from math import hypot
from operator import itemgetter, not_
from typing import Any, Final, TypeVar

import msgspec
import orjson

from worker.stream.decoding import MAX_DEPTH, Limits, Rejected, check_exclude, decode_arrival, decode_feedback
from worker.stream.encoding import opened_document
from worker.stream.events import Arrival, Feedback, FeedbackFact, Opened
from worker.stream.topology import Record

E = TypeVar("E")
T = TypeVar("T")
U = TypeVar("U")

#: Records read in one call: few enough that a bad one among them sends few to be read one by one.
AT_ONCE: Final = 256

# ── two kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────


def apart(items: Sequence[T], are_first: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Return the items of the first kind, and those of the second.

    >>> apart("aBCd", [False, True, True, False])
    (['B', 'C'], ['a', 'd'])
    """
    return list(compress(items, are_first)), list(compress(items, map(not_, are_first)))


def together(first: Sequence[T], second: Sequence[U], are_first: Sequence[bool]) -> list[T | U]:
    """Return what was set apart in the order it had.

    >>> together("BC", "ad", [False, True, True, False])
    ['a', 'B', 'C', 'd']
    """
    if all(are_first[: len(first)]):
        return [*first, *second]  # as workers on Kafka have them
    ones, others = iter(first), iter(second)
    return [next(ones) if is_first else next(others) for is_first in are_first]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arrivals(records: Sequence[Record], *, limits: Limits, dim: int) -> list[Arrival | Rejected]:
    """Read arrivals, or say of each that cannot be used why; see `decode_arrival`."""

    def one(record: Record) -> Arrival:
        return decode_arrival(record.value, limits=limits, dim=dim, timestamp=record.timestamp)

    def are_fine(events: Sequence[Arrival], latest: int) -> bool:
        for event in events:
            if len(event.context) != dim or not hypot(1.0, *event.context) <= limits.max_norm:
                return False
            if event.exclude:
                check_exclude(event.exclude, limits)
        return max([event.occurred_at for event in events]) <= latest and _are_short(
            [event.session_id for event in events], limits.max_session_id
        )

    return _read(records, _arrivals, limits, one, are_fine)


class Heard(Feedback, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag_field="kind", tag="feedback"):
    """Feedback that is written, but for its token, as the journal's fact that it came."""


def read_feedback(records: Sequence[Record], *, limits: Limits, horizon: int) -> list[Heard | Rejected]:
    """Read clicks and passes, or say of each that cannot be used why; see `decode_feedback`."""

    def one(record: Record) -> Heard:
        event = decode_feedback(record.value, limits=limits, horizon=horizon, timestamp=record.timestamp)
        return Heard(**msgspec.structs.asdict(event))

    def are_fine(events: Sequence[Heard], latest: int) -> bool:
        positions = {event.position for event in events}
        return (
            max([event.occurred_at for event in events]) <= latest
            and _are_short([event.session_id for event in events], limits.max_session_id)
            and _are_short({event.arm for event in events}, limits.max_arm_id)
            and min(positions) >= 1
            and max(positions) <= horizon
        )

    return _read(records, _heard, limits, one, are_fine)


def _read(
    records: Sequence[Record],
    decode: Callable[[bytes], list[E]],
    limits: Limits,
    one: Callable[[Record], E],
    are_fine: Callable[[Sequence[E], int], bool],
) -> list[E | Rejected]:
    events: list[E | Rejected] = []
    for first in range(0, len(records), AT_ONCE):
        some = records[first : first + AT_ONCE]
        try:
            together = decode(_joined([record.value for record in some], limits.max_record_bytes))
            latest = min(map(_timestamp, some)) + limits.max_ahead_ms
            if len(together) == len(some) and are_fine(together, latest):
                events += together
                continue
        except Exception:
            pass  # whatever it is, it comes again, by itself
        events += [_read_one(record, one) for record in some]
    return events


def _read_one(record: Record, one: Callable[[Record], E]) -> E | Rejected:
    try:
        return one(record)
    except Rejected as rejected:
        return rejected


def _joined(values: Sequence[Any], most: int) -> bytes:
    """Return an array of JSON objects, if each value is one of them and has no text that needs a closer look; or raise.

    Each has to be one object by itself, which is more than that the array then has as many: a value could end in the
    middle of an object that the next one completes. So each begins with a brace and has no other. Then as many objects
    as braces means that each brace begins an object of the array, and that what lies between it and the comma before
    the next is this object and nothing else.

    Texts in ASCII without escapes have no control characters but possibly DEL.
    """
    if max(map(len, values)) > min(most, 2 * MAX_DEPTH) or set(map(_first, values)) != _BRACES:
        raise ValueError
    joined = b",".join(values)
    if joined.count(b"{") != len(values) or not joined.isascii() or b"\\" in joined or b"\x7f" in joined:
        raise ValueError
    return b"[%b]" % joined


def _are_short(texts: Collection[str], most: int) -> bool:
    return all(texts) and max(map(len, texts)) <= most


_first: Final = itemgetter(0)
_timestamp: Final = itemgetter(Record._fields.index("timestamp"))
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
    are_opened = [type(fact) is Opened for fact in facts]
    opened, heard = apart(facts, are_opened)
    return together(
        _write([opened_document(fact) for fact in opened], b'{"kind":'),  # type: ignore[arg-type]
        _write_heard(heard),  # type: ignore[arg-type]
        are_opened,
    )


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
