"""Room for the sessions of a worker: a bound on what arrivals and feedback can make it remember."""

from __future__ import annotations

from worker.stream.events import MOST
from worker.stream.session import Parked, ParkedRecord

#: Bytes of a parked record that take the room of one more session.
_BYTES = 1_024


class SessionRoom:
    """The sessions that a worker remembers, over all of its partitions, and how many these may be.

    A parked feedback record counts as a session, or as several if it is large. Sessions that are taken over with a
    partition always count, and may exceed the bound. `claimed` is the part of a batch that is planned and not opened.

    >>> room = SessionRoom(1)
    >>> room.claim(), room.claim()
    (True, False)
    """

    __slots__ = ("claimed", "held", "most")

    def __init__(self, most: int | None = None) -> None:
        self.most = MOST if most is None else most
        self.held = 0
        self.claimed = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be remembered."""
        return self.held + self.claimed >= self.most

    def claim(self, *, waiting: bool = False) -> bool:
        """Claim room for a session; return whether there is any. One whose feedback is parked gets it always."""
        if self.is_full and not waiting:
            return False
        self.claimed += 1
        return True


def parked_size(parked: Parked) -> int:
    """Return the room that parked feedback takes."""
    return sum(map(record_size, parked.records))


def record_size(record: ParkedRecord) -> int:
    """Return the room that a parked record takes.

    >>> record_size(ParkedRecord(0, 0, b"{}")), record_size(ParkedRecord(0, 0, bytes(65_536)))
    (1, 65)
    """
    return 1 + len(record.value) // _BYTES
