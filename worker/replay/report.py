"""The report of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from worker.errors import InputError
from worker.logs.findings import Findings, Stage
from worker.logs.format import LogReader
from worker.logs.ordered import OrderedLog

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

    counts : records per topic, repeated lines once
    versions : all versions, recorded or made
    unverified_because : decisions that could not be checked, by what the log lacks
    stale : decisions by an older version than the one in force, which reached the worker late
    holes : first and last missing offset of the first holes in the journal
    pinned, planned : slates taken from the log, and slates planned here, when learning is repeated
    lost : last version before a rollback to a version that the log lacks; None if there was no such rollback
    """

    mode: str
    findings: Findings = field(default_factory=Findings)
    counts: Mapping[str, int] = field(default_factory=dict)
    lines: int = 0
    bad: int = 0
    first_bad: str = ""
    duplicates: int = 0
    ignored: int = 0
    span: tuple[int, int] | None = None
    versions: list[VersionResult] = field(default_factory=list)
    decisions: int = 0
    unverified_because: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    sessions: int = 0
    clicks: int = 0
    revenue: float = 0.0
    holes: list[tuple[int, int]] = field(default_factory=list)
    pinned: int = 0
    planned: int = 0
    lost: int | None = None

    @property
    def events(self) -> int:
        """Number of records of the log, repeated ones once."""
        return sum(self.counts.values())

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

    def describe(self, log: OrderedLog, reader: LogReader) -> ReplayReport:
        """Add the facts about the log, all of which has been read; return the report."""
        self.counts, self.duplicates, self.ignored = log.counts, log.duplicates, log.others.total()
        self.lines, self.bad, self.first_bad = reader.lines, reader.bad, reader.first_bad
        self.span = None if log.first_time is None else (log.first_time, log.last_time)
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the report in its JSON form."""
        document: dict[str, Any] = {
            "mode": self.mode,
            "events": self.events,
            "decisions": self.decisions,
            "mismatches": self.mismatches,
            "unverified": self.unverified,
            "versions": [asdict(version) for version in self.versions],
            "unfolded": self.unfolded,
            "rounded": self.rounded,
            "stale": self.stale,
            "unverified_because": dict(self.unverified_because),
            "first_mismatches": self.findings.as_json(),
            "topics": dict(self.counts),
            "lines": self.lines,
            "bad_lines": self.bad,
            "duplicates": self.duplicates,
            "ignored": self.ignored,
            "first_at": self.span[0] if self.span else None,
            "last_at": self.span[1] if self.span else None,
            "sessions": self.sessions,
            "clicks": self.clicks,
            "revenue": self.revenue,
            "modes": dict(self.modes),
            "journal_holes": [list(hole) for hole in self.holes],
        }
        if self.mode == "relearn":
            document |= {"slates_recorded": self.pinned, "slates_planned": self.planned, "lost_after": self.lost}
        return document


def read_traffic(path: str, log: OrderedLog, *, skip_bad: bool, stage: Stage) -> LogReader:
    """Read a log; raise `InputError` if it has neither traffic nor a journal."""
    reader = log.read(path, skip_bad=skip_bad, stage=stage)
    if not any(log.counts.values()):
        topic = next(iter(log.others), None)
        if topic is None:
            raise InputError(f"{reader.name}: it has no records")
        prefix = topic.rpartition(".")[0]
        hint = f"; try --prefix {prefix}" if prefix else ""
        raise InputError(f"{reader.name}: it has no records of these topics, but of {topic}{hint}")
    return reader
