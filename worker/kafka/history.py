"""The topic of the thinned history: find a version in it, and keep it up to date (see `worker.stream.history`).

The last record of the topic is normally its index. So a version is found with two reads, however large the topic is. A
record that cannot be used is passed over with a warning. If the index is missing or wrong, the whole topic is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from confluent_kafka import Producer

from worker.errors import ParametersError
from worker.kafka.clients import TopicReader, write
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
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Record
from worker.stream.version_records import encode_parameters

log = logging.getLogger(__name__)


class _Head(msgspec.Struct):
    """The fields of a version that the index has."""

    version: Count
    made_at: Count


_decode_head = msgspec.json.Decoder(_Head).decode


class HistoryReader:
    """Reads the history; `slots` has the slots as of the last `refresh`."""

    def __init__(self, reader: TopicReader, topic: str) -> None:
        self._reader = reader
        self._topic = topic
        self.slots: dict[str, KeptVersion] = {}
        #: The offset from which on records are not in `slots`; -1 before the first `refresh`.
        self.position = -1

    def refresh(self) -> None:
        """Bring `slots` up to date."""
        first, end = self._reader.bounds(self._topic)
        if not first <= self.position <= end:
            self._start(first, end)
        for record in self._reader.read_to(self._topic, self.position, end):
            self._take(record)
        self.position = max(self.position, end)

    def find(self, slot: str) -> Parameters | None:
        """Return the version in a slot; None if there is none that can be used."""
        found = self._load(slot)
        if found is None and slot in self.slots:
            log.warning("the index of %s is not right: the whole topic is read", self._topic)
            self.slots, self.position = {}, self._reader.bounds(self._topic)[0]
            self.refresh()
            found = self._load(slot)
        return found

    def _start(self, first: int, end: int) -> None:
        """Begin with the index, if that is the last record, or else with the first record."""
        self.slots, self.position = {}, first
        for record in self._reader.read_to(self._topic, max(first, end - 1), end):
            if record.key == INDEX_KEY and record.value is not None:
                try:
                    index = decode_index(record.value)
                except msgspec.DecodeError as error:
                    log.warning("the index of %s at offset %d is passed over: %s", *self._at(record), error)
                    return
                through = index.through + (index.through == record.offset)
                self.slots, self.position = dict(index.slots), min(max(first, through), end)

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
                self.slots.pop(slot, None)
            else:
                head = _decode_head(record.value)
                self.slots[slot] = KeptVersion(head.version, head.made_at, record.offset)
        except ValueError as error:
            log.warning("the record of %s at offset %d is passed over: %s", *self._at(record), error)

    def _load(self, slot: str) -> Parameters | None:
        kept = self.slots.get(slot)
        first, end = self._reader.bounds(self._topic)
        if kept is None or not first <= kept.offset < end:
            return None
        for record in self._reader.read_to(self._topic, kept.offset, kept.offset + 1):
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
        return self._topic, record.offset


class HistoryWriter:
    """Writes the history, in the learner process."""

    def __init__(self, topic: str, *, reader: TopicReader, producer: Producer) -> None:
        self._topic = topic
        self._reader = HistoryReader(reader, topic)
        self._producer = producer

    def keep(self, versions: Sequence[Parameters]) -> None:
        """Add the last versions, where they are missing, and thin."""
        reader = self._reader
        reader.refresh()
        written, gone, slots = changes(reader.slots, versions)
        for slot, parameters in written.items():
            self._put(slot, slots[slot], encode_parameters(parameters))
        for slot in gone:
            self._delete(slot)
        if written or gone:
            reader.slots = {slot: kept._replace(offset=reader.slots[slot].offset) for slot, kept in slots.items()}
            self._write_index()

    def tag(self, tag: Tag, versions: Sequence[Parameters]) -> None:
        """Give a version its name, or remove the name; a version that is not kept is reported and nothing changes."""
        reader, slot = self._reader, tag_slot(tag.name)
        reader.refresh()
        if tags(reader.slots).get(tag.name) == tag.version:
            return
        if tag.version is None:
            self._delete(slot)
        else:
            source = slot_of(reader.slots, tag.version)
            parameters = next((one for one in versions if one.version == tag.version), None)
            if parameters is None and source is not None:
                parameters = reader.find(source)
            if parameters is None:
                log.warning("the tag %s was refused: version %d is not kept", tag.name, tag.version)
                return
            self._put(slot, KeptVersion.of(parameters), encode_parameters(parameters))
        self._write_index()

    def _put(self, slot: str, kept: KeptVersion, value: bytes) -> None:
        offset = self._write(slot.encode(), value)
        self._reader.slots[slot] = kept._replace(offset=offset)

    def _delete(self, slot: str) -> None:
        self._write(slot.encode(), None)
        self._reader.slots.pop(slot, None)

    def _write_index(self) -> None:
        reader = self._reader
        self._write(INDEX_KEY, encode_index(HistoryIndex(through=reader.position, slots=reader.slots)))

    def _write(self, key: bytes, value: bytes | None) -> int:
        offset = int(write(self._producer, self._topic, value, key).offset())
        if offset == self._reader.position:  # otherwise another learner writes too: read again what it wrote
            self._reader.position += 1
        return offset
