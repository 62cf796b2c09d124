"""What is unpacked in one go, against the careful reader."""

from __future__ import annotations

from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.structs import TopicPartition
from hypothesis import event, given
from hypothesis import strategies as st

from worker.kafka import unpacking
from worker.kafka.fetched import plain_records
from worker.kafka.records import unpacked
from worker.kafka.unpacking import BoundedPartitionRecords, KeptRecords
from worker.stream.topology import UnreadableBatch

TP = TopicPartition("ads.arrivals", 2)
READ_COMMITTED = 1


def batch(first: int, values: list[bytes | None], codec: int, transactional: int, gap: int) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, transactional, 7, 0, 0, 100_000)
    for number, value in enumerate(values):
        builder.append(number * (1 + gap), 1_700_000_000_000 + number, b"key", value, [("h", b"v")])
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


def old(first: int) -> bytes:
    builder = LegacyRecordBatchBuilder(1, 0, 10_000)
    builder.append(0, 1_700_000_000_000, b"key", b"value")
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


@st.composite
def fetched(draw: Any) -> bytes:
    """Batches one behind the other: mostly plain ones, some of them damaged or cut."""
    data, at = b"", draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 4))):
        values = draw(st.lists(st.none() | st.binary(max_size=8), min_size=1, max_size=4))
        codec, transactional = draw(st.sampled_from([(0, 0)] * 6 + [(1, 0), (0, 1)]))
        gap = draw(st.integers(0, 2))
        data += old(at) if draw(st.integers(0, 9)) == 9 else batch(at, values, codec, transactional, gap)
        at += len(values) * (1 + gap) + draw(st.integers(0, 2))
    if draw(st.integers(0, 5)) == 5:
        where = draw(st.integers(0, len(data) - 1))
        data = data[:where] + bytes((data[where] ^ draw(st.integers(1, 255)),)) + data[where + 1 :]
    return data[: len(data) - draw(st.sampled_from([0, 0, 0, 1, 40]))]


def carefully(data: bytes, position: int) -> tuple[list[Any], int]:
    unpacking.install()
    unpacking._wrong_checksums.clear()
    reader = BoundedPartitionRecords(TP, KeptRecords(data), None, position, None, None, True, READ_COMMITTED)
    reader._consumer_record = unpacked
    return list(reader), reader.next_fetch_offset


@given(data=fetched(), position=st.integers(0, 8), most=st.integers(1, 40))
def test_plain_batches_give_what_the_careful_reader_gives(data: bytes, position: int, most: int) -> None:
    found = plain_records(TP, data, position, most, check_crcs=True)
    event("plain" if found is not None else "left to the careful reader")
    if found is not None:
        assert found == carefully(data, position)
        assert len(found[0]) <= most
        assert not any(isinstance(record.value, UnreadableBatch) for record in found[0])


def test_what_a_client_sends_is_plain() -> None:
    data = batch(5, [b"x", b"y"], 0, 0, 0) + batch(7, [b"z"], 0, 0, 0)
    found = plain_records(TP, data, 6, 3, check_crcs=True)
    assert found is not None
    assert ([record.value for record in found[0]], found[1]) == ([b"y", b"z"], 8)
    assert plain_records(TP, data, 6, 2, check_crcs=True) is None, "too many: a part has to be taken"
