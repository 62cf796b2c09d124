"""What comes of the processors: records with offsets, kept in a state folder, given to a tap, or both.

The embedded runner and `adcascade serve` write through this. The caller commits the transaction of the folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from worker.embedded.state import StateFolder
from worker.stream.events import Episode, Tag
from worker.stream.parameters import Parameters
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Topics
from worker.stream.versions import KEPT, version_key

Headers = Sequence[tuple[str, bytes]]


class Tap(Protocol):
    """Receives every record on any topic."""

    def __call__(self, record: Record, headers: Headers) -> None:
        """Receive a record."""


class Outputs:
    """Writes to the `state` folder and to the `tap`, where there are any; `time` is that of the records."""

    def __init__(self, topics: Topics, state: StateFolder | None, tap: Tap | None) -> None:
        self.topics, self.state, self.tap = topics, state, tap
        self.time = 0
        self.journal_end = 0 if state is None else state.journal_bounds()[1]
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
        if self.state is not None:
            self.state.append_journal(numbered)
        if self.tap is not None:
            now = self.time if time is None else time
            for (offset, value), (key, _) in zip(numbered, records, strict=True):
                self.tap(Record(self.topics.journal, ONLY_PARTITION, offset, now, key, value), ())
        return numbered

    def add_emits(self, emits: Emits, partition: int = ONLY_PARTITION) -> None:
        """Add what came of a batch besides the journal: changed sessions, decisions, dead letters."""
        if self.state is not None:
            self.state.change_sessions(emits.changelog)
        if self.tap is not None:
            for key, value in emits.decisions:
                self._emit(self.topics.decisions, key, value, partition)
            for letter in emits.dead_letters:
                self._emit(self.topics.dead_letters, letter.key, letter.value, headers=letter.headers)

    def add_episode(self, episode: Episode, value: bytes) -> None:
        """Add a closed window and its record."""
        self._emit(self.topics.episodes, b"%d" % episode.version, value)

    def add_version(self, parameters: Parameters, value: bytes, known: Sequence[Parameters]) -> None:
        """Add a version and its record; `known` are the last versions, with this one."""
        self._emit(self.topics.parameters, version_key(parameters.version), value)
        if self.state is not None:
            self.state.put_parameters(parameters, value, kept=KEPT)
            self.state.keep_history(known)

    def add_tags(self, tags: Sequence[tuple[int, Tag]]) -> list[tuple[int, Tag, str]]:
        """Give versions their names; return the orders that are refused, with their offsets and the reason."""
        return [
            (offset, tag, f"version {tag.version} is not kept")
            for offset, tag in tags
            if self.state is not None and not self.state.tag(tag)
        ]

    def _emit(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int = ONLY_PARTITION,
        headers: Headers = (),
    ) -> None:
        if self.tap is not None:
            self.tap(Record(topic, partition, self.next_offset(topic, partition), self.time, key, value), headers)
