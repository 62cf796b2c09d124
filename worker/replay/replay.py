"""Replays a recorded log: the same decisions and versions come out, or it says where not.

`verify` makes every decision again under its recorded version and folds every version again from the journal; `relearn`
learns from arrivals and clicks alone. Both read the log once, sort it (`replay_log`), and then go through it in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from worker.errors import InputError
from worker.logs.findings import Findings
from worker.logs.format import LogReader
from worker.logs.ordered import ReplayLog
from worker.logs.sorting import MEMORY
from worker.replay.decisions import DecisionAudit
from worker.replay.relearn import Relearner, find_origin, read_timetable
from worker.replay.versions import FoldAudit, VersionResult
from worker.stream.parameters import Arm
from worker.stream.topology import Topics

_TICK: Final = 1000  # lines between two looks at the bar

T = TypeVar("T")


class Bar(Protocol):
    """Says how far the work is."""

    def advance(self, by: float = 1) -> None:
        """Add `by` units of finished work."""


Stage: TypeAlias = Callable[[str, float | None], AbstractContextManager[Bar]]  # what is done, and how much there is


class _NoBar:
    def advance(self, by: float = 1) -> None:
        pass


@contextmanager
def no_bar(title: str, total: float | None) -> Iterator[Bar]:
    """Show nothing."""
    yield _NoBar()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay found.

    `events` counts records, repeated lines once; `versions` all that were recorded or made; `unfolded` the recorded
    ones that the log's journal does not suffice for; `stale` decisions by an older version than the one in force,
    because that came late; `lost` is the version up to which learning again could follow the orders, if not to the end.
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
    unverified: int
    unverified_because: Mapping[str, int] = field(default_factory=dict)
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
        """Records of the log, repeated ones once."""
        return sum(self.counts.values())

    @property
    def mismatches(self) -> int:
        """How much did not come out as it was recorded."""
        return self.findings.count

    @property
    def unfolded(self) -> int:
        """Versions that stand in the log and could not be made again."""
        return sum(version.status == "recorded" for version in self.versions)

    def as_json(self) -> dict[str, Any]:
        """Return the report as it is written."""
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


def verify(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool = False,
    tolerance: float = 0.0,
    memory: int = MEMORY,
    stage: Stage = no_bar,
) -> Report:
    """Check every decision and every version of a log.

    Parameters
    ----------
    path : of the log, or ``-``
    tolerance : largest relative difference of a version's numbers that counts as none, for logs of other machines
    memory : bytes that sorting may hold, twice
    """
    findings = Findings()
    with ReplayLog(topics or Topics(), findings, memory=memory) as log:
        lines, bad, first_bad = _read(path, log, skip_bad, stage)
        folds = FoldAudit(log.versions, findings, tolerance=tolerance)
        with stage("folding the versions again", len(log.journal)) as bar:
            for offset, value in ticking(log.journal_records(), bar):
                folds.take(offset, value)
            versions = folds.finish()
        decisions = DecisionAudit(log, findings)
        with stage("making the decisions again", len(log.traffic)) as bar:
            for entry in ticking(log.entries(), bar):
                decisions.take(entry)
            audit = decisions.finish()
        return Report(
            mode="verify",
            **_common(log, lines, bad, first_bad, findings),
            versions=versions,
            decisions=audit.decisions,
            unverified=audit.unverified.total(),
            unverified_because=audit.unverified,
            modes=audit.modes,
            stale=audit.stale,
            sessions=audit.sessions,
            clicks=audit.clicks,
            revenue=audit.revenue,
            holes=folds.holes,
        )


def relearn(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool = False,
    tolerance: float = 0.0,
    changes: Mapping[str, Any] | None = None,
    arms: Sequence[Arm] | None = None,
    memory: int = MEMORY,
    stage: Stage = no_bar,
) -> Report:
    """Learn again from the arrivals and clicks of a log.

    Parameters
    ----------
    path : of the log, or ``-``
    tolerance : as for `verify`
    changes : settings other than those recorded, or all that are not the usual ones if none are
    arms : what can be shown at first, instead of the recorded ones
    memory : bytes that sorting may hold, twice
    """
    findings = Findings()
    with ReplayLog(topics or Topics(), findings, memory=memory) as log:
        lines, bad, first_bad = _read(path, log, skip_bad, stage)
        origin = find_origin(log, changes=dict(changes or {}), arms=arms)
        learner = Relearner(log, origin, read_timetable(log), findings, tolerance=tolerance)
        with stage("learning again", len(log.traffic)) as bar:
            for entry in ticking(log.entries(), bar):
                learner.take(entry)
            result = learner.finish()
        return Report(
            mode="relearn",
            **_common(log, lines, bad, first_bad, findings),
            versions=result.versions,
            decisions=result.decisions,
            unverified=result.unverified,
            unverified_because={"version": result.unverified} if result.unverified else {},
            sessions=result.sessions,
            clicks=result.clicks,
            revenue=result.revenue,
            pinned=result.pinned,
            planned=result.planned,
            lost=result.lost,
        )


def _read(path: str, log: ReplayLog, skip_bad: bool, stage: Stage) -> tuple[int, int, str]:
    with LogReader(path, skip_bad=skip_bad) as reader, stage("reading", None) as bar:
        for line in ticking(reader, bar):
            log.take(line)
    if not len(log.traffic) and not len(log.journal):
        raise InputError(f"{reader.name}: {_nothing(log)}")
    return reader.lines, reader.bad, reader.first_bad


def _nothing(log: ReplayLog) -> str:
    if not log.others:
        return "there is no record in it"
    topic = next(iter(log.others))
    prefix = topic.rpartition(".")[0]
    hint = f"; try --prefix {prefix}" if prefix else ""
    return f"no record of these topics, but of {topic}{hint}"


def _common(log: ReplayLog, lines: int, bad: int, first_bad: str, findings: Findings) -> dict[str, Any]:
    return {
        "counts": log.counts,
        "lines": lines,
        "bad": bad,
        "first_bad": first_bad,
        "duplicates": log.duplicates,
        "ignored": log.others.total(),
        "span": None if log.first_time is None else (log.first_time, log.last_time),
        "findings": findings,
    }


def ticking(items: Iterable[T], bar: Bar) -> Iterator[T]:
    """Yield the items, moving the bar now and then."""
    count = 0
    for item in items:
        yield item
        count += 1
        if count == _TICK:
            bar.advance(_TICK)
            count = 0
    bar.advance(count)
