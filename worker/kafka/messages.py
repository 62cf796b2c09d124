"""The four messages of every poll, encoded and decoded by hand: a fetch, a produce request, and their answers.

`worker.kafka.protocol` goes through aiokafka's description of a message, with a call for each of its parts. A poll of
five records has a hundred parts. Here each message has one function without calls of its own.

Rules that hold in this file:

- The bytes and the values are the same as aiokafka's (`tests/transport/test_messages.py`).
- A decoder returns None for whatever it does not expect: a null, a transaction that was aborted, a message that ends
  too early. Then the description of the message decides.
- Versions that are not listed here are left to aiokafka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from struct import Struct
from typing import Any, Final

from aiokafka.protocol import fetch, produce
from aiokafka.structs import TopicPartition

_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")

#: Versions of a fetch with sessions, and those of a produce request that aiokafka can send and that have headers.
FETCH_VERSIONS: Final = range(7, 12)
PRODUCE_VERSIONS: Final = range(3, 8)
_WITH_LEADER_EPOCH: Final = 9
_WITH_RACK: Final = 11
_UNKNOWN: Final = -1


def version(request: Any, versions: Mapping[int, tuple[int, int]]) -> Any:
    """Return the message that aiokafka would send to a broker with these versions, without content; None if unknown.

    >>> version(fetch.FetchRequest, {1: (4, 11)}).API_VERSION
    11
    """
    span = versions.get(request.API_KEY)
    return None if span is None else _newest(request, *span)


@cache
def _newest(request: Any, least: int, most: int) -> Any:
    found = [kind for kind in request._CLASSES if least <= kind.API_VERSION <= most]
    return found[-1]() if found else None


@cache
def _named(topic: str) -> bytes:
    name = topic.encode()
    return _INT16.pack(len(name)) + name


# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# replica, longest wait, least and most bytes, isolation level, number and epoch of the session, number of topics
_FETCH: Final = Struct(">iiiibiii")
_POSITION: Final = Struct(">iqqi")  # partition, offset, first offset of a replica, most bytes
_POSITION_WITH_EPOCH: Final = Struct(">iiqqi")  # with the epoch of the leader behind the partition


def encode_fetch(
    api_version: int,
    limits: tuple[int, int, int, int],
    session: tuple[int, int],
    changed: Mapping[TopicPartition, int],
    forgotten: Iterable[TopicPartition],
    most: int,
) -> bytes:
    """Return a fetch.

    Parameters
    ----------
    limits : the longest wait in milliseconds, the least and the most bytes of the answer, and the isolation level
    session : number and epoch
    changed : positions that the broker does not have yet
    forgotten : partitions that it is to forget
    most : the most bytes of a partition
    """
    topics: dict[str, list[bytes]] = {}
    for (topic, partition), offset in changed.items():
        if api_version >= _WITH_LEADER_EPOCH:
            position = _POSITION_WITH_EPOCH.pack(partition, _UNKNOWN, offset, _UNKNOWN, most)
        else:
            position = _POSITION.pack(partition, offset, _UNKNOWN, most)
        if (some := topics.get(topic)) is None:
            topics[topic] = [position]
        else:
            some.append(position)
    parts = [_FETCH.pack(-1, *limits, *session, len(topics))]
    for topic, some in topics.items():
        parts += (_named(topic), _INT32.pack(len(some)), *some)
    left: dict[str, list[bytes]] = {}
    for topic, partition in forgotten:
        left.setdefault(topic, []).append(_INT32.pack(partition))
    parts.append(_INT32.pack(len(left)))
    for topic, some in left.items():
        parts += (_named(topic), _INT32.pack(len(some)), *some)
    if api_version >= _WITH_RACK:
        parts.append(_named(""))
    return b"".join(parts)


_FETCHED: Final = Struct(">ihii")  # throttle time, error, number of the session, number of topics
# partition, error, high watermark, last stable and first offset, number of aborted transactions, (replica,) bytes
_PARTITION: Final = Struct(">ihqqqii")
_PARTITION_WITH_REPLICA: Final = Struct(">ihqqqiii")


def _decode_fetched(data: bytes, part: Struct) -> dict[str, Any] | None:
    throttle, error, session, count = _FETCHED.unpack_from(data)
    if count < 0:
        return None
    at, end = _FETCHED.size, len(data)
    topics: list[tuple[str, list[tuple[Any, ...]]]] = []
    for _ in range(count):
        begin = at + 2
        at = begin + _INT16.unpack_from(data, at)[0]
        number = _INT32.unpack_from(data, at)[0]
        if at < begin or number < 0:
            return None
        partitions: list[tuple[Any, ...]] = []
        topics.append((str(data[begin:at], "utf-8"), partitions))
        at += 4
        for _ in range(number):
            *found, size = part.unpack_from(data, at)
            first = at + part.size
            at = first + size
            if found[5] > 0 or size < 0 or at > end:
                return None
            found[5] = None if found[5] == -1 else []
            partitions.append((*found, data[first:at]))
    return {"throttle_time_ms": throttle, "error_code": error, "session_id": session, "topics": topics}


# ── produce ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_PRODUCE: Final = Struct(">hhii")  # no transaction, acks, timeout, number of topics
_BATCH: Final = Struct(">ii")  # partition, bytes


def encode_produce(acks: int, timeout: int, batches: Mapping[TopicPartition, bytes | bytearray]) -> bytes:
    """Return a produce request, outside of transactions."""
    topics: dict[str, list[bytes | bytearray]] = {}
    for (topic, partition), data in batches.items():
        head = _BATCH.pack(partition, len(data))
        if (some := topics.get(topic)) is None:
            topics[topic] = [head, data]
        else:
            some += (head, data)
    parts: list[bytes | bytearray] = [_PRODUCE.pack(-1, acks, timeout, len(topics))]
    for topic, some in topics.items():
        parts += (_named(topic), _INT32.pack(len(some) // 2), *some)
    return b"".join(parts)


def _decode_produced(data: bytes, part: Struct) -> dict[str, Any] | None:
    count = _INT32.unpack_from(data)[0]
    if count < 0:
        return None
    at, end = 4, len(data)
    topics: list[tuple[str, list[tuple[int, ...]]]] = []
    for _ in range(count):
        begin = at + 2
        at = begin + _INT16.unpack_from(data, at)[0]
        number = _INT32.unpack_from(data, at)[0]
        first = at + 4
        last = first + number * part.size
        if at < begin or number < 0 or last > end:
            return None
        topics.append((str(data[begin:at], "utf-8"), list(part.iter_unpack(data[first:last]))))
        at = last
    return {"topics": topics, "throttle_time_ms": _INT32.unpack_from(data, at)[0]}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_WRITTEN: Final = Struct(">ihqq")  # partition, error, offset, timestamp
_WRITTEN_WITH_START: Final = Struct(">ihqqq")  # with the first offset of the partition

#: Returns the fields of an answer by name, or None.
DecodeFields = Callable[[bytes, Struct], dict[str, Any] | None]

#: How to decode the answers that are listed here.
ANSWERS: Final[Mapping[Any, tuple[DecodeFields, Struct]]] = {
    **dict.fromkeys(
        (fetch.FetchResponse_v7, fetch.FetchResponse_v8, fetch.FetchResponse_v9, fetch.FetchResponse_v10),
        (_decode_fetched, _PARTITION),
    ),
    fetch.FetchResponse_v11: (_decode_fetched, _PARTITION_WITH_REPLICA),
    **dict.fromkeys((produce.ProduceResponse_v3, produce.ProduceResponse_v4), (_decode_produced, _WRITTEN)),
    **dict.fromkeys(
        (produce.ProduceResponse_v5, produce.ProduceResponse_v6, produce.ProduceResponse_v7),
        (_decode_produced, _WRITTEN_WITH_START),
    ),
}
