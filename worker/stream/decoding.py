"""Bytes to events, with msgspec, or a reason for the dead letter.

Rules that hold here:

- A record either becomes an event or raises `Rejected`, with a reason of the closed list and one line that says what
  is wrong and where, without values of the payload. Nothing else escapes from a ``decode_`` function, for any bytes.
- Whether a record is rejected depends on the record and the settings alone (see `MAX_DEPTH`), so all runners agree.
- Unknown fields are ignored, so that a producer may be newer than the worker. Where a field is missing, the error names
  the unknown one that is nearest to it.
- `timestamp` is the time of a record. A negative one, −t, stands for a record without a time that was read at t: such
  an event may be as old as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from math import hypot, inf, isnan
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from worker.errors import AdcascadeError, InputError
from worker.stream.contexts import MISSING
from worker.stream.events import (
    MOST,
    Arrival,
    Decision,
    Episode,
    Feedback,
    FeedbackFact,
    JournalEvent,
    Milliseconds,
    Opened,
    Progress,
    Reason,
)
from worker.stream.features import ContextEncoder
from worker.stream.settings import LearningSettings

#: Deepest nesting of a record. msgspec skips unknown fields by recursion, so without this bound the depth of the
#: caller's stack would decide what is accepted. Half of Python's usual limit. A record is at least twice as long as it
#: is deep, so short ones need no check.
MAX_DEPTH: Final = 512

E = TypeVar("E")


class Rejected(AdcascadeError):  # noqa: N818 - the record is wrong, not the program
    """A record that cannot be used: `reason` is from the closed list, `error` one line for people."""

    def __init__(self, reason: Reason, error: str) -> None:
        super().__init__(reason, error)
        self.reason: Reason = reason
        self.error = error

    def __str__(self) -> str:
        return f"{self.reason}: {self.error}"


class Reader(Generic[E]):
    """The decoder of one kind of record, compiled once."""

    __slots__ = ("_decode", "_kind")

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decode: Callable[[bytes], E] = msgspec.json.Decoder(kind).decode

    def __call__(self, value: bytes | None, most: float = inf) -> E:
        """Decode a record of at most `most` bytes."""
        if value is None:
            raise Rejected("undecodable", "the record has no value")
        if len(value) > most:
            raise Rejected("too-large", f"the record has {len(value)} bytes, more than {most}")
        if len(value) > 2 * MAX_DEPTH and _nests_too_deep(value):
            raise Rejected("undecodable", f"nested deeper than {MAX_DEPTH} levels")
        try:
            if not value.isascii():
                value.decode()  # msgspec does not validate the fields that it skips
            return self._decode(value)
        except Exception as error:
            if "got `float`" not in str(error) and "got `null`" not in str(error):
                raise _with_guess(_rejected(error), value) from None
        try:
            return self._reread(value)
        except Exception as error:
            raise _with_guess(_rejected(error), value) from None

    def _reread(self, value: bytes) -> E:
        """Decode a record that writes whole numbers as 5.0 or 5e0, or null for a missing number of `opened`."""
        document = msgspec.json.decode(value)
        for name, number in document.items() if isinstance(document, dict) else ():
            # A field that is no whole number takes it as well.
            if type(number) is float and number.is_integer():
                document[name] = int(number)
        match document:
            case {"kind": "opened", "context": [*numbers]} if self._kind is JournalEvent:
                document["context"] = [MISSING if number is None else number for number in numbers]
        event: E = msgspec.convert(document, self._kind)
        return event


_TOO_LATE: Final = f"<= {MOST} - at `$.occurred_at`"


def _rejected(error: Exception) -> Rejected:
    """Turn an error of msgspec into one line, without a word of the payload."""
    if isinstance(error, UnicodeDecodeError):
        return Rejected("undecodable", f"not UTF-8 (byte {error.start})")
    if isinstance(error, msgspec.ValidationError):
        text, _, path = str(error).rpartition(" - at ")
        text = text or path
        # These two quote the payload.
        if text.startswith(("Invalid enum value", "Invalid value")):
            text = "Not one of the values allowed here"
        # A time in nanoseconds does not reach the check that guesses the unit of a time.
        guess = " (looks like nanoseconds)" if _TOO_LATE in str(error) else ""
        return Rejected("invalid", f"{text} at {path.strip('`')}{guess}" if path != text else text)
    if isinstance(error, msgspec.DecodeError):
        return Rejected("undecodable", str(error))
    # RecursionError, MemoryError, and whatever else a hostile record may cause.
    return Rejected("undecodable", f"not readable ({type(error).__name__})")


_MISSING_FIELD: Final = re.compile(r"Object missing required field `(\w+)`")
_MOST_NAMES: Final = 64  # that are compared: a hostile record has thousands


def _with_guess(rejected: Rejected, value: bytes) -> Rejected:
    """Return a rejection that names the field which is probably a misspelling of the missing one, if there is any."""
    if missing := _MISSING_FIELD.fullmatch(rejected.error):
        with suppress(msgspec.DecodeError):
            if near := near_name(missing[1], msgspec.json.decode(value, type=dict[str, msgspec.Raw])):
                return Rejected(rejected.reason, f"{rejected.error}; is {near!r} meant?")
    return rejected


def near_name(field: str, given: Iterable[str]) -> str | None:
    """Return the name, of those given, that looks like a misspelling of a field."""
    names = {name.lower(): name for name in islice(given, _MOST_NAMES)}
    near = get_close_matches(field, names, n=1, cutoff=0.8)
    return names[near[0]] if near else None


_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
#: Opening brackets to +1, closing ones to −1 as signed bytes; everything else is dropped.
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_STEPS: Final = bytes(sorted(set(range(256)) - set(b"[{]}")))


def _nests_too_deep(value: bytes) -> bool:
    if value.count(b"[") + value.count(b"{") <= MAX_DEPTH:
        return False
    steps = np.frombuffer(_STRINGS.sub(b"", value).translate(_STEPS, _NO_STEPS), np.int8)
    return bool(np.cumsum(steps, dtype=np.int64).max(initial=0) > MAX_DEPTH)


#: How far the time of a journal record may lie after the timestamp of that record, in milliseconds; beyond it the
#: learner refuses the record. Constants, so that every learner and every replay decide alike. A fact further ahead
#: would hold its window, and with it `resume_offset`, for that long. Progress further ahead would close windows early.
MAX_FACT_LEAD: Final = 86_400_000
MAX_PROGRESS_LEAD: Final = 60_000

#: Largest absolute value of a number that is to be standardised.
LARGEST_NUMBER: Final = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on records from outside, as the options of the commands have checked them.

    `max_norm` is c_z, the bound on ‖z‖ for z = [x; onehot(k)]: ‖x‖² + 1 ≤ c_z².
    `max_ahead` bounds how far an event may lie after the timestamp of its record, and `max_behind` how far before
    it, in addition to session timeout and lateness.
    """

    max_record_bytes: int = 65_536
    max_session_id: int = 128
    max_arm_id: int = 128
    max_exclude: int = 256
    max_norm: float = 1e3
    max_ahead: int = 60_000
    max_behind: int = 3_600_000


#: A function of time: the encoder of the features that are declared then.
EncoderAt: TypeAlias = Callable[[int], ContextEncoder]


def decode_arrival(
    value: bytes | None,
    settings: LearningSettings,
    *,
    limits: Limits,
    timestamp: int,
    encoder: EncoderAt | None = None,
    unlisted: list[tuple[str, str]] | None = None,
) -> Arrival:
    """Decode an arrival whose record has this `timestamp`, under the settings of a version.

    An event may be older than the limit by session timeout + lateness. With an `encoder` the context is an object of
    the features that are declared at its time, and `unlisted` collects values that none of them lists. If contexts are
    standardised, the norm has no limit, but every number has.

    >>> record = b'{"session_id":"s","occurred_at":5,"context":[1,2]}'
    >>> decode_arrival(record, LearningSettings(dim=2), limits=Limits(), timestamp=0)
    Arrival(session_id='s', occurred_at=5, context=(1.0, 2.0), exclude=(), user_id=None)
    """
    event = _read_arrival(value, limits, encoder, unlisted)
    _check_identifier(event.session_id, limits.max_session_id, "$.session_id")
    if event.user_id is not None:
        _check_identifier(event.user_id, limits.max_session_id, "$.user_id")
    if len(event.exclude) > limits.max_exclude:
        raise Rejected("invalid", f"$.exclude has {len(event.exclude)} arms, more than {limits.max_exclude}")
    for index, arm in enumerate(event.exclude):
        _check_identifier(arm, limits.max_arm_id, f"$.exclude[{index}]")
    _check_time(event.occurred_at, timestamp, limits, settings.grace)
    context = event.context
    if encoder is None and len(context) != settings.dim:
        raise Rejected("dimension", f"$.context has {len(context)} numbers, not {settings.dim}")
    numbers = context if encoder is None else [number for number in context if not isnan(number)]
    if settings.standardise:
        if max(map(abs, numbers), default=0.0) > LARGEST_NUMBER:
            raise Rejected("norm", f"a number of $.context is beyond ±{LARGEST_NUMBER:g}")
    elif hypot(1.0, *numbers) > limits.max_norm:
        raise Rejected("norm", f"the norm of [$.context; one-hot arm] is above {limits.max_norm:g}")
    return event


def decode_feedback(value: bytes | None, *, limits: Limits, horizon: int, timestamp: int, grace: int = 0) -> Feedback:
    """Decode a click or a pass at a position of 1…`horizon`; the rest as in `decode_arrival`."""
    event = _read_feedback(value, limits.max_record_bytes)
    _check_identifier(event.session_id, limits.max_session_id, "$.session_id")
    _check_identifier(event.arm, limits.max_arm_id, "$.arm")
    _check_time(event.occurred_at, timestamp, limits, grace)
    if not 1 <= event.position <= horizon:
        raise Rejected("position", f"$.position is not within 1…{horizon}")
    return event


def decode_journal(value: bytes | None, timestamp: int = 0) -> JournalEvent:
    """Decode a journal record; an unknown `kind` is rejected as `invalid`.

    With the `timestamp` of the record, a time too far after it is rejected as `future`.
    """
    event = _read_journal(value)
    lead, most = 0, MAX_FACT_LEAD
    if type(event) is Opened:
        lead = event.arrived_at - timestamp
        if len(event.modes) != len(event.slate):
            raise Rejected("invalid", f"$.modes has {len(event.modes)} entries, $.slate {len(event.slate)}")
    elif type(event) is FeedbackFact:
        lead = event.occurred_at - timestamp
    elif type(event) is Progress:
        lead, most = event.time - timestamp, MAX_PROGRESS_LEAD
        if event.partition >= event.partitions:
            raise Rejected("invalid", "$.partition is not below $.partitions")
    if lead > most and timestamp > 0:
        raise Rejected("future", f"its time is {lead} ms after the record, more than {most}")
    return event


class _NamedArrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An arrival whose context is an object; the declaration says what its values must be."""

    session_id: str
    occurred_at: Milliseconds
    context: dict[str, Any]
    exclude: tuple[str, ...] = ()
    user_id: str | None = None


_read_listed_arrival: Final = Reader[Arrival](Arrival)
_read_named_arrival: Final = Reader[_NamedArrival](_NamedArrival)
_read_feedback: Final = Reader[Feedback](Feedback)
_read_journal: Final = Reader[JournalEvent](JournalEvent)
decode_decision: Final = Reader[Decision](Decision)
decode_episode: Final = Reader[Episode](Episode)


def _read_arrival(
    value: bytes | None, limits: Limits, encoder: EncoderAt | None, unlisted: list[tuple[str, str]] | None
) -> Arrival:
    try:
        if encoder is None:
            return _read_listed_arrival(value, limits.max_record_bytes)
        event = _read_named_arrival(value, limits.max_record_bytes)
        context = encoder(event.occurred_at).encode(event.context, unlisted)
    except InputError as error:
        raise Rejected("invalid", f"$.{error}") from None
    except Rejected as rejected:
        if rejected.error == "Expected `object`, got `array` at $.context":
            raise Rejected("invalid", "$.context: an object of the declared features is needed, not a list") from None
        if rejected.error == "Expected `array`, got `object` at $.context":
            raise Rejected("invalid", "$.context: a list of numbers is needed: no features are declared") from None
        raise
    return Arrival(
        session_id=event.session_id,
        occurred_at=event.occurred_at,
        context=context,
        exclude=event.exclude,
        user_id=event.user_id,
    )


_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


def _check_identifier(text: str, most: int, path: str) -> None:
    if 0 < len(text) <= most and text.isprintable():  # nearly all
        return
    if not text:
        raise Rejected("invalid", f"{path} is empty")
    if len(text) > most:
        raise Rejected("invalid", f"{path} has {len(text)} characters, more than {most}")
    if _CONTROL.search(text):
        raise Rejected("invalid", f"{path} has a control character")


def _check_time(occurred_at: int, timestamp: int, limits: Limits, grace: int) -> None:
    known, timestamp = timestamp >= 0, abs(timestamp)
    ahead = occurred_at - timestamp
    if ahead > limits.max_ahead:
        unit = _looks_like(timestamp, {"microseconds": occurred_at // 1_000, "nanoseconds": occurred_at // 1_000_000})
        raise Rejected("future", f"$.occurred_at is {ahead} ms after the record, more than {limits.max_ahead}{unit}")
    if known and -ahead > limits.max_behind + grace:
        unit = _looks_like(timestamp, {"seconds": occurred_at * 1_000})
        raise Rejected(
            "past", f"$.occurred_at is {-ahead} ms before the record, more than {limits.max_behind + grace}{unit}"
        )


def _looks_like(timestamp: int, readings: Mapping[str, int]) -> str:
    """Guess the unit of a time that is no time in milliseconds: the reading that is within a year of the record.

    The record of a client that sets its timestamp to 0 is no measure.
    """
    year = 365 * 86_400_000
    fitting = [unit for unit, reading in readings.items() if abs(reading - timestamp) < year < timestamp]
    return f" (looks like {fitting[0]})" if fitting else ""
