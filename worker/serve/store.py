"""What `adcascade serve` keeps: the state folder and the log, one transaction for each batch.

Rules that hold in this file:

- Sessions, journal, versions, episodes and the lines of the log that belong together are committed together.
- A version is kept before it serves. An episode is kept once: after a restart the learner may repeat some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from worker.embedded.state import StateFolder
from worker.errors import InputError
from worker.logs.format import Headers
from worker.serve.recording import Recording, forget
from worker.stream.events import Episode, Tag
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, version_key

#: The names that logs have.
TOPICS: Final = Topics()
#: Names in the state folder.
RUNNER: Final = "runner"
SERVE: Final = b"serve"
MOVED: Final = b"moved"
_POSITION: Final = "serve"


class StorePosition(msgspec.Struct, kw_only=True):
    """Where a server stands.

    `time` is that of the last batch, `progress` the time up to which everything is in the journal, `closed` the end of
    the last window with an episode, `offsets` are the next ones by topic.
    """

    time: int = 0
    progress: int = 0
    closed: int = 0
    offsets: dict[str, int] = msgspec.field(default_factory=dict)


class Version(NamedTuple):
    """A version from the learner: decoded, ready to serve, and as it is kept."""

    parameters: Parameters
    planner: SlatePlanner
    value: bytes


class Lesson(NamedTuple):
    """What the learner made of some records of the journal; tags with their offsets, episodes with their records."""

    versions: Sequence[Version] = ()
    episodes: Sequence[tuple[Episode, bytes]] = ()
    tags: Sequence[tuple[int, Tag]] = ()


def check_runner(state: StateFolder) -> None:
    """Raise `InputError` unless the folder is new, or that of a server."""
    runner = state.meta(RUNNER)
    if runner == MOVED:
        raise InputError(f"{state.path} was taken to Kafka (adcascade topics import), and goes on there")
    if runner != SERVE and state.parameters():
        raise InputError(f"{state.path} does not hold the state of `adcascade serve`; choose another folder")


class ServeStore:
    """The state folder of a server, and its log if there is a `record`."""

    def __init__(self, state: StateFolder, record: Path | None = None) -> None:
        self._state = state
        self.position = msgspec.json.decode(state.meta(_POSITION) or b"{}", type=StorePosition)
        _, self.journal_end = state.journal_bounds()
        self._log: Recording | None = None
        if record is None:
            forget(state)
        else:
            self._log = Recording(record, state)
            if self._log.is_new:
                self._begin_log()
        self.prepare()
        self.commit(synchronise=True)

    def _begin_log(self) -> None:
        """Begin a log with what the folder has of the past: versions, and the journal that they still need."""
        for value in self._state.parameters():
            self._emit(TOPICS.parameters, version_key(decode_parameters(value).version), value)
        for offset, value in self._state.journal(0):
            self._record(Record(TOPICS.journal, ONLY_PARTITION, offset, self.position.time, None, value))

    @property
    def has_log(self) -> bool:
        """Whether a log is recorded."""
        return self._log is not None

    def sessions(self) -> Iterable[tuple[bytes, bytes]]:
        """Yield the session table."""
        return self._state.sessions()

    def next_offset(self, topic: str) -> int:
        """Give out the next offset of a topic."""
        offsets = self.position.offsets
        offset = offsets.get(topic, 0)
        offsets[topic] = offset + 1
        return offset

    # ── a transaction ────────────────────────────────────────────────────────────────────────────────────────────────

    def add_batch(self, records: Sequence[Record], emits: Emits) -> None:
        """Add the records of a batch, and what came of them."""
        for record in records:
            self._record(record)
        self.add_journal(emits.journal)
        self._state.change_sessions(emits.changelog)
        for key, value in emits.decisions:
            self._emit(TOPICS.decisions, key, value)
        for letter in emits.dead_letters:
            self._emit(TOPICS.dead_letters, letter.key, letter.value, letter.headers)

    def add_journal(self, records: Sequence[tuple[bytes | None, bytes]]) -> int:
        """Append keys and values to the journal; return the offset of the first."""
        start = self.journal_end
        self.journal_end += len(records)
        self._state.append_journal([(start + index, value) for index, (_, value) in enumerate(records)])
        for index, (key, value) in enumerate(records):
            self._record(Record(TOPICS.journal, ONLY_PARTITION, start + index, self.position.time, key, value))
        return start

    def add_lesson(self, lesson: Lesson, known: Sequence[Parameters]) -> list[tuple[int, str]]:
        """Add what was learned, given the versions that are known; return the orders that are refused, by offset."""
        for episode, value in lesson.episodes:
            if episode.window_end > self.position.closed:
                self.position.closed = episode.window_end
                self._emit(TOPICS.episodes, b"%d" % episode.version, value)
        for parameters, _, value in lesson.versions:
            known = [*known, parameters]
            self._state.put_parameters(parameters, value, kept=KEPT)
            self._state.keep_history(known)
            self._emit(TOPICS.parameters, version_key(parameters.version), value)
        return [
            (offset, f"version {tag.version} is not kept") for offset, tag in lesson.tags if not self._state.tag(tag)
        ]

    def _emit(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        offset = self.next_offset(topic)
        self._record(Record(topic, ONLY_PARTITION, offset, self.position.time, key, value), headers)

    def _record(self, record: Record, headers: Headers = ()) -> None:
        if self._log is not None:
            self._log.add(record, headers)

    def prepare(self) -> None:
        """Add the position and the lines of the log, as the last part of the transaction."""
        self._state.set_meta(_POSITION, msgspec.json.encode(self.position))
        if self._log is not None:
            self._log.keep()

    def commit(self, *, synchronise: bool) -> None:
        """Commit what is prepared, then write the log. In any thread.

        With `synchronise`, the log is on disk then, and so is the folder, also if it is not `durable`.
        """
        self._state.commit(checkpoint=synchronise and not self._state.durable)
        if self._log is not None:
            self._log.write(synchronise=synchronise)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def first_version(state: StateFolder, parameters: Parameters) -> None:
    """Make a new folder that of a server, with version 0, so that there is an answer before the learner runs."""
    state.set_meta(RUNNER, SERVE)
    state.put_parameters(parameters, encode_parameters(parameters), kept=KEPT)
    state.commit()
