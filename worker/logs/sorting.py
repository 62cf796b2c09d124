"""External sorting: sorted runs in a temporary file, merged when they are read.

The lines of a log come in any order. If topics were dumped one after the other, a line may be out of order by the
whole length of the log, so a window of bounded length is not enough. A log that fits into memory never touches the
disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from heapq import merge
from struct import Struct
from typing import IO, Final

from worker.errors import FailedError

#: Bytes of entries held in memory before they are written out as a run.
MEMORY: Final = 64 * 1024 * 1024

_OVERHEAD: Final = 48  # bytes of memory of a bytes object in a list, beside its content
_LENGTH: Final = Struct("<I")
_LEAST_READ, _MOST_READ = 1 << 14, 1 << 18


class Sorter:
    """Take entries (bytes) in any order and yield them sorted, any number of times; a context manager.

    At most `memory` bytes are held; the rest goes to a file in the folder for temporary files (TMPDIR).

    >>> with Sorter(memory=100) as sorter:
    ...     for entry in (b"c", b"a", b"d", b"b"):
    ...         sorter.add(entry)
    ...     list(sorter), len(sorter)
    ([b'a', b'b', b'c', b'd'], 4)
    """

    def __init__(self, *, memory: int = MEMORY) -> None:
        self._memory = memory
        self._held: list[bytes] = []
        self._size = 0
        self._count = 0
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []  # start and end of each in the file

    def __enter__(self) -> Sorter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self._count

    def add(self, entry: bytes) -> None:
        """Add an entry."""
        self._held.append(entry)
        self._count += 1
        self._size += len(entry) + _OVERHEAD
        if self._size >= self._memory:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        self._held.sort()
        if not self._runs:
            return iter(self._held)
        share = max(_LEAST_READ, min(_MOST_READ, self._memory // len(self._runs)))
        return merge(*(self._run(start, end, share) for start, end in self._runs), self._held)

    def _spill(self) -> None:
        self._held.sort()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="adcascade-", buffering=1 << 20)  # noqa: SIM115 - see __exit__
            start = self._file.seek(0, os.SEEK_END)
            write, length = self._file.write, _LENGTH.pack
            for entry in self._held:
                write(length(len(entry)))
                write(entry)
            self._file.flush()
            self._runs.append((start, self._file.tell()))
        except OSError as error:
            raise FailedError(
                f"cannot sort the log in {tempfile.gettempdir()}: {error.strerror or error}; "
                "set TMPDIR to a folder with room for the whole log, uncompressed"
            ) from None
        self._held.clear()
        self._size = 0

    def _run(self, start: int, end: int, share: int) -> Iterator[bytes]:
        """Yield the entries of a run, reading one piece of the file at a time."""
        if self._file is None:
            return
        descriptor = self._file.fileno()
        rest = b""
        while start < end:
            piece = os.pread(descriptor, min(max(share, _needed(rest)), end - start), start)
            start += len(piece)
            rest += piece
            at = 0
            while len(rest) >= at + 4:
                stop = at + 4 + _LENGTH.unpack_from(rest, at)[0]
                if stop > len(rest):
                    break
                yield rest[at + 4 : stop]
                at = stop
            rest = rest[at:]


def _needed(rest: bytes) -> int:
    """Return the number of missing bytes of the first entry, so that a long one is read at once."""
    return 4 + _LENGTH.unpack_from(rest)[0] - len(rest) if len(rest) >= 4 else 0
