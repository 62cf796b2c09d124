"""The versions of the parameters in a log, and the version that an arrival calls for.

Rules that hold in this file:

- A log may hold thousands of versions of half a megabyte each, so their bytes are in the temporary database of the log.
- In memory are a few fields of a version, without arms and arrays. The model is decoded, and the hash checked, when a
  version is added, or where only few are needed (`checked` false) when it is read.
- A version may be recorded several times: by repeated lines, or published again from a newer position in the journal.
  Its hash must be the same.
- Versions that only the history has, which is thinned, are checked and plan decisions. Learning does not start from
  them: the settings of those in between are not known.
- A worker serves an arrival by the newest version it has among those in force (`effective_at ≤ arrived_at`). If a
  version reaches the worker late, an older one serves, which is `stale` and no mismatch. A version that was not in
  force never serves, except as the oldest one kept, and then 7 newer ones exist (`worker.stream.versions`).
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Final, Literal

import msgspec

from worker.errors import AdcascadeError
from worker.logs.findings import Findings, Mismatch
from worker.stream.feature_changes import encoder_of
from worker.stream.features import ContextEncoder, FormerFeatures
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import SETTINGS, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.version_records import VersionRecord
from worker.stream.versions import KEPT

PLANNERS: Final = 16  # planners kept in memory


_decode_record: Final = msgspec.json.Decoder(VersionRecord).decode


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """One record of a version: its position in the journal, and its row in the database."""

    journal_offset: int
    resume_offset: int
    row: int


@dataclass(slots=True, kw_only=True)
class RecordedVersion:
    """The fields of a version that are kept in memory; `published` unless only the history has it."""

    version: int
    sha256: str
    effective_at: int
    window_end: int | None
    folds: int
    settings: LearningSettings
    former: FormerFeatures | None
    records: list[PublishedVersion] = field(default_factory=list)
    published: bool = False


class RecordedVersions:
    """All versions of a log, whose bytes are in the table of records of this database."""

    def __init__(self, findings: Findings, database: sqlite3.Connection, *, checked: bool = True) -> None:
        self.known: dict[int, RecordedVersion] = {}
        self._findings = findings
        self._database = database
        self._checked = checked
        #: The planner of a version.
        self.planner = lru_cache(PLANNERS)(lambda version: SlatePlanner(self.read(version)))
        #: The revenue of a click on each arm, under a version.
        self.prices = lru_cache(64)(lambda version: {arm.arm: arm.reward for arm in self.record(version).arms})

    # ── adding ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, value: bytes | None, *, row: int, line: int, published: bool = True) -> None:
        """Add a record of the parameters or, not `published`, of their history; `row` is that of the database."""
        try:
            if self._checked:
                decode_parameters(value or b"")
            record = _decode_record(value or b"")
            settings = LearningSettings(**{name: getattr(record, name) for name in SETTINGS})
            last = next(reversed(self.known.values()), None)
            if last is not None and last.settings == settings:
                settings = last.settings  # in memory once: they may have a tagged version
        except (AdcascadeError, msgspec.DecodeError, ValueError) as error:
            if published:
                self._findings.add(Mismatch("version", "record", "a readable version", str(error), line=line))
            return
        known = self.known.setdefault(
            record.version,
            RecordedVersion(
                version=record.version,
                sha256=record.sha256,
                effective_at=record.effective_at,
                window_end=record.window_end,
                folds=record.folds,
                settings=settings,
                former=None if record.former_features is msgspec.UNSET else record.former_features,
            ),
        )
        if known.sha256 != record.sha256:
            name, number = "sha256 of another record of it", record.version
            self._findings.add(Mismatch("version", name, known.sha256, record.sha256, line=line, version=number))
            return
        known.published |= published
        if all(kept.journal_offset != record.journal_offset for kept in known.records):
            known.records.append(PublishedVersion(record.journal_offset, record.resume_offset, row))
            known.records.sort(key=lambda kept: kept.journal_offset)

    # ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, version: int, record: PublishedVersion | None = None) -> Parameters:
        """Return a version from one of its records, by default the first."""
        return decode_parameters(self._value(record or self.known[version].records[0]))

    def record(self, version: int) -> VersionRecord:
        """Return a version without its model: cheap to read."""
        return _decode_record(self._value(self.known[version].records[0]))

    def _value(self, record: PublishedVersion) -> bytes:
        (value,) = self._database.execute("SELECT value FROM records WHERE row = ?", [record.row]).fetchone()
        return bytes(value)

    def nearest(self, version: int) -> int:
        """Return a version or, if the log does not have it, the newest one before it; else the oldest one.

        >>> versions = RecordedVersions(Findings(), sqlite3.connect(""))
        >>> versions.known = dict.fromkeys((3, 7))
        >>> [versions.nearest(version) for version in (1, 3, 6, 9)]
        [3, 3, 3, 7]
        """
        if version in self.known:
            return version
        return max((known for known in self.known if known < version), default=min(self.known))

    def read_with_history(self, version: int, record: PublishedVersion | None = None) -> list[Parameters]:
        """Return a version with those before it that a learner needs, as far as the log has them, the oldest first."""
        history = [self.read(version, record)]
        while len(history) < KEPT and (before := history[0].version - 1) in self.known:
            history.insert(0, self.read(before))
        return history

    def made_under(self) -> dict[int, LearningSettings]:
        """Return the settings of every version; the first version of a gap has those of the next one."""
        settings = {number: self.known[number].settings for number in sorted(self.known)}
        for before, after in pairwise(list(settings)):
            settings.setdefault(before + 1, settings[after])
        return settings

    @property
    def published(self) -> list[int]:
        """The versions of the log, lowest first, without those that only the history has."""
        return sorted(number for number, version in self.known.items() if version.published)

    @property
    def oldest(self) -> RecordedVersion | None:
        """The lowest published version of the log."""
        return self.known[self.published[0]] if self.published else None

    @property
    def newest(self) -> RecordedVersion | None:
        """The highest version of the log."""
        return self.known[max(self.known)] if self.known else None

    def longest(self, name: Literal["session_timeout", "lateness"]) -> int:
        """Return the longest session timeout or lateness of any version; the default without versions."""
        usual: int = getattr(LearningSettings(dim=1), name)
        return max((getattr(version.settings, name) for version in self.known.values()), default=usual)

    @cached_property
    def since(self) -> tuple[int, ...]:
        """The versions from which on other features of contexts are declared, rising."""
        return tuple(sorted({one.former.since for one in self.known.values() if one.former is not None}))

    @cached_property
    def encoder(self) -> Callable[[int], ContextEncoder | None]:
        """A function of a version of the log: how its contexts are encoded."""
        return lru_cache(PLANNERS)(lambda version: encoder_of(self.known[version], self.known.values()))

    @cached_property
    def called_for(self) -> Callable[[int], int | None]:
        """A function of time: the newest version of the log that was in force then."""
        # `effective_at` does not always rise with the version: an arm may take effect later.
        ordered = sorted((version.effective_at, number) for number, version in self.known.items())
        starts = [start for start, _ in ordered]
        newest = [None, *accumulate((number for _, number in ordered), max)]
        return lambda time: newest[bisect_right(starts, time)]

    def judge(self, version: int, time: int) -> Literal["called for", "stale", "not in force"]:
        """Return whether a version of the log may serve an arrival of this time."""
        if self.known[version].effective_at <= time:
            return "called for" if version == self.called_for(time) else "stale"
        return "stale" if 0 < version <= max(self.known) - KEPT + 1 else "not in force"
