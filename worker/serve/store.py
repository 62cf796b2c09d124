"""What `adcascade serve` keeps: the state folder and the log, one transaction for each batch.

Rules that hold in this file:

- Sessions, journal, versions, episodes and the lines of the log that belong together are committed together.
- A version is kept before it serves. An episode is kept once: after a restart the learner may repeat some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from worker.embedded.runner import Outputs
from worker.errors import InputError
from worker.http.settings import HttpSettings
from worker.runtime.settings import ProcessSettings
from worker.serve.recording import Recording, forget
from worker.serve.state import StateFolder
from worker.stream.events import Episode, Tag
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, version_key

#: The names that logs have.
TOPICS: Final = Topics()
#: Names in the state folder.
MOVED: Final = "moved"
_POSITION: Final = "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(ProcessSettings):
    """The settings of a server.

    `keep` is how long the folder has the journal, `keep_record` parts of the log, in milliseconds.
    """

    folder: Path
    http: HttpSettings
    record: Path | None
    keep: int
    keep_record: int


class StorePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server stands, as the folder keeps it.

    `time` is that of the last batch, `progress` the time up to which everything is in the journal, `closed` the end of
    the last window with an episode, `offsets` are the next ones by topic.
    """

    time: int = 0
    progress: int = 0
    closed: int = 0
    offsets: dict[str, int] = msgspec.field(default_factory=dict)


class _Place(msgspec.Struct, frozen=True):
    """Where a version stands, out of its record."""

    version: int
    resume_offset: int


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


def check_not_moved(state: StateFolder) -> None:
    """Raise `InputError` if the folder was taken to Kafka."""
    if state.meta(MOVED) is not None:
        raise InputError(f"{state.path} was taken to Kafka (adcascade topics import), and goes on there")


class ServeStore(Outputs):
    """The state folder of a server, and its log if there is a `record`; `keep` as for `Recording`."""

    def __init__(self, state: StateFolder, record: Path | None = None, *, keep: int = 0) -> None:
        self._log = None if record is None else Recording(record, state, keep=keep)
        super().__init__(TOPICS, None if self._log is None else self._log.add)
        self.state = state
        self.journal_end = state.journal_bounds()[1]
        stored = msgspec.json.decode(state.meta(_POSITION) or b"{}", type=StorePosition)
        self.time, self.progress, self.closed = stored.time, stored.progress, stored.closed
        self.offsets.update({(topic, ONLY_PARTITION): offset for topic, offset in stored.offsets.items()})
        if self._log is None:
            forget(state)
        elif self._log.is_new:
            self._begin_log(self._log)
        self.prepare()
        self.commit(synchronise=True)

    def _begin_log(self, log: Recording) -> None:
        """Begin a log with what the folder has of the past: versions, and the journal that they still need."""
        needed = 0
        for value in self.state.parameters():
            place = msgspec.json.decode(value, type=_Place)  # of eight large versions, while requests wait
            needed = place.resume_offset
            self.emit(TOPICS.parameters, version_key(place.version), value)
        for offset, value in self.state.journal(needed):
            log.add(Record(TOPICS.journal, ONLY_PARTITION, offset, self.time, None, value))

    # ── a transaction ────────────────────────────────────────────────────────────────────────────────────────────────

    def add_batch(self, records: Sequence[Record], emits: Emits) -> None:
        """Add the records of a batch, and what came of them."""
        if self._log is not None:
            for record in records:
                self._log.add(record)
        self.add_journal(emits.journal)
        self.state.change_sessions(emits.changelog)
        self.add_emits(emits)

    def add_journal(
        self, records: Sequence[tuple[bytes | None, bytes]], *, time: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Append keys and values to the journal; return the values with their offsets."""
        numbered = super().add_journal(records, time=time)
        self.state.append_journal(numbered)
        return numbered

    def add_lesson(self, lesson: Lesson, known: Sequence[Parameters]) -> list[tuple[int, str]]:
        """Add what was learned, given the versions that are known; return the orders that are refused, by offset."""
        for episode, value in lesson.episodes:
            if episode.window_end > self.closed:
                self.closed = episode.window_end
                self.emit(TOPICS.episodes, b"%d" % episode.version, value)
        for parameters, _, value in lesson.versions:
            self.emit(TOPICS.parameters, version_key(parameters.version), value)
            self.state.put_parameters(parameters, value, kept=KEPT)
            known = [*known, parameters]
            self.state.keep_history(known)
        return [
            (offset, f"version {tag.version} is not kept") for offset, tag in lesson.tags if not self.state.tag(tag)
        ]

    def prepare(self) -> None:
        """Add the position and the lines of the log, as the last part of the transaction."""
        offsets = {topic: offset for (topic, _), offset in self.offsets.items()}
        position = StorePosition(time=self.time, progress=self.progress, closed=self.closed, offsets=offsets)
        self.state.set_meta(_POSITION, msgspec.json.encode(position))
        if self._log is not None:
            self._log.keep()

    def commit(self, *, synchronise: bool) -> None:
        """Commit what is prepared, then write the log. In any thread.

        With `synchronise`, the log is on disk then, and may go on in a new file.
        """
        self.state.commit()
        if self._log is None:
            return
        self._log.write(synchronise=synchronise)
        if synchronise and self._log.rotate(self.time):
            self._begin_log(self._log)
            self.prepare()
            self.state.commit()
            self._log.write(synchronise=True)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def keep_first(state: StateFolder, parameters: Parameters) -> None:
    """Keep version 0 in a new folder, so that there is an answer before the learner runs."""
    state.put_parameters(parameters, encode_parameters(parameters), kept=KEPT)
    state.commit()
