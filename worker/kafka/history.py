"""The topic of the thinned history: find a version in it, and keep it up to date (see `worker.stream.history`).

The last record of the topic is normally its index. So a version is found with two reads, however large the topic is. A
record that cannot be used is passed over with a warning. If the index is missing or wrong, the whole topic is read.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from worker.errors import ParametersError
from worker.kafka.records import plain
from worker.stream.events import Count, Tag
from worker.stream.history import (
    INDEX_KEY,
    HistoryIndex,
    KeptVersion,
    changes,
    decode_index,
    encode_index,
    is_slot,
    slot_of,
    tag_slot,
    tags,
)
from worker.stream.parameters import Parameters
from worker.stream.topology import ONLY_PARTITION, Record
from worker.stream.version_decoding import decode_parameters
from worker.stream.version_encoding import encode_parameters

log = logging.getLogger(__name__)

#: How many of the last records are searched for the index before the whole topic is read.
_TAILS: Final = (1, 32)


class _Head(msgspec.Struct):
    """The fields of a version that the index has."""

    version: Count
    made_at: Count


_decode_head = msgspec.json.Decoder(_Head).decode


class HistoryReader:
    """Reads the history with a consumer of its own; `held` has the slots as of the last `refresh`."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._consumer = consumer
        self._tp = TopicPartition(topic, ONLY_PARTITION)
        self.held: dict[str, KeptVersion] = {}
        #: The offset from which on records are not in `held`; -1 before the first `refresh`.
        self.position = -1

    async def refresh(self) -> None:
        """Bring `held` up to date."""
        first, end = await self._bounds()
        if not first <= self.position <= end:
            await self._start(first, end)
        async for record in self._records(self.position, end):
            self._take(record)
        self.position = max(self.position, end)

    async def find(self, slot: str) -> Parameters | None:
        """Return the version in a slot; None if there is none that can be used."""
        found = await self._load(slot)
        if found is None and slot in self.held:
            log.warning("the index of %s is not right: the whole topic is read", self._tp.topic)
            self.held, self.position = {}, (await self._bounds())[0]
            await self.refresh()
            found = await self._load(slot)
        return found

    async def _bounds(self) -> tuple[int, int]:
        consumer, tp = self._consumer, self._tp
        if tp not in consumer.assignment():
            consumer.assign([tp])
            consumer.pause(tp)  # no record is fetched that is not asked for
        return (await consumer.beginning_offsets([tp]))[tp], (await consumer.end_offsets([tp]))[tp]

    async def _start(self, first: int, end: int) -> None:
        """Take the last index; without one, begin with the first record."""
        self.held, self.position = {}, first
        for tail in _TAILS:
            async for record in self._records(max(first, end - tail), end):
                if record.key == INDEX_KEY and record.value is not None:
                    try:
                        index = decode_index(record.value)
                    except msgspec.DecodeError as error:
                        log.warning("the index of %s at offset %d is passed over: %s", *self._at(record), error)
                        continue
                    through = index.through + (index.through == record.offset)
                    self.held, self.position = dict(index.slots), min(max(first, through), end)
            if self.held:
                return

    def _take(self, record: Record) -> None:
        self.position = record.offset + 1
        key = record.key or b""
        if key == INDEX_KEY:
            return
        try:
            slot = key.decode()
            if not is_slot(slot):
                raise ValueError("its key is no slot")
            if record.value is None:
                self.held.pop(slot, None)
            else:
                head = _decode_head(record.value)
                self.held[slot] = KeptVersion(head.version, head.made_at, record.offset)
        except ValueError as error:
            log.warning("the record of %s at offset %d is passed over: %s", *self._at(record), error)

    async def _load(self, slot: str) -> Parameters | None:
        kept = self.held.get(slot)
        first, end = await self._bounds()
        if kept is None or not first <= kept.offset < end:
            return None
        async for record in self._records(kept.offset, kept.offset + 1):
            if record.key == slot.encode() and record.value is not None:
                try:
                    parameters = decode_parameters(record.value)
                except ParametersError as error:
                    log.warning("the record of %s at offset %d cannot be used: %s", *self._at(record), error)
                    continue
                if parameters.version == kept.version:
                    return parameters
        return None

    def _at(self, record: Record) -> tuple[str, int]:
        return self._tp.topic, record.offset

    async def _records(self, start: int, end: int) -> AsyncIterator[Record]:
        """Yield the records of the offsets from `start` up to `end`."""
        consumer, tp = self._consumer, self._tp
        if start >= end:
            return
        consumer.seek(tp, start)
        consumer.resume(tp)
        try:
            while await consumer.position(tp) < end:
                fetched = await consumer.getmany(tp, timeout_ms=200)
                for record in fetched.get(tp, ()):
                    if record.offset < end:
                        yield plain(record)
        finally:
            consumer.pause(tp)


class HistoryWriter:
    """Writes the history, in the learner process."""

    def __init__(self, topic: str, *, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer) -> None:
        self._topic = topic
        self._reader = HistoryReader(consumer, topic)
        self._producer = producer

    async def keep(self, versions: Sequence[Parameters]) -> None:
        """Add the last versions, where they are missing, and thin."""
        reader = self._reader
        await reader.refresh()
        written, gone, held = changes(reader.held, versions)
        for slot, parameters in written.items():
            await self._put(slot, held[slot], encode_parameters(parameters))
        for slot in gone:
            await self._delete(slot)
        if written or gone:
            reader.held = {slot: kept._replace(offset=reader.held[slot].offset) for slot, kept in held.items()}
            await self._write_index()

    async def tag(self, tag: Tag, versions: Sequence[Parameters]) -> None:
        """Give a version its name, or remove the name; a version that is not kept is reported and nothing changes."""
        reader, slot = self._reader, tag_slot(tag.name)
        await reader.refresh()
        if tags(reader.held).get(tag.name) == tag.version:
            return
        if tag.version is None:
            await self._delete(slot)
        else:
            source = slot_of(reader.held, tag.version)
            parameters = next((one for one in versions if one.version == tag.version), None)
            if parameters is None and source is not None:
                parameters = await reader.find(source)
            if parameters is None:
                log.warning("the tag %s was refused: version %d is not kept", tag.name, tag.version)
                return
            await self._put(slot, KeptVersion.of(parameters), encode_parameters(parameters))
        await self._write_index()

    async def _put(self, slot: str, kept: KeptVersion, value: bytes) -> None:
        offset = await self._write(slot.encode(), value)
        self._reader.held[slot] = kept._replace(offset=offset)

    async def _delete(self, slot: str) -> None:
        await self._write(slot.encode(), None)
        self._reader.held.pop(slot, None)

    async def _write_index(self) -> None:
        reader = self._reader
        await self._write(INDEX_KEY, encode_index(HistoryIndex(through=reader.position, slots=reader.held)))

    async def _write(self, key: bytes, value: bytes | None) -> int:
        written = await self._producer.send_and_wait(self._topic, value, key=key)
        if written.offset == self._reader.position:  # otherwise another learner writes too: read again what it wrote
            self._reader.position += 1
        return int(written.offset)
