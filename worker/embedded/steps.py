"""The step log of a state folder: what `adcascade serve` has done, appended and synchronised before it is answered.

A step is what one batch of requests changed: facts for the journal, values of the session table, and, where a log is
recorded, the records themselves. Serving appends steps; the learner process reads them, folds the journal, and keeps
the rest of the folder. So an answer costs one append, and the folder needs no lock between the two.

Rules that hold in this file:

- A position is a number of bytes from the beginning of all steps. A file is named by the position that it begins at.
- A step is a frame: its length, its CRC-32, and MessagePack. A frame that is not whole is the end: after a crash, a
  step that was being written when it happened. Nobody was answered yet.
- Files are deleted when everything in them is kept elsewhere, never changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final
from zlib import crc32

import msgspec

from worker.errors import FailedError

#: Bytes of a file, after which the next one begins.
SEGMENT: Final = 64 << 20
#: Bytes that are read at once.
CHUNK: Final = 4 << 20

_HEAD: Final = Struct(">II")


class Recorded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record for the log: its topic, offset, key, value and headers."""

    topic: str
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Step(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What one batch of requests changed, orders to the learner included.

    `journal` has keys and values, from offset `journal_start` on. `offsets` are the next ones of the topics that are
    recorded. `progress` is the time up to which everything is in the journal, if this step reports it.
    """

    time: int
    journal_start: int
    journal: tuple[tuple[bytes | None, bytes], ...] = ()
    sessions: tuple[tuple[bytes, bytes | None], ...] = ()
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    inputs: tuple[Recorded, ...] = ()
    outputs: tuple[Recorded, ...] = ()
    progress: int = 0
    has_orders: bool = False


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Step).decode


class StepWriter:
    """Appends steps; one writer at a time."""

    def __init__(self, folder: Path, position: int) -> None:
        """Continue after the last whole step, or at `position`, whichever is later."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        end = repair(folder)
        self._file = -1
        self._starts = _starts(folder)
        self._begin(max(end, position))

    def _begin(self, position: int) -> None:
        """Begin a file, or continue the one that begins here."""
        if self._file >= 0:
            os.close(self._file)
        self._began = self.position = position
        if position not in self._starts:
            self._starts.append(position)
        self._file = os.open(_path(self._folder, position), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        _synchronise(self._folder)

    def encode(self, step: Step) -> bytes:
        """Return the frame of a step."""
        content = _encode(step)
        return _HEAD.pack(len(content), crc32(content)) + content

    def append(self, frames: bytes) -> None:
        """Write frames: they survive the process from now on. In any thread."""
        if self.position - self._began >= SEGMENT:
            self.synchronise()
            self._begin(self.position)
        rest = memoryview(frames)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self.position += len(frames)

    def synchronise(self) -> None:
        """Wait until everything is on disk, so that it survives a failure of power. In any thread."""
        os.fdatasync(self._file)

    def append_durably(self, frames: bytes) -> None:
        """Write frames and wait until they are on disk. In any thread."""
        self.append(frames)
        self.synchronise()

    def delete_before(self, position: int) -> None:
        """Delete the files with nothing but steps before a position."""
        while len(self._starts) > 1 and self._starts[1] <= position:
            _path(self._folder, self._starts.pop(0)).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class StepReader:
    """Reads steps from a position on, also while they are written."""

    def __init__(self, folder: Path, position: int) -> None:
        self._folder = folder
        self.position = position
        self._buffer = b""

    def read(self) -> list[Step]:
        """Return the next steps; none if there are none yet.

        Raises `FailedError` if the steps at this position are gone.
        """
        starts = _starts(self._folder)
        before = [start for start in starts if start <= self.position]
        if not before:
            if starts and self.position:
                raise FailedError(f"{self._folder} begins at {starts[0]}, but position {self.position} is needed")
            return []
        data = self._read(before[-1], self.position)
        steps, used = _frames(data)
        if not steps and before[-1] < starts[-1]:
            # Nothing more in this file, and a later one exists: a crash cut this one off, and writing went on there.
            self.position = starts[len(before)]
            return self.read()
        self.position += used
        return steps

    def _read(self, start: int, position: int) -> bytes:
        size = CHUNK
        with _path(self._folder, start).open("rb") as file:
            file.seek(position - start)
            data = file.read(size)
            # A step that is larger than that is read whole.
            if len(data) >= _HEAD.size and (needed := _HEAD.size + _HEAD.unpack_from(data)[0]) > len(data):
                data += file.read(needed - len(data))
        return data


def remaining(folder: Path, position: int) -> Iterator[Step]:
    """Yield all steps from a position on."""
    reader = StepReader(folder, position)
    while steps := reader.read():
        yield from steps


def repair(folder: Path) -> int:
    """Cut off what is not a whole step at the end of the last file; return the position there."""
    starts = _starts(folder)
    if not starts:
        return 0
    last = _path(folder, starts[-1])
    used = 0
    with last.open("r+b") as file:
        while True:
            file.seek(used)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                break
            length, checksum = _HEAD.unpack(head)
            content = file.read(length)
            if len(content) < length or crc32(content) != checksum:
                break
            used += _HEAD.size + length
        file.truncate(used)
        os.fdatasync(file.fileno())
    return starts[-1] + used


def _frames(data: bytes) -> tuple[list[Step], int]:
    """Return the whole steps at the beginning of some bytes, and how many bytes they take."""
    steps, at = [], 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        content = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(content) < length or crc32(content) != checksum:
            break
        steps.append(_decode(content))
        at += _HEAD.size + length
    return steps, at


def _starts(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.steps") if path.stem.isdecimal())


def _path(folder: Path, position: int) -> Path:
    return folder / f"{position:020d}.steps"


def _synchronise(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
