"""The versions of the parameters in a log, and which of them an arrival called for.

Rules that hold in this file:

- A log may hold thousands of versions of half a megabyte, so their records lie in a temporary file once they are many.
- A version may be recorded several times: repeated lines, and republished from a newer position in the journal. Its
  hash must be the same.
- A worker serves an arrival by the newest version it knows among those in force (`effective_at ≤ arrived_at`). It may
  have come to know one late: then an older one served, which is `stale` and no mismatch. What it may never do is serve
  by a version that was not in force, unless that was the oldest it had, and then 7 newer ones exist
  (`worker.stream.versions`).
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any, Final, Literal

import orjson

from worker.errors import ParametersError
from worker.logs.findings import Findings, Mismatch
from worker.stream.parameters import LearningSettings, Parameters, decode_parameters
from worker.stream.slates import SlatePlanner
from worker.stream.versions import KEPT

PLANNERS: Final = 16  # versions held ready for planning
_IN_MEMORY: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Published:
    """One record of a version: its position in the journal, and where its bytes are."""

    journal_offset: int
    resume_offset: int
    start: int
    length: int


@dataclass(slots=True)
class RecordedVersion:
    """What is known of a version without reading its record again."""

    version: int
    sha256: str
    parent_sha256: str
    effective_at: int
    window_end: int | None
    settings: LearningSettings
    records: list[Published]


class RecordedVersions:
    """All versions of a log; a context manager."""

    def __init__(self, findings: Findings) -> None:
        self.known: dict[int, RecordedVersion] = {}
        self._findings = findings
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - see __exit__
        self._planners: OrderedDict[int, SlatePlanner] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        self._starts: list[int] = []
        self._newest: list[int] = []

    def __enter__(self) -> RecordedVersions:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    # ── taking in ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, value: bytes | None, *, place: tuple[int, int], line: int) -> None:
        """Take a parameters record in; `place` is its partition and offset."""
        if place in self._seen:
            return
        self._seen.add(place)
        try:
            parameters = decode_parameters(value or b"")
        except ParametersError as error:
            self._findings.add(
                Mismatch(
                    kind="version",
                    name="record",
                    expected="a version that can be read",
                    found=str(error),
                    line=line,
                    version=_number(value),
                )
            )
            return
        sha256 = orjson.loads(value or b"")["sha256"]
        there = self.known.get(parameters.version)
        if there is None:
            there = self.known[parameters.version] = RecordedVersion(
                parameters.version,
                sha256,
                parameters.parent_sha256,
                parameters.effective_at,
                parameters.window_end,
                self._shared(parameters.settings),
                [],
            )
        elif there.sha256 != sha256:
            self._findings.add(
                Mismatch(
                    kind="version",
                    name="sha256 of another record of it",
                    expected=there.sha256,
                    found=sha256,
                    line=line,
                    version=parameters.version,
                )
            )
            return
        self._keep(there, parameters, value or b"")

    def _keep(self, version: RecordedVersion, parameters: Parameters, value: bytes) -> None:
        if any(kept.journal_offset == parameters.journal_offset for kept in version.records):
            return
        start = self._file.seek(0, 2)
        self._file.write(value)
        version.records.append(Published(parameters.journal_offset, parameters.resume_offset, start, len(value)))
        version.records.sort(key=lambda kept: kept.journal_offset)

    def _shared(self, settings: LearningSettings) -> LearningSettings:
        """Return the same object for the same settings: nearly all versions have the same."""
        last = next(reversed(self.known.values()), None)
        return last.settings if last is not None and last.settings == settings else settings

    # ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, version: int, record: Published | None = None) -> Parameters:
        """Return a version from its record, by default the first that was published."""
        record = record or self.known[version].records[0]
        self._file.seek(record.start)
        return decode_parameters(self._file.read(record.length))

    def planner(self, version: int) -> SlatePlanner:
        """Return what plans under a version."""
        planner = self._planners.get(version)
        if planner is None:
            planner = self._planners[version] = SlatePlanner(self.read(version))
            if len(self._planners) > PLANNERS:
                self._planners.popitem(last=False)
        else:
            self._planners.move_to_end(version)
        return planner

    @property
    def oldest(self) -> RecordedVersion | None:
        """The lowest version of the log."""
        return self.known[min(self.known)] if self.known else None

    @property
    def newest(self) -> RecordedVersion | None:
        """The highest version of the log."""
        return self.known[max(self.known)] if self.known else None

    def longest(self, name: Literal["session_timeout", "lateness"]) -> int:
        """Return the longest time of a kind that any version was made under; the default if there is none."""
        usual: int = getattr(LearningSettings(dim=1), name)
        return max((getattr(settings, name) for settings in self._settings()), default=usual)

    def _settings(self) -> list[LearningSettings]:
        return list({id(version.settings): version.settings for version in self.known.values()}.values())

    def called_for(self, time: int) -> int | None:
        """Return the newest version of the log that was in force at a time."""
        if len(self._starts) != len(self.known):
            self._index()
        place = bisect_right(self._starts, time)
        return self._newest[place - 1] if place else None

    def _index(self) -> None:
        """Sort by `effective_at`, which does not always rise with the version: an arm may take effect later."""
        ordered = sorted((version.effective_at, number) for number, version in self.known.items())
        self._starts = [start for start, _ in ordered]
        self._newest = []
        for _, number in ordered:
            self._newest.append(max(number, self._newest[-1]) if self._newest else number)

    def judge(self, version: int, time: int) -> Literal["called for", "stale", "not in force"]:
        """Say whether an arrival of this time may be served by a version of the log."""
        if self.known[version].effective_at <= time:
            return "called for" if version == self.called_for(time) else "stale"
        return "stale" if 0 < version <= max(self.known) - KEPT + 1 else "not in force"


def _number(value: bytes | None) -> int | None:
    """Return the version that a damaged record claims to be."""
    try:
        record: Any = orjson.loads(value or b"")
        number = record["version"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None
