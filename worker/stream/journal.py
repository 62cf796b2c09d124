"""Journal records as a learner gets them, and in columns.

Rules that hold in this file:

- Offsets rise. A record at or before an offset that was handled is passed over, however often it comes.
- A record without a timestamp has the timestamp 0, by which nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

#: Offset and value of a journal record and, where it is known, its timestamp.
JournalRecord: TypeAlias = tuple[int, bytes | None] | tuple[int, bytes | None, int]

#: Offsets, values and timestamps (0 where they are not known) of journal records.
Columns: TypeAlias = tuple[Sequence[int], Sequence[bytes | None], Sequence[int]]


def unread(records: Sequence[JournalRecord], following: int) -> Columns:
    """Return the columns of the records from the offset `following` on.

    >>> unread([(3, b"a"), (4, b"b", 1_000), (4, b"b", 1_000), (6, None)], following=4)
    ([4, 6], [b'b', None], [1000, 0])
    """
    if set(map(len, records)) == {3}:
        offsets, values, timestamps = zip(*records, strict=True)
        if offsets[0] >= following and offsets == tuple(range(offsets[0], offsets[0] + len(offsets))):
            return offsets, values, timestamps  # nearly always
    rest: list[tuple[int, bytes | None, int]] = []
    for record in records:
        if record[0] >= following:
            following = record[0] + 1
            rest.append((record[0], record[1], record[2] if len(record) > 2 else 0))
    return [one[0] for one in rest], [one[1] for one in rest], [one[2] for one in rest]
