"""JSON to typed values, with msgspec, or a reason for the dead letter.

Rules that hold in this file:

- Nothing but `Rejected` escapes from `read`, whatever the bytes, and its text has no word of the payload.
- Whether a record is rejected depends on the record alone (see `MAX_DEPTH`), so all runners agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec
import numpy as np

from worker.errors import AdcascadeError
from worker.stream.events import MOST, Reason

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

    __slots__ = ("_integers", "_kind", "decode")

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.decode: Callable[[bytes], E] = msgspec.json.Decoder(kind).decode
        self._integers = frozenset(
            field.name
            for struct in (get_args(kind) or (kind,))
            for field in msgspec.structs.fields(struct)
            if _is_integer(msgspec.inspect.type_info(field.type))
        )

    def reread(self, value: bytes) -> E:
        """Decode a record that writes whole numbers as 5.0 or 5e0, which JSON does not distinguish from 5."""
        document = msgspec.json.decode(value)
        for name in self._integers & document.keys():
            number = document[name]
            if type(number) is float and number.is_integer():
                document[name] = int(number)
        event: E = msgspec.convert(document, self._kind)
        return event


def _is_integer(kind: msgspec.inspect.Type) -> bool:
    options = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(option, msgspec.inspect.IntType) for option in options)


def read(reader: Reader[E], value: bytes | None, most: float) -> E:
    """Decode a record of at most so many bytes."""
    if value is None:
        raise Rejected("undecodable", "the record has no value")
    if len(value) > most:
        raise Rejected("too-large", f"the record has {len(value)} bytes, more than {most}")
    try:
        if not value.isascii():
            value.decode()  # msgspec does not validate the fields that it skips
        if len(value) > 2 * MAX_DEPTH and _nests_too_deep(value):
            raise Rejected("undecodable", f"nested deeper than {MAX_DEPTH} levels")
        return reader.decode(value)
    except Rejected:
        raise
    except Exception as error:
        if "got `float`" in str(error):
            return _reread(reader, value)
        raise _rejected(error) from None


def reader_of(kind: type[E]) -> Callable[[bytes | None, int], E]:
    """Return a function that decodes structs of one kind, of at most so many bytes, by the rules of this file."""
    reader = Reader[E](kind)
    return lambda value, most: read(reader, value, most)


def _reread(reader: Reader[E], value: bytes) -> E:
    try:
        return reader.reread(value)
    except Exception as error:
        raise _rejected(error) from None


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


_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
#: Opening brackets to +1, closing ones to −1 as signed bytes; everything else is dropped.
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_STEPS: Final = bytes(sorted(set(range(256)) - set(b"[{]}")))


def _nests_too_deep(value: bytes) -> bool:
    if value.count(b"[") + value.count(b"{") <= MAX_DEPTH:
        return False
    steps = np.frombuffer(_STRINGS.sub(b"", value).translate(_STEPS, _NO_STEPS), np.int8)
    return bool(np.cumsum(steps, dtype=np.int64).max(initial=0) > MAX_DEPTH)
