"""Bounds on what a record may cause to be written: no output is larger than its topic takes.

Rules that hold in this file:

- An input whose outputs might not fit is rejected before anything of it is written, so that journal, table and
  decisions agree: a session whose table value cannot be stored is not in the journal either.
- What does not fit all the same is left out and reported: a topic may take less than when a session was opened.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.stream.decoding import Rejected
from worker.stream.encoding import encode_many, opened_document
from worker.stream.events import Arrival, Feedback
from worker.stream.session import Parked
from worker.stream.topology import MOST_BYTES, RESERVED_BYTES, Emits, Record, Tally


class OutputBounds:
    """Bounds by the largest record that all output topics take."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._room = most_bytes - RESERVED_BYTES  # for key and value

    def surely_fits(self, slate_bytes: int) -> int:
        """Return the length up to which an input needs no further check; slates add so many bytes to its outputs."""
        # A number of one digit and a comma become eight bytes at most, in the journal or in the table.
        return (self._room - slate_bytes) // 4

    def check(self, record: Record, event: Arrival | Feedback, slate_bytes: int, tally: Tally) -> None:
        """Raise `Rejected` if an output of a longer input might not fit."""
        if isinstance(event, Feedback):
            size = 2 * len(record.value or b"")  # the key and the fact, or what is parked
        else:
            key, context = event.session_id, event.context
            fact = opened_document(key, event.occurred_at, context, (), (), event.exclude, 0)
            size = len(key.encode()) + len(encode_many([fact])[0]) + 4 * len(context) + slate_bytes
        if size > self._room:
            tally.troubles.add("too-large-output", f"{record.where}: up to {size} bytes, more than {self._room}")
            raise Rejected("too-large", f"its outputs may have {size} bytes, and the topics take {self._room}")

    def can_park(self, parked: Parked, value: bytes) -> bool:
        """Whether another record fits into a table value."""
        return sum(len(kept.value) for kept in parked.records) + len(value) <= self._room // 2

    def fits(self, key: bytes, value: bytes) -> bool:
        """Whether a record fits."""
        return len(key) + len(value) <= self._room

    def fitting(self, topic: str, pairs: Iterable[tuple[bytes, bytes]], emits: Emits) -> list[tuple[bytes, bytes]]:
        """Return the records that fit, and report the others."""
        written, fits = list(pairs), self.fits
        if self.most_bytes >= MOST_BYTES or all(fits(*pair) for pair in written):
            return written
        for key, value in written:
            if not fits(key, value):
                emits.tally.troubles.add("too-large-output", f"{topic}: {len(value)} bytes, more than {self._room}")
        return [pair for pair in written if fits(*pair)]
