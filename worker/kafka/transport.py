"""What the transport asks of the processors, and what it hands them: bytes, offsets, times. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from worker.stream.topology import DeadLetter, Emits, Record

__all__ = [
    "DeadLetter",
    "Emits",
    "Learner",
    "Lessons",
    "ParametersSink",
    "PartitionTask",
    "Ports",
    "Publication",
    "Record",
    "Report",
]


class PartitionTask(Protocol):
    """Serves one assigned partition, arrivals and clicks together. Synchronous; called from one thread only."""

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Take the contents of the session table; called once, before anything else."""

    def handle(self, records: Sequence[Record]) -> Emits:
        """Step all records. Bad input becomes a dead letter, never an exception.

        Also called with no records, after each `acknowledged`, so that a silent partition can delete what has ended.
        """

    def acknowledged(self, progress_time: int) -> None:
        """Hear that the partition's progress up to this time is durable in the journal."""

    def release(self) -> None:
        """Give the partition away: it has gone, or is read from the changelog anew; called once, at the end."""


class Publication(NamedTuple):
    """A parameters record to be published."""

    version: int
    key: bytes
    value: bytes


@dataclass(slots=True)
class Lessons:
    """What the learner made of a list of journal records. Episodes are written before the parameters."""

    episodes: list[tuple[bytes, bytes]] = field(default_factory=list)
    parameters: list[Publication] = field(default_factory=list)


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the learner's process tells its worker: a line of JSON.

    `position` is the journal offset that is folded next. After a `failure` it has ended, and would end the same way
    again.
    """

    position: int = -1
    watermark: int = 0
    episodes: tuple[msgspec.Raw, ...] = ()
    failure: str = ""


class Learner(Protocol):
    """Folds the journal, in a process of its own: a long fold must not hold up the decisions."""

    @property
    def watermark(self) -> int:
        """Up to which event time the journal is complete, 0 while that is not known."""

    @property
    def resume_offset(self) -> int:
        """Where in the journal to start reading: the oldest record still needed, 0 without any parameters."""

    def check_start(self, first: int, end: int) -> None:
        """Hear that the journal has the offsets from `first` up to `end`; raise `FailedError` if that will not do.

        May move `resume_offset`.
        """

    def begin(self) -> Lessons:
        """Return what is to be published before anything is read (version 0, when there is none)."""

    def handle(self, records: Sequence[Record]) -> Lessons:
        """Fold records that follow each other in the journal, without a gap since `resume_offset`."""


class ParametersSink(Protocol):
    """Takes every record of the parameters topic, on every worker, from its beginning and in order."""

    @property
    def version(self) -> int:
        """The highest version seen, -1 before the first."""

    def handle(self, records: Sequence[Record]) -> None:
        """Take records; bad ones are counted and left out, never raised."""

    def wants(self, publication: Publication) -> bool:
        """Return whether to write it, the topic having been read to its end just now.

        Raise `FailedError` if it contradicts what is there: two learners disagree.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The processors of one worker.

    `serve` makes the task of a partition from (partition, how many there are); `step` lets several of them handle their
    records, as if each did by itself. `heard` is told what the learner
    reports, if it sits at this worker. `progress` encodes a progress record from (partition, how many there are, time).
    `clock` tells the time in milliseconds since the epoch.
    """

    serve: Callable[[int, int], PartitionTask]
    step: Callable[[Sequence[tuple[Any, Sequence[Record]]]], Sequence[Emits]]
    parameters: ParametersSink
    heard: Callable[[Report], None]
    progress: Callable[[int, int, int], tuple[bytes | None, bytes]]
    clock: Callable[[], int]
