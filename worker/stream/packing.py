"""The large arrays of a version, in and out of its JSON record, in small steps.

A record of 38,000 arms has 15 MB, nearly all of it base64. One call of a JSON or base64 library on that much keeps
every other thread of the process waiting for tens of milliseconds. So the base64 is cut out of the record before it is
parsed (and put in after it is written), and it is converted in steps of `STEP` bytes. The bytes of a record and its
hash are the same as without this.

In the skeleton of a record, what is left of it, `"data":"@2"` stands for the block number 2. Base64 has no `@`.
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Sequence

import numpy as np

from worker.bandit.arrays import Floats

#: Bytes of base64 that are converted at once; a multiple of 4. Between two steps, other threads get their turn.
STEP = 1 << 14

Block = bytes | memoryview

_OPEN = b'"data":"'
_PLACE = re.compile(rb'"data":"@(\d{1,6})"')


def cut(record: bytes) -> tuple[bytes, list[Block]]:
    """Return the skeleton of a record and its blocks of base64, which are views of the record.

    >>> skeleton, blocks = cut(b'{"data":"AAAA","shape":[0]}')
    >>> skeleton, [bytes(block) for block in blocks]
    (b'{"data":"@0","shape":[0]}', [b'AAAA'])
    """
    view = memoryview(record)
    parts: list[Block] = []
    blocks: list[Block] = []
    done = 0
    while (found := record.find(_OPEN, done)) >= 0:
        start = found + len(_OPEN)
        end = record.find(b'"', start)
        if end < 0 or record.startswith(b"@", start):
            raise ValueError("data is not base64")
        parts += [view[done:start], b"@%d" % len(blocks)]
        blocks.append(view[start:end])
        done = end
    return b"".join([*parts, view[done:]]), blocks


def pieces(skeleton: bytes, blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield the record again, piece by piece.

    >>> b"".join(pieces(b'{"data":"@0","shape":[0]}', [b"AAAA"]))
    b'{"data":"AAAA","shape":[0]}'
    """
    done = 0
    for place in _PLACE.finditer(skeleton):
        yield skeleton[done : place.start()]
        yield _OPEN
        yield blocks[int(place[1])]
        done = place.end() - 1
    yield skeleton[done:]


def to_base64(array: Floats) -> bytes:
    """Return an array as base64 of little-endian float64."""
    data = np.ascontiguousarray(array, dtype="<f8").reshape(-1).view(np.uint8).data
    step = STEP // 4 * 3
    return b"".join(b2a_base64(data[at : at + step], newline=False) for at in range(0, len(data), step))


def from_base64(block: Block) -> Floats:
    """Return the flat array of a block; raise `ValueError` if it is not base64 of whole numbers."""
    view, end = memoryview(block), 0
    data = np.empty(len(view) // 4 * 3, dtype=np.uint8)
    room = data.data
    for at in range(0, len(view), STEP):
        part = a2b_base64(view[at : at + STEP], strict_mode=True)
        room[end : end + len(part)] = part
        end += len(part)
    return data[:end].view("<f8")
