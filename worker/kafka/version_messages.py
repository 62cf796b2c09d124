"""What the versions process and its worker tell each other."""

from __future__ import annotations

import msgspec

from worker.kafka.shared_arrays import Part


class Republished(msgspec.Struct, frozen=True, kw_only=True):
    """Another record of a version that the worker knows: all that its hash does not cover."""

    version: int
    effective_at: int
    made_at: int
    window_end: int | None
    journal_offset: int
    resume_offset: int
    progress: dict[int, int]


class VersionsReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the versions process, as a line of JSON.

    Either a record of the topic: the arrays of its version are in a file that comes along (`parts`), `prepared` if it
    can serve, or the version is known (`again`), or it cannot be read (`error`). Or how far the topic is read:
    `position` is the offset to be read next, after everything before it was reported. Or the answer to the question
    number `asked`: the `end` of the topic. After a `failure` the process has ended.
    """

    offset: int = -1
    timestamp: int = 0
    parts: tuple[Part, ...] = ()
    prepared: bool = False
    again: Republished | None = None
    error: str = ""
    position: int = -1
    asked: int = -1
    end: int = -1
    failure: str = ""


class VersionsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to the versions process: the hashes of the versions that are `known` by number, or a question.

    The process sends a version, and then nothing until it is told what is known.
    """

    known: dict[int, str] | None = None
    asked: int = -1
