"""The log of `adcascade serve --record`: it has every record once, whatever ended the process.

The state folder knows how long the log is, in the same transaction that keeps what the log tells. Whatever is beyond
that length when the process starts again was not kept, and is cut off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from worker.embedded.state import StateFolder
from worker.embedded.steps import Recorded, Step
from worker.errors import FailedError
from worker.logs.format import encode_line
from worker.stream.parameters import decode_parameters
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.versions import version_key

_PATH: Final = "record.path"
_LENGTH: Final = "record.length"
_OFFSETS: Final = ("parameters", "episodes")


class StateRecording:
    """Appends to the log of a state folder; nothing counts before `finish` and the commit of the folder."""

    def __init__(self, path: Path, state: StateFolder, topics: Topics) -> None:
        self._state = state
        self._topics = topics
        self._path = path.absolute()
        self._offsets = {name: int(state.meta(f"record.{name}") or b"0") for name in _OFFSETS}
        known = state.meta(_PATH) == os.fsencode(self._path)
        self._length = int(state.meta(_LENGTH) or b"0") if known else 0
        try:
            continues = self._length and self._path.exists() and self._path.stat().st_size >= self._length
            self._file = self._path.open("r+b" if continues else "wb")
            self._file.truncate(self._length if continues else 0)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise FailedError(f"--record {self._path}: {error.strerror or error}") from None
        if not continues:
            self._begin()

    def _begin(self) -> None:
        """Begin a log with what the folder has of the past: versions, and the journal that they still need."""
        time = int(self._state.meta("time") or b"0")
        for value in self._state.parameters():
            self.add_version(decode_parameters(value).version, value, time)
        for offset, value in self._state.journal(0):
            self._add(self._topics.journal, offset, time, None, value)

    def _add(
        self,
        topic: str,
        offset: int,
        time: int,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        record = Record(topic, ONLY_PARTITION, offset, time, key, value)
        self._file.write(encode_line(record, headers))

    def add_step(self, step: Step) -> None:
        """Add the records of a step."""
        self._add_all(step.inputs, step.time)
        for index, (key, value) in enumerate(step.journal):
            self._add(self._topics.journal, step.journal_start + index, step.time, key, value)
        self._add_all(step.outputs, step.time)

    def _add_all(self, records: tuple[Recorded, ...], time: int) -> None:
        for one in records:
            self._add(one.topic, one.offset, time, one.key, one.value, one.headers)

    def add_version(self, version: int, value: bytes, time: int) -> None:
        """Add the record of a version."""
        self._add(self._topics.parameters, self._next("parameters"), time, version_key(version), value)

    def add_episode(self, version: int, value: bytes, time: int) -> None:
        """Add the record of a closed window."""
        self._add(self._topics.episodes, self._next("episodes"), time, b"%d" % version, value)

    def _next(self, name: str) -> int:
        self._offsets[name] += 1
        return self._offsets[name] - 1

    def finish(self) -> None:
        """Write all of it to disk, and note the length in the folder; the caller commits."""
        try:
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise FailedError(f"--record {self._path}: {error.strerror or error}") from None
        self._state.set_meta(_PATH, os.fsencode(self._path))
        self._state.set_meta(_LENGTH, b"%d" % self._file.tell())
        for name, offset in self._offsets.items():
            self._state.set_meta(f"record.{name}", b"%d" % offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
