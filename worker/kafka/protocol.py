"""Encode and decode Kafka's protocol several times as fast as aiokafka does, for the messages of every poll.

aiokafka packs each number of a message by calls of its own. A fetch of 16 partitions has 80 numbers, its answer 112,
and a worker sends one with every poll. Here the numbers that stand together are packed in one call, by functions made
once from aiokafka's own description of the message. The bytes are the same (`tests/transport/test_protocol.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from aiokafka.protocol import fetch, offset, produce
from aiokafka.protocol.types import Array, Bytes, Int8, Int16, Int32, Int64, Schema, String

from worker.kafka import messages

#: Returns the value at a position of a message, and the position after it.
Decode = Callable[[bytes, int], tuple[Any, int]]
#: Appends the parts of a value to a list.
Encode = Callable[[Any, list[bytes]], None]

_CODES = {Int8: "b", Int16: "h", Int32: "i", Int64: "q"}
_INT16, _INT32 = struct.Struct(">h"), struct.Struct(">i")


def _runs(fields: Sequence[Any]) -> list[tuple[struct.Struct | None, list[Any]]]:
    """Split fields into runs of numbers, each with its struct, and single other fields."""
    runs: list[tuple[struct.Struct | None, list[Any]]] = []
    numbers: list[Any] = []
    for field in (*fields, None):
        if field in _CODES:
            numbers.append(field)
            continue
        if numbers:
            runs.append((struct.Struct(">" + "".join(_CODES[one] for one in numbers)), numbers))
            numbers = []
        if field is not None:
            runs.append((None, [field]))
    return runs


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decoder(kind: Any) -> Decode:
    if isinstance(kind, Schema):
        return _schema_decoder(kind)
    if isinstance(kind, Array):
        return _array_decoder(_decoder(kind.array_of))
    if isinstance(kind, String):
        encoding = kind.encoding
        return _sized_decoder(_INT16, lambda value: value.decode(encoding))
    if kind is Bytes:
        return _sized_decoder(_INT32, lambda value: value)
    number = struct.Struct(">" + _CODES[kind])

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        return number.unpack_from(data, at)[0], at + number.size

    return decode


def _sized_decoder(size: struct.Struct, convert: Callable[[bytes], Any]) -> Decode:
    def decode(data: bytes, at: int) -> tuple[Any, int]:
        (length,) = size.unpack_from(data, at)
        begin = at + size.size
        if length < 0:
            return None, begin
        end = begin + length
        if end > len(data):
            raise ValueError(f"the message ends {end - len(data)} bytes too early")
        return convert(data[begin:end]), end

    return decode


def _array_decoder(one: Decode) -> Decode:
    def decode(data: bytes, at: int) -> tuple[Any, int]:
        (length,) = _INT32.unpack_from(data, at)
        at += 4
        if length == -1:
            return None, at
        values = []
        for _ in range(length):
            value, at = one(data, at)
            values.append(value)
        return values, at

    return decode


def _schema_decoder(schema: Schema) -> Decode:
    runs = [(run, _decoder(fields[0])) for run, fields in _runs(schema.fields)]

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for numbers, other in runs:
            if numbers is not None:
                values += numbers.unpack_from(data, at)
                at += numbers.size
            else:
                value, at = other(data, at)
                values.append(value)
        return tuple(values), at

    return decode


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _encoder(kind: Any) -> Encode:
    if isinstance(kind, Schema):
        return _schema_encoder(kind)
    if isinstance(kind, Array):
        return _array_encoder(_encoder(kind.array_of))
    if isinstance(kind, String):
        encoding = kind.encoding
        return _sized_encoder(_INT16, lambda value: str(value).encode(encoding))
    if kind is Bytes:
        return _sized_encoder(_INT32, lambda value: value)
    number = struct.Struct(">" + _CODES[kind])

    def encode(value: Any, parts: list[bytes]) -> None:
        parts.append(number.pack(value))

    return encode


def _sized_encoder(size: struct.Struct, convert: Callable[[Any], bytes]) -> Encode:
    def encode(value: Any, parts: list[bytes]) -> None:
        if value is None:
            parts.append(size.pack(-1))
            return
        converted = convert(value)
        parts += (size.pack(len(converted)), converted)

    return encode


def _array_encoder(one: Encode) -> Encode:
    def encode(values: Any, parts: list[bytes]) -> None:
        if values is None:
            parts.append(_INT32.pack(-1))
            return
        parts.append(_INT32.pack(len(values)))
        for value in values:
            one(value, parts)

    return encode


def _schema_encoder(schema: Schema) -> Encode:
    runs: list[tuple[struct.Struct | None, Encode, slice]] = []
    at = 0
    for run, fields in _runs(schema.fields):
        runs.append((run, _encoder(fields[0]), slice(at, at + len(fields))))
        at += len(fields)
    size = len(schema.fields)

    def encode(values: Any, parts: list[bytes]) -> None:
        if len(values) != size:
            raise ValueError(f"{len(values)} values for {size} fields")
        for numbers, other, where in runs:
            if numbers is not None:
                parts.append(numbers.pack(*values[where]))
            else:
                other(values[where.start], parts)

    return encode


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _kinds(module: Any, *prefixes: str) -> list[Any]:
    return [kind for name, kind in vars(module).items() if name.startswith(prefixes)]


#: Answers and requests that come with every poll.
ANSWERS = (
    *_kinds(fetch, "FetchResponse_v"),
    *_kinds(produce, "ProduceResponse_v"),
    *_kinds(offset, "OffsetResponse_v"),
)
REQUESTS = (
    *_kinds(fetch, "FetchRequest_v"),
    *_kinds(produce, "ProduceRequest_v"),
    *_kinds(offset, "OffsetRequest_v"),
)


def fast_decode(answer: Any) -> Callable[[BytesIO | bytes], Any]:
    """Return a function that decodes answers of a kind."""
    decode = _schema_decoder(answer.SCHEMA)

    def decoded(data: BytesIO | bytes) -> Any:
        rest = data if isinstance(data, bytes) else data.read()
        try:
            return answer(*decode(rest, 0)[0])
        except struct.error as error:
            raise ValueError(f"{answer.__name__} cannot be decoded: {error}") from error

    return _by_hand(answer, *messages.ANSWERS[answer], decoded) if answer in messages.ANSWERS else decoded


def _by_hand(
    answer: Any, decode: messages.DecodeFields, part: struct.Struct, otherwise: Callable[[bytes], Any]
) -> Callable[[BytesIO | bytes], Any]:
    """Return a function that decodes answers of a kind by hand, and otherwise by their description."""
    new = answer.__new__

    def decoded(data: BytesIO | bytes) -> Any:
        rest = data if isinstance(data, bytes) else data.read()
        try:
            fields = decode(rest, part)
        except (struct.error, UnicodeDecodeError):
            fields = None
        if fields is None:
            return otherwise(rest)
        made = new(answer)
        made.__dict__ = fields
        return made

    return decoded


def fast_encode(request: Any) -> Callable[[Any], bytes]:
    """Return a method that encodes requests of a kind."""
    encode, names = _schema_encoder(request.SCHEMA), request.SCHEMA.names

    def encoded(self: Any) -> bytes:
        values, parts = self.__dict__, list[bytes]()
        try:
            encode([values[name] for name in names], parts)
        except struct.error as error:
            raise ValueError(f"{type(self).__name__} cannot be encoded: {error}") from error
        return b"".join(parts)

    return encoded


def install() -> None:
    """Have the aiokafka clients of this process use these functions."""
    for answer in ANSWERS:
        answer.decode = staticmethod(fast_decode(answer))
    for request in REQUESTS:
        request.encode = fast_encode(request)
