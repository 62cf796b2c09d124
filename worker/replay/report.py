"""The report of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from worker.logs.findings import Findings
from worker.logs.ordered import OrderedLog
from worker.stream.parameters import Parameters

Status: TypeAlias = Literal["folded", "rounded", "recorded", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionResult:
    """A version with its computed hash (`folded`, `differs`) or its recorded one (`recorded`).

    A `rounded` version was folded again with numbers that differ by rounding.
    """

    version: int
    sha256: str
    status: Status


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """The results of a replay.

    topics : records per topic, repeated lines once
    versions : all versions, recorded or made
    unverified_because : decisions that could not be checked, by what the log lacks
    stale : decisions by an older version than the one in force, which reached the worker late
    slates_recorded, slates_planned : slates taken from the log, and slates planned here, when learning is repeated
    stopped_after, stopped_by : the last version that was compared, and the reason, if later ones cannot be
    learned : newest version, when learning is repeated
    """

    mode: str
    findings: Findings = field(default_factory=Findings)
    topics: Mapping[str, int] = field(default_factory=dict)
    lines: int = 0
    bad_lines: int = 0
    first_bad: str = ""
    duplicates: int = 0
    ignored: int = 0
    first_at: int | None = None
    last_at: int | None = None
    versions: list[VersionResult] = field(default_factory=list)
    decisions: int = 0
    unverified_because: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    sessions: int = 0
    clicks: int = 0
    revenue: float = 0.0
    slates_recorded: int = 0
    slates_planned: int = 0
    stopped_after: int | None = None
    stopped_by: str | None = None
    learned: Parameters | None = None

    def stop(self, last: Parameters, reason: str) -> None:
        """Note that no version after this one can be compared."""
        self.stopped_after, self.stopped_by = last.version, reason

    @property
    def events(self) -> int:
        """Number of records of the log, repeated ones once."""
        return sum(self.topics.values())

    @property
    def mismatches(self) -> int:
        """Number of mismatches."""
        return self.findings.count

    @property
    def unverified(self) -> int:
        """Number of decisions that could not be checked."""
        return self.unverified_because.total()

    @property
    def unfolded(self) -> int:
        """Number of recorded versions that the journal of the log is not sufficient for."""
        return sum(version.status == "recorded" for version in self.versions)

    @property
    def rounded(self) -> int:
        """Number of versions that were made again with numbers that differ by rounding."""
        return sum(version.status == "rounded" for version in self.versions)

    def describe(self, log: OrderedLog) -> ReplayReport:
        """Add the facts about the log, all of which has been read; return the report."""
        self.topics, self.duplicates, self.ignored = log.counts, log.duplicates, log.others.total()
        self.decisions = log.counts["decisions"]
        self.lines, self.bad_lines, self.first_bad = log.lines, log.bad_lines, log.first_bad
        if log.first_time is not None:
            self.first_at, self.last_at = log.first_time, log.last_time
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the report in its JSON form."""
        names = [one.name for one in fields(self) if one.name not in ("findings", "first_bad", "learned")]
        if self.mode != "relearn":
            names = [name for name in names if name not in ("slates_recorded", "slates_planned")]
        names += ["events", "mismatches", "unverified", "unfolded", "rounded"]
        return {name: getattr(self, name) for name in names} | {"first_mismatches": self.findings.as_json()}
