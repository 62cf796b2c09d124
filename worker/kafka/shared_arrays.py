"""Arrays in memory that two processes see: written once to a file without a name, and mapped read-only.

The file is passed on as an open descriptor. It lives as long as one of the two has it open or mapped, so nothing is
left over however either of them ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from worker.bandit.arrays import Array

#: Every array begins at a multiple of so many bytes, which is as good as any memory for all kernels.
ALIGNMENT = 64


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def write_parts(arrays: Mapping[str, Array]) -> tuple[int, tuple[Part, ...]]:
    """Write arrays to a file without a name; return its open descriptor and where they are."""
    file = _nameless()
    try:
        parts, end = [], 0
        for name, array in arrays.items():
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = _write(file, array, offset)
            parts.append(Part(name, array.dtype.str, array.shape, offset))
        os.ftruncate(file, max(end, 1))  # nothing at all cannot be mapped
        _seal(file)
    except BaseException:
        os.close(file)
        raise
    return file, tuple(parts)


def map_parts(file: int, parts: tuple[Part, ...]) -> dict[str, Array]:
    """Return the arrays of a file, read-only; they hold the mapping, so the descriptor may be closed.

    Raises `ValueError` if the file is smaller than it should be.
    """
    # Private: a file that is sealed against writing cannot be mapped otherwise before Linux 6.7.
    mapping = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    arrays = {}
    for part in parts:
        dtype, count = np.dtype(part.dtype), int(np.prod(part.shape, dtype=np.int64))
        flat: Array = np.frombuffer(mapping, dtype, count, part.offset) if count else np.empty(0, dtype)
        arrays[part.name] = flat.reshape(part.shape)
    return arrays


def _nameless() -> int:
    """Return an open file in memory; where the system has none, a temporary one that is deleted already."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("adcascade-version", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file, path = tempfile.mkstemp(prefix="adcascade-version-")
    Path(path).unlink()
    return file


def _write(file: int, array: Array, offset: int) -> int:
    """Write an array at an offset; return the offset after it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
    return offset


def _seal(file: int) -> None:
    """Let nobody change the file, if it is one in memory: a page that is cut off ends the process that reads it."""
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
