"""The thinned history of the versions in a state folder (see `worker.stream.history`)."""

from __future__ import annotations

from collections.abc import Sequence

from worker.embedded.state import StateFolder
from worker.stream.events import Tag
from worker.stream.history import KeptVersion, changes, first_time, slot_of, tag_slot
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.version_records import encode_parameters


class StateHistory:
    """Keeps the history of a state folder up to date; the caller commits."""

    def __init__(self, state: StateFolder) -> None:
        self._state = state
        self._held = state.slots()

    def keep(self, versions: Sequence[Parameters]) -> None:
        """Add the last versions, where they are missing, and thin."""
        written, gone, held = changes(self._held, versions)
        if not written and not gone:
            return
        for slot, parameters in written.items():
            self._state.put_slot(slot, held[slot], encode_parameters(parameters))
        for slot in gone:
            self._state.delete_slot(slot)
        self._state.date_slots(first_time(versions))
        self._held = held

    def tag(self, tag: Tag, versions: Sequence[Parameters]) -> bool:
        """Give a version its name, or remove the name; return False if the version is not kept."""
        slot = tag_slot(tag.name)
        if tag.version is None:
            self._state.delete_slot(slot)
            self._held.pop(slot, None)
            return True
        parameters = next((one for one in versions if one.version == tag.version), None)
        if parameters is None:
            source = slot_of(self._held, tag.version)
            value = None if source is None else self._state.in_slot(source)
            if value is None:
                return False
            parameters = decode_parameters(value)
        kept = KeptVersion.of(parameters)
        self._state.put_slot(slot, kept, encode_parameters(parameters))
        self._held[slot] = kept
        return True
