"""The report of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import InputError
from worker.logs.findings import Findings
from worker.logs.format import LogReader
from worker.logs.ordered import OrderedLog
from worker.logs.stages import Stage
from worker.replay.versions import VersionResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The results of a replay.

    Parameters
    ----------
    counts : records per topic, repeated lines once
    versions : all versions, recorded or made
    stale : decisions by an older version than the one in force, which reached the worker late
    pinned, planned : slates taken from the log and slates planned here; None unless learning was repeated
    lost : last version before a rollback to a version that is not in the log; None if there was no such rollback
    """

    mode: str
    counts: Mapping[str, int]
    lines: int
    bad: int
    first_bad: str
    duplicates: int
    ignored: int
    span: tuple[int, int] | None
    findings: Findings
    versions: Sequence[VersionResult]
    decisions: int
    unverified_because: Mapping[str, int]
    modes: Mapping[str, int] = field(default_factory=dict)
    stale: int = 0
    sessions: int
    clicks: int
    revenue: float
    holes: Sequence[tuple[int, int]] = ()
    pinned: int | None = None
    planned: int | None = None
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
        return sum(self.unverified_because.values())

    @property
    def unfolded(self) -> int:
        """Number of recorded versions that the journal of the log is not sufficient for."""
        return sum(version.status == "recorded" for version in self.versions)

    def as_json(self) -> dict[str, Any]:
        """Return the report in its JSON form."""
        document: dict[str, Any] = {
            "mode": self.mode,
            "events": self.events,
            "decisions": self.decisions,
            "mismatches": self.mismatches,
            "unverified": self.unverified,
            "versions": [
                {"version": version.version, "sha256": version.sha256, "status": version.status}
                for version in self.versions
            ],
            "unfolded": self.unfolded,
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
        if self.pinned is not None:
            document |= {"slates_recorded": self.pinned, "slates_planned": self.planned, "lost_after": self.lost}
        return document


def read_traffic(path: str, log: OrderedLog, *, skip_bad: bool, stage: Stage) -> LogReader:
    """Read a log; raise `InputError` if it has neither traffic nor a journal."""
    reader = log.read(path, skip_bad=skip_bad, stage=stage)
    if not len(log.traffic) and not len(log.journal):
        topic = next(iter(log.others), None)
        if topic is None:
            raise InputError(f"{reader.name}: it has no records")
        prefix = topic.rpartition(".")[0]
        hint = f"; try --prefix {prefix}" if prefix else ""
        raise InputError(f"{reader.name}: it has no records of these topics, but of {topic}{hint}")
    return reader


def log_facts(log: OrderedLog, reader: LogReader) -> dict[str, Any]:
    """Return the fields of a report that describe the log; complete when all of it has been read."""
    return {
        "counts": log.counts,
        "lines": reader.lines,
        "bad": reader.bad,
        "first_bad": reader.first_bad,
        "duplicates": log.duplicates,
        "ignored": log.others.total(),
        "span": None if log.first_time is None else (log.first_time, log.last_time),
    }
