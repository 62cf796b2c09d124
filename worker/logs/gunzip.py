"""Decompression that keeps all data before a defect."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO, Final

_PIECE: Final = 1 << 16


class Gunzip(io.RawIOBase):
    """Decompress a stream up to its first defect, and keep that in `defect`.

    Python's `gzip` raises instead and loses up to a whole buffer of good data.
    """

    def __init__(self, source: BinaryIO) -> None:
        self.defect = ""
        self._source = source
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._input = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of the buffer; return the number of bytes, 0 at the end."""
        while not self.defect:
            if not self._input and not self._member.unconsumed_tail:
                self._input = self._source.read(_PIECE)
                if not self._input:
                    if not self._member.eof:
                        self.defect = "unexpected end"
                    return 0
            if self._member.eof:
                self._input = self._input.lstrip(b"\x00")  # padding between members is allowed
                if not self._input:
                    continue
                self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            try:
                data = self._member.decompress(self._member.unconsumed_tail + self._input, len(buffer))
            except zlib.error as error:
                self.defect = str(error)
                return 0
            self._input = self._member.unused_data
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0
