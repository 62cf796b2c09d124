"""Unpack fetched batches of records within bounds, and pass over those that cannot be unpacked.

A producer may compress its batches, and a batch of a kilobyte can unpack to gigabytes. aiokafka unpacks whatever it
fetched, and raises where it cannot; the position then never moves on. Here:

- A batch that unpacks to more than `MOST_UNPACKED` bytes, that is damaged, or whose codec is unknown comes as one
  record, with an `UnreadableBatch` in place of the value. Reading continues after it.
- A poll ends with the batch with which it has unpacked `POLL_UNPACKED` bytes, or that it could not unpack. What is left
  stays packed in the fetcher, or is fetched again. So neither memory nor the time between two heartbeats grows with the
  number of such batches.

`install` replaces the private names of aiokafka that do this. Batches that are not compressed are handled as before.
"""

from __future__ import annotations

import logging
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import cramjam
from aiokafka.consumer import consumer, fetcher
from aiokafka.consumer.fetcher import Fetcher, FetchResult, MemoryRecords, PartitionRecords
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch

from worker.stream.topology import UnreadableBatch

log = logging.getLogger(__name__)

#: The most bytes to which a batch may unpack. A record takes its part of it once more.
MOST_UNPACKED = 96 << 20
#: The bytes after which a poll, and what was fetched of one partition, ends.
POLL_UNPACKED = 32 << 20
#: How often a batch with a wrong checksum is fetched: the fault may be on the way.
FETCHES = 3
_STEP = 1 << 20

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Decode = Callable[[Any], bytes | bytearray]


# ── codecs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class UnpackingError(Exception):
    """A batch that cannot be unpacked."""


def _too_large() -> UnpackingError:
    return UnpackingError(f"unpacks to more than {MOST_UNPACKED} bytes")


def gzip_decode(payload: Any) -> bytearray:
    """Unpack gzip, one member or more."""
    unpacked = bytearray()
    rest = bytes(payload)
    while rest:
        member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while rest and not member.eof:
            unpacked += member.decompress(rest, _STEP)
            if len(unpacked) > MOST_UNPACKED:
                raise _too_large()
            rest = member.unconsumed_tail
        if not member.eof:
            raise UnpackingError("is cut short")
        rest = member.unused_data.lstrip(b"\0")
    return unpacked


_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER = 16


def snappy_decode(payload: Any) -> bytearray:
    """Unpack snappy: one block, or the blocks of the xerial library."""
    data = bytes(payload)
    unpacked = bytearray()
    if not data.startswith(_XERIAL):
        _snappy_block(data, unpacked)
        return unpacked
    at = _XERIAL_HEADER
    while at < len(data):
        (length,) = struct.unpack_from("!i", data, at)
        if length < 0:
            raise UnpackingError("has a block of negative length")
        _snappy_block(data[at + 4 : at + 4 + length], unpacked)
        at += 4 + length
    return unpacked


def _snappy_block(data: bytes, unpacked: bytearray) -> None:
    if len(unpacked) + cramjam.snappy.decompress_raw_len(data) > MOST_UNPACKED:
        raise _too_large()
    unpacked += cramjam.snappy.decompress_raw(data)


def lz4_decode(payload: Any) -> bytearray:
    """Unpack an lz4 frame."""
    return _decode_into(cramjam.lz4.decompress_into, bytes(payload))


def zstd_decode(payload: Any) -> bytearray:
    """Unpack zstd."""
    return _decode_into(cramjam.zstd.decompress_into, bytes(payload))


def _decode_into(decode: Callable[[bytes, bytearray], int], data: bytes) -> bytearray:
    """Unpack into a buffer of limited size. The libraries do not say beforehand how large a result will be."""
    room = min(MOST_UNPACKED, max(1 << 16, 16 * len(data)))
    while True:
        buffer = bytearray(room)
        try:
            del buffer[decode(data, buffer) :]
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise UnpackingError(f"is damaged ({error})") from None
            if room >= MOST_UNPACKED:
                raise _too_large() from None
            room = min(MOST_UNPACKED, 8 * room)
        else:
            return buffer


DECODERS: dict[str, Decode] = {
    decode.__name__: decode for decode in (gzip_decode, snappy_decode, lz4_decode, zstd_decode)
}


# ── aiokafka ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Meter:
    """Counts unpacked bytes: of all time, and before the present poll."""

    total = 0
    before_poll = 0

    def counted(self, decode: Decode) -> Decode:
        """Return a decoder whose results are counted."""

        def decode_and_count(payload: Any) -> bytes | bytearray:
            try:
                unpacked = decode(payload)
            except BaseException:
                self.total += POLL_UNPACKED  # it took its time
                raise
            self.total += len(unpacked)
            return unpacked

        return decode_and_count


_meter = _Meter()


def poll_is_full() -> bool:
    """Whether the present poll has unpacked enough."""
    return _meter.total - _meter.before_poll >= POLL_UNPACKED


#: How often batches with a wrong checksum were fetched, by partition and offset.
_wrong_checksums: Counter[tuple[Any, int]] = Counter()


class KeptRecords(MemoryRecords):  # type: ignore[misc]
    """The batches of a fetched partition, with their bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data

    def raw(self, number: int) -> bytes:
        """Return the bytes of a batch by its number."""
        start = 0
        for _ in range(number):
            start += _LOG_OVERHEAD + self._length(start)
        return self.data[start : start + _LOG_OVERHEAD + self._length(start)]

    def _length(self, start: int) -> int:
        (length,) = struct.unpack_from(">i", self.data, start + 8)
        return int(length)


_LOG_OVERHEAD = 12
_HEADER = struct.Struct(">qiibIhiqq")


class _Header(NamedTuple):
    """What the head of a batch says of it."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    checksum: int
    attributes: int
    last_delta: int
    first_timestamp: int
    max_timestamp: int


def unreadable(raw: bytes, start: int, why: str) -> tuple[_Header, UnreadableBatch]:
    """Return the head of a batch, and the batch as the value of a record that stands for all from `start` on."""
    # A batch of format 0 or 1 is a message with the offset of the last one in it.
    found = _Header(*_HEADER.unpack(raw[: _HEADER.size].ljust(_HEADER.size, b"\0")))
    old = found.magic < 2
    head = found._replace(attributes=0, last_delta=0, max_timestamp=-1) if old else found
    last = max(start, head.base_offset + max(0, head.last_delta))
    number = head.attributes & 7
    codec = f"format {found.magic}" if old else CODECS[number] if number < len(CODECS) else f"codec {number}"
    error = f"the batch of offsets {start} to {last} ({codec}, {len(raw)} bytes) {why}"
    return head, UnreadableBatch(raw, last_offset=last, error=error)


class BoundedPartitionRecords(PartitionRecords):  # type: ignore[misc]
    """The records of a fetched partition. A batch that cannot be unpacked is one record (see `UnreadableBatch`)."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[Any]:
        batches, tp = self._records, self._tp
        number, unpacked = -1, 0
        while batches.has_next() and unpacked < POLL_UNPACKED:
            number += 1
            try:
                batch = batches.next_batch()
                if self._check_crcs and not batch.validate_crc():
                    if self._is_fetched_again():
                        return
                    raise UnpackingError("has a wrong checksum")
                if not self._is_passed_over(batch) and batch.next_offset > self.next_fetch_offset:
                    before = _meter.total
                    records = iter(batch)  # unpacks it
                    unpacked += _meter.total - before
                    for record in records:
                        # A batch may begin before the position, and a compacted one has gaps.
                        if record.offset >= self.next_fetch_offset:
                            result = self._consumer_record(tp, record)
                            self.next_fetch_offset = record.offset + 1
                            yield result
                # The last offset of a batch counts even if its record was compacted away.
                self.next_fetch_offset = max(self.next_fetch_offset, batch.next_offset)
            except Exception as error:
                yield self._unreadable(number, error)
                return  # what is left is fetched again

    def _is_fetched_again(self) -> bool:
        """Whether the batch at the position, whose checksum is wrong, is worth another fetch."""
        key = self._tp, self.next_fetch_offset
        _wrong_checksums[key] += 1
        if _wrong_checksums[key] >= FETCHES:
            del _wrong_checksums[key]
            return False
        log.warning("%s-%d: wrong checksum at offset %d", *self._tp, self.next_fetch_offset)
        return True

    def _is_passed_over(self, batch: Any) -> bool:
        """Whether a batch is a marker, or belongs to a transaction that was aborted."""
        if self._isolation_level == fetcher.READ_COMMITTED and batch.producer_id is not None:
            self._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and self._contains_abort_marker(batch):
                self._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in self._aborted_producers:
                return True
        return bool(batch.is_control_batch)

    def _unreadable(self, number: int, error: Exception) -> Any:
        why = str(error) if isinstance(error, UnpackingError) else f"is damaged ({type(error).__name__}: {error})"
        raw = self._records.raw(number)
        start = self.next_fetch_offset
        head, value = unreadable(raw, start, why[:200])
        self.next_fetch_offset = value.last_offset + 1
        log.warning("%s-%d: %s", *self._tp, value.error)
        stand_in = SimpleNamespace(
            offset=start,
            timestamp=head.max_timestamp,
            timestamp_type=0,
            key=None,
            value=value,
            checksum=None,
            headers=(),
        )
        return self._consumer_record(self._tp, stand_in)


class BoundedFetchResult(FetchResult):  # type: ignore[misc]
    """What was fetched of a partition; taken by a later poll if the present one has unpacked enough."""

    def getall(self, max_records: int | None = None) -> list[Any]:
        """Return records, none if the poll is full."""
        if poll_is_full():
            return []
        taken: list[Any] = super().getall(max_records)
        return taken


class BoundedFetcher(Fetcher):  # type: ignore[misc]
    """A fetcher whose polls begin with an empty meter."""

    def begin_poll(self) -> None:
        """Begin to count what a poll unpacks."""
        _meter.before_poll = _meter.total

    async def fetched_records(self, *arguments: Any, **named: Any) -> Any:
        """Return what was fetched, within the bounds of a poll."""
        self.begin_poll()
        return await super().fetched_records(*arguments, **named)


def install() -> None:
    """Have the aiokafka consumers of this process unpack within bounds."""
    if fetcher.PartitionRecords is BoundedPartitionRecords:
        return
    for batch in (DefaultRecordBatch, LegacyRecordBatch):
        module = sys.modules[batch.__module__]
        for name, decode in DECODERS.items():
            if hasattr(module, name):
                setattr(module, name, _meter.counted(decode))
    fetcher.MemoryRecords = KeptRecords
    fetcher.PartitionRecords = BoundedPartitionRecords
    fetcher.FetchResult = BoundedFetchResult
    consumer.Fetcher = BoundedFetcher
