"""The log of `adcascade serve --record`: it has every record once, also after a kill.

Rules that hold in this file:

- Lines are kept in the state folder, in the transaction of their batch, before they are appended to the log. They are
  deleted there when the log is on disk, about once a second.
- A log is continued only if it provably is the log of the folder: it is as long as the folder knows and ends alike, and
  what follows is a beginning of the lines that the folder still keeps. The rest of these is appended.
- The log goes on in a new file after a day. What was written is renamed to FILE-<time of its beginning>, when all of
  it is on disk; the new file begins as a new log does, so that every part can be replayed alone or with others. A kill
  at any point leaves the part complete, and an empty file or none, with which a log begins. Parts are deleted when all
  that they have is older than `keep`.
- Nothing else in an existing file is ever changed or cut off. Any other file that is not empty is refused: another
  log, a catalogue, a log that is ahead because an older copy of the folder was restored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from worker.errors import FailedError, InputError
from worker.logs.format import Headers, encode_line
from worker.serve.state import StateFolder, StateView
from worker.stream.topology import Record

#: Name in the state folder.
RECORD: Final = "record"
#: Bytes at the end of a log that are compared by their hash: many lines, with offsets, times and ids of sessions.
_TAIL: Final = 1 << 16
#: Milliseconds after which a log goes on in a new file; as long as it is kept, if that is shorter.
PART: Final = 86_400_000
_TIME: Final = "%Y%m%dT%H%M%SZ"


class LogOnDisk(msgspec.Struct, frozen=True):
    """What of a log is on disk for certain: its length, the hash of its last bytes, and the time of its beginning."""

    path: str
    length: int
    tail: str
    since: int = 0


class Recording:
    """Appends to the log of a state folder, or begins one; parts are kept for `keep` milliseconds, 0: one file."""

    def __init__(self, path: Path, state: StateFolder, *, keep: int = 0) -> None:
        self._state = state
        self._keep = keep
        self._since = 0
        self._path = path.absolute()
        self._lines: list[bytes] = []
        self._unwritten = b""
        with self._failing():
            self._file = self._path.open("a+b")
            self._length = os.fstat(self._file.fileno()).st_size
        #: Whether the log is empty, so that it has to begin with what the folder has of the past.
        self.is_new = not self._length
        if self.is_new:
            state.clear_log()
        else:
            self._continue()
        with self._failing():
            self._on_disk: LogOnDisk | None = self._synchronised()  # which the folder does not know yet

    def _continue(self) -> None:
        """Append the lines that the last process had kept but not written; raise `InputError` if they do not fit."""
        known, rest = _known(self._state), self._state.log()
        if known is not None and known.length <= self._length <= known.length + len(rest):
            written = self._read(known.length, self._length)
            if self._tail(known.length) == known.tail and rest.startswith(written):
                self._unwritten, self._since = rest[len(written) :], known.since
                return self.write(synchronise=False)
        self._file.close()
        raise InputError(
            f"--record {self._path}: this file exists, and is not the log that the state folder continues; "
            "name a new file"
        )

    def add(self, record: Record, headers: Headers = ()) -> None:
        """Add a record to the next transaction."""
        self._lines.append(encode_line(record, headers))

    def keep(self) -> None:
        """Put the lines that were added into the transaction of the folder."""
        if self._on_disk is not None:
            self._state.set_meta(RECORD, msgspec.json.encode(self._on_disk))
            self._state.clear_log()
            self._on_disk = None
        self._unwritten, self._lines = b"".join(self._lines), []
        if self._unwritten:
            self._state.append_log(self._unwritten)

    def write(self, *, synchronise: bool) -> None:
        """Append the lines to the log, after the commit; wait for the disk if `synchronise`. In any thread."""
        with self._failing():
            self._file.write(self._unwritten)
            self._file.flush()
            self._length += len(self._unwritten)
            self._unwritten = b""
            if synchronise:
                self._on_disk = self._synchronised()

    def rotate(self, now: int) -> bool:
        """Begin a new file if it is time, after all was written and is on disk; return whether it was. In any thread.

        The caller then begins the log in a transaction of its own.
        """
        self._since = self._since or now
        if not self._keep or now - self._since < min(PART, self._keep):
            return False
        with self._failing():
            self._file.close()
            self._path.rename(self._free_name())
            self._file, self._length, self._since = self._path.open("a+b"), 0, now
            folder = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(folder)  # else a failure of power could leave the old file under the name of the new one
            os.close(folder)
            self._on_disk = self._synchronised()
            parts = _parts(self._path)
            for (_, part), (end, _) in zip(parts, [*parts[1:], (now, self._path)], strict=True):
                if end <= now - self._keep:
                    part.unlink()
        return True

    def _free_name(self) -> Path:
        since = self._since
        while (name := Path(f"{self._path}-{datetime.fromtimestamp(since // 1000, UTC):{_TIME}}")).exists():
            since += 1000
        return name

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _synchronised(self) -> LogOnDisk:
        os.fdatasync(self._file.fileno())
        return LogOnDisk(os.fsdecode(self._path), self._length, self._tail(self._length), self._since)

    def _tail(self, length: int) -> str:
        return sha256(self._read(max(0, length - _TAIL), length)).hexdigest()

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._file.fileno(), end - start, start)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FailedError(f"--record {self._path}: {error.strerror or error}") from None


def _parts(log: Path) -> list[tuple[int, Path]]:
    """Return the parts of a log, also compressed ones, with the times of their beginnings, the oldest first."""
    name = re.compile(re.escape(log.name) + r"-(\d{8}T\d{6}Z)(\.gz)?")
    found = [(name.fullmatch(file.name), file) for file in log.parent.iterdir()]
    times = [(datetime.strptime(match[1], _TIME).replace(tzinfo=UTC), file) for match, file in found if match]
    return sorted((round(time.timestamp() * 1000), file) for time, file in times)


def _known(state: StateView) -> LogOnDisk | None:
    """Return what the folder knows of its log; None if it has none."""
    stored = state.meta(RECORD)
    return None if stored is None else msgspec.json.decode(stored, type=LogOnDisk)


def recorded(state: StateView) -> list[tuple[int, Path]]:
    """Return the files of the log of a folder with the times of their beginnings, the oldest first; 0: not known."""
    if (known := _known(state)) is None or not (log := Path(known.path)).parent.is_dir():
        return []
    return [*_parts(log), *([(known.since, log)] if log.exists() else [])]


def complete(state: StateFolder) -> None:
    """Append what a kill has kept from the log of a folder that is not served any more, if the log is still there."""
    known = _known(state)
    if known is not None and (path := Path(known.path)).exists() and path.stat().st_size:
        Recording(path, state).close()


def forget(state: StateFolder) -> None:
    """Forget the log: what is served without one would be missing in it."""
    state.set_meta(RECORD, None)
    state.clear_log()
