"""What comes of the processors: records with offsets, for a tap.

The embedded runner and `adcascade serve` write through this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from worker.stream.topology import ONLY_PARTITION, Emits, Record, Topics

Headers = Sequence[tuple[str, bytes]]


class Tap(Protocol):
    """Receives every record on any topic."""

    def __call__(self, record: Record, headers: Headers) -> None:
        """Receive a record."""


class Outputs:
    """Gives records their offsets, and the `tap` the records, if there is one; `time` is that of the records."""

    def __init__(self, topics: Topics, tap: Tap | None) -> None:
        self.topics, self.tap = topics, tap
        self.time = 0
        self.journal_end = 0
        self.offsets: Counter[tuple[str, int]] = Counter()  # the next ones, by topic and partition

    def next_offset(self, topic: str, partition: int = ONLY_PARTITION) -> int:
        """Give out the next offset of a partition."""
        offset = self.offsets[topic, partition]
        self.offsets[topic, partition] += 1
        return offset

    def add_journal(
        self, records: Sequence[tuple[bytes | None, bytes]], *, time: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Append keys and values to the journal; return the values with their offsets."""
        numbered = list(enumerate((value for _, value in records), start=self.journal_end))
        self.journal_end += len(numbered)
        if self.tap is not None:
            now = self.time if time is None else time
            for (offset, value), (key, _) in zip(numbered, records, strict=True):
                self.tap(Record(self.topics.journal, ONLY_PARTITION, offset, now, key, value), ())
        return numbered

    def add_emits(self, emits: Emits, partition: int = ONLY_PARTITION) -> None:
        """Add the decisions and dead letters of a batch."""
        if self.tap is not None:
            for key, value in emits.decisions:
                self.emit(self.topics.decisions, key, value, partition)
            for letter in emits.dead_letters:
                self.emit(self.topics.dead_letters, letter.key, letter.value, headers=letter.headers)

    def emit(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int = ONLY_PARTITION,
        headers: Headers = (),
    ) -> None:
        """Add a record at the next offset of its partition."""
        if self.tap is not None:
            self.tap(Record(topic, partition, self.next_offset(topic, partition), self.time, key, value), headers)
