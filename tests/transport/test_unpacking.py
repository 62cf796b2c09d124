"""Unpack fetched batches within bounds: every codec, bombs, damage, transactions."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cramjam
import pytest
from aiokafka.consumer import consumer, fetcher
from aiokafka.record._crecords.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from worker.kafka import unpacking
from worker.kafka.unpacking import CODECS, DECODERS, UnpackingError
from worker.stream.topology import UnreadableBatch

TP = TopicPartition("ads.arrivals", 2)
PACKED = range(1, len(CODECS))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    unpacking.install()
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 1 << 20)
    monkeypatch.setattr(unpacking, "POLL_UNPACKED", 1 << 19)
    unpacking._meter.before_poll = unpacking._meter.total
    yield
    unpacking._wrong_checksums.clear()


def batch(codec: int, *values: bytes, base: int = 0, producer: int = -1, transactional: bool = False) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, int(transactional), producer, 0, -1, 1 << 30)
    for n, value in enumerate(values):
        builder.append(n, 1_000 + n, b"k%d" % n, value, [])
    return struct.pack(">q", base) + bytes(builder.build())[8:]


def with_attributes(raw: bytes, attributes: int) -> bytes:
    """Return a batch with other attributes and the right checksum."""
    changed = raw[:21] + struct.pack(">h", attributes) + raw[23:]
    return changed[:17] + struct.pack(">I", calc_crc32c(changed[21:])) + changed[21:]


def corrupted(raw: bytes) -> bytes:
    """Return a batch whose compressed bytes are wrong and whose checksum is right."""
    return with_attributes(raw[:65] + bytes(len(raw) - 65), raw[22])


def partition_records(raw: bytes, position: int = 0, aborted: Any = None) -> Any:
    records = fetcher.MemoryRecords(raw)
    return fetcher.PartitionRecords(TP, records, aborted, position, None, None, True, fetcher.READ_COMMITTED)


def read(raw: bytes, position: int = 0, aborted: Any = None) -> tuple[list[Any], int]:
    """Return the records of one fetch, and the position after it."""
    held = partition_records(raw, position, aborted)
    return list(held), held.next_fetch_offset


def read_all(raw: bytes, position: int) -> tuple[list[Any], int]:
    """Return the records of as many fetches as it takes, and the position after them."""
    records: list[Any] = []
    while raw:
        base, length = struct.unpack_from(">qi", raw)
        if base + struct.unpack_from(">i", raw, 23)[0] < position:
            raw = raw[12 + length :]  # a broker sends from the batch of the position on
            continue
        some, position = read(raw, position)
        records += some
    return records, position


# ── codecs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(name: str, data: bytes) -> bytes:
    if name == "snappy_decode":
        return bytes(cramjam.snappy.compress_raw(data))
    return gzip.compress(data) if name == "gzip_decode" else bytes(getattr(cramjam, name[:-7]).compress(data))


@pytest.mark.parametrize("name", list(DECODERS))
@pytest.mark.parametrize("size", [0, 1, 70_000, 1 << 20])
def test_a_codec_unpacks_up_to_the_bound(name: str, size: int) -> None:
    data = bytes(size)
    assert DECODERS[name](memoryview(encode(name, data))) == data


@pytest.mark.parametrize("name", list(DECODERS))
def test_a_codec_unpacks_no_byte_beyond_the_bound(name: str) -> None:
    with pytest.raises(UnpackingError, match="more than 1048576 bytes"):
        DECODERS[name](encode(name, bytes((1 << 20) + 1)))


@pytest.mark.parametrize("name", list(DECODERS))
@given(data=st.binary(max_size=200))
def test_a_codec_raises_nothing_but_ordinary_errors(name: str, data: bytes) -> None:
    try:
        assert len(DECODERS[name](data)) <= unpacking.MOST_UNPACKED
    except Exception as error:
        assert not isinstance(error, MemoryError)


def test_gzip_of_several_members_is_one_and_bounded_as_one() -> None:
    assert unpacking.gzip_decode(gzip.compress(b"ab") + gzip.compress(b"cd") + b"\0\0") == b"abcd"
    with pytest.raises(UnpackingError, match="more than"):
        unpacking.gzip_decode(gzip.compress(bytes(1 << 19)) * 3)
    with pytest.raises(UnpackingError, match="cut short"):
        unpacking.gzip_decode(gzip.compress(bytes(1 << 19))[:-9])


def test_the_blocks_of_the_xerial_library_are_bounded_together() -> None:
    block = bytes(cramjam.snappy.compress_raw(bytes(1 << 18)))
    head = b"\x82SNAPPY\0" + struct.pack("!ii", 1, 1)
    assert unpacking.snappy_decode(head + 4 * (struct.pack("!i", len(block)) + block)) == bytes(1 << 20)
    with pytest.raises(UnpackingError, match="more than"):
        unpacking.snappy_decode(head + 5 * (struct.pack("!i", len(block)) + block))


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", range(len(CODECS)))
def test_batches_of_every_codec_are_read(codec: int) -> None:
    raw = batch(codec, b"a" * 99, b"b" * 99, base=7) + batch(0, b"c", base=9)
    records, position = read(raw, 8)  # the first record of the batch was read before
    assert [(record.offset, record.value) for record in records] == [(8, b"b" * 99), (9, b"c")]
    assert position == 10


@pytest.mark.parametrize("codec", PACKED)
def test_a_bomb_is_one_record_and_reading_continues_after_it(codec: int) -> None:
    bomb = batch(codec, b"x", bytes(2 << 20), base=4)
    records, position = read_all(batch(codec, b"a" * 99, base=3) + bomb + batch(0, b"z", base=6), 3)
    assert [record.offset for record in records] == [3, 4, 6]
    value = records[1].value
    assert isinstance(value, UnreadableBatch)
    assert value == bomb
    assert (value.last_offset, position) == (5, 7)
    wanted = f"the batch of offsets 4 to 5 ({CODECS[codec]}, {len(bomb)} bytes) unpacks to more than 1048576 bytes"
    assert value.error == wanted
    assert (records[1].key, records[1].timestamp) == (None, 1_001)


@pytest.mark.parametrize("codec", PACKED)
def test_damage_under_a_right_checksum_costs_its_batch(codec: int) -> None:
    raw = corrupted(batch(codec, b"a" * 999, b"b" * 999, base=4)) + batch(0, b"z", base=6)
    records, position = read_all(raw, 4)
    assert [record.offset for record in records] == [4, 6]
    assert isinstance(records[0].value, UnreadableBatch)
    assert position == 7


def test_an_unknown_codec_costs_its_batch() -> None:
    records, position = read_all(with_attributes(batch(1, b"a" * 99, b"b" * 99), 6) + batch(0, b"z", base=2), 0)
    assert "(codec 6, " in records[0].value.error
    assert ([record.offset for record in records], position) == ([0, 2], 3)


def test_records_before_the_damage_within_a_batch_are_read() -> None:
    raw = batch(0, b"first", b"second", base=4)
    records, position = read(with_attributes(raw[:-20] + b"\x7f" * 20, 0), 4)
    assert [record.offset for record in records][-1] == (5 if records[0].value == b"first" else 4)
    assert isinstance(records[-1].value, UnreadableBatch)
    assert position == 6


def test_a_wrong_checksum_is_fetched_again_before_the_batch_is_given_up() -> None:
    raw = batch(0, b"a", base=0) + batch(0, b"b", base=1)[:-1] + b"?" + batch(0, b"c", base=2)
    assert [record.value for record in read(raw)[0]] == [b"a"]
    assert read(raw, 1) == ([], 1)
    records, position = read_all(raw, 1)
    assert "wrong checksum" in records[0].value.error
    assert ([record.offset for record in records], position) == ([1, 2], 3)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_no_bytes_stop_the_reading(noise: bytes, codec: int) -> None:
    good = batch(codec, b"a" * 50, b"b" * 50)
    raw = good[:12] + noise + good[12 + len(noise) :]
    position = 0
    for _ in range(2 * unpacking.FETCHES):
        position = read(raw, position)[1]
    assert position >= 0


def test_aborted_transactions_and_markers_are_passed_over_unopened() -> None:
    marker = DefaultRecordBatchBuilder(2, 0, 1, 5, 0, -1, 1 << 20)
    marker.append(0, 1_000, struct.pack(">hh", 0, 0), b"\0" * 6, [])
    abort = with_attributes(struct.pack(">q", 2) + bytes(marker.build())[8:], 0x30)
    bomb = batch(1, bytes(4 << 20), b"", base=0, producer=5, transactional=True)
    before = unpacking._meter.total
    records, position = read(bomb + abort + batch(1, b"y" * 99, base=3, producer=5, transactional=True), 0, [(5, 0)])
    assert ([record.offset for record in records], position) == ([3], 4)
    assert unpacking._meter.total - before < 1_000


# ── polls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_fetched_ends_after_the_batch_that_unpacked_enough() -> None:
    heavy = [batch(1, bytes(400_000), base=n) for n in range(5)]
    records, position = read(b"".join(heavy))
    assert ([record.offset for record in records], position) == ([0, 1], 2)  # the rest is fetched again


def test_a_poll_ends_with_a_bomb() -> None:
    bombs = b"".join(batch(4, bytes(4 << 20), base=n) for n in range(50))
    records, position = read(bombs)
    assert (len(records), position) == (1, 1)
    assert unpacking.poll_is_full()


def test_a_poll_leaves_other_partitions_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for _ in range(3):
        state = SimpleNamespace(paused=False, position=0)
        state.consumed_to = lambda offset, state=state: setattr(state, "position", offset)
        assignment = SimpleNamespace(active=True, state_value=lambda tp, state=state: state)
        held = partition_records(batch(1, bytes(600_000)))
        results.append(fetcher.FetchResult(TP, assignment=assignment, partition_records=held, backoff=0))

    async def fetched_records(*_: Any) -> list[int]:
        return [len(result.getall(10)) if result.has_more() else 0 for result in results]

    monkeypatch.setattr(fetcher.Fetcher, "fetched_records", fetched_records)
    # Any consumer of this process has such a fetcher, also one that is none of ours; or one that builds on it, if
    # something of a worker was imported before.
    assert issubclass(consumer.Fetcher, unpacking.BoundedFetcher)
    one = object.__new__(consumer.Fetcher)
    polls = [asyncio.run(one.fetched_records()) for _ in range(3)]
    assert polls == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
