"""The topic of the thinned history: find a version in it, and keep it up to date (see `worker.stream.history`).

A record that cannot be used is passed over with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from confluent_kafka import Producer

from worker.errors import ParametersError
from worker.kafka.clients import TopicReader, write
from worker.stream.events import Count, Tag
from worker.stream.history import KeptVersion, changes, is_slot, slot_of, tag_slot, tags
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Record
from worker.stream.version_records import encode_parameters

log = logging.getLogger(__name__)


class _Head(msgspec.Struct):
    """The fields of a version that slots are about."""

    version: Count
    made_at: Count


_decode_head = msgspec.json.Decoder(_Head).decode


class HistoryReader:
    """Reads the history; `slots` has the slots as of the last `refresh`."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._position = 0
        self.slots: dict[str, KeptVersion] = {}

    def refresh(self, reader: TopicReader) -> None:
        """Bring `slots` up to date."""
        first, end = reader.bounds(self._topic)
        if end < self._position:  # another topic of this name
            self.slots, self._position = {}, first
        for record in reader.read_to(self._topic, max(self._position, first), end):
            self._take(record)
        self._position = end

    def find(self, slot: str, reader: TopicReader) -> Parameters | None:
        """Return the version in a slot; None if there is none that can be used."""
        kept = self.slots.get(slot)
        if kept is None:
            return None
        for record in reader.read_to(self._topic, kept.offset, kept.offset + 1):
            if record.value is not None:
                try:
                    return decode_parameters(record.value)
                except ParametersError as error:
                    log.warning("the record of %s at offset %d cannot be used: %s", self._topic, record.offset, error)
        return None

    def _take(self, record: Record) -> None:
        try:
            slot = (record.key or b"").decode()
            if not is_slot(slot):
                raise ValueError("its key is no slot")
            if record.value is None:
                self.slots.pop(slot, None)
            else:
                head = _decode_head(record.value)
                self.slots[slot] = KeptVersion(head.version, head.made_at, record.offset)
        except ValueError as error:
            log.warning("the record of %s at offset %d is passed over: %s", self._topic, record.offset, error)


class HistoryWriter:
    """Writes the history, in the learner process."""

    def __init__(self, topic: str, *, reader: TopicReader, producer: Producer) -> None:
        self._topic = topic
        self._history = HistoryReader(topic)
        self._reader = reader
        self._producer = producer

    def keep(self, versions: Sequence[Parameters]) -> None:
        """Add the last versions, where they are missing, and thin."""
        self._history.refresh(self._reader)
        written, gone = changes(self._history.slots, versions)
        for slot, parameters in written.items():
            self._write(slot, parameters)
        for slot in gone:
            self._write(slot, None)

    def tag(self, tag: Tag, versions: Sequence[Parameters]) -> None:
        """Give a version its name, or remove the name; a version that is not kept is reported and nothing changes."""
        history = self._history
        history.refresh(self._reader)
        if tags(history.slots).get(tag.name) == tag.version:
            return
        parameters = None
        if tag.version is not None:
            parameters = next((one for one in versions if one.version == tag.version), None)
            if parameters is None and (source := slot_of(history.slots, tag.version)) is not None:
                parameters = history.find(source, self._reader)
            if parameters is None:
                log.warning("the tag %s was refused: version %d is not kept", tag.name, tag.version)
                return
        self._write(tag_slot(tag.name), parameters)

    def _write(self, slot: str, parameters: Parameters | None) -> None:
        value = None if parameters is None else encode_parameters(parameters)
        write(self._producer, self._topic, value, slot.encode())
