"""Recorded versions: fold them again from the journal of a log, and start learning from one of them.

Rules that hold in this file:

- The learner starts from version 0. If the first records of the journal are missing, it starts from the oldest recorded
  version that needs none of them. It starts anew after a hole in the journal.
- A version with another hash is a mismatch, and so is a recorded version that the journal does not give. If the next
  version was made from the recorded one, the learner continues from that: one wrong record is one mismatch, and one
  wrong fold does not make all later versions wrong.
- The hash of a version does not cover its figures: accounts and lift. They are compared at every position at which it
  was published, up to the first difference, which all later sums have. The learner needs the versions before it for
  this: clicks earn the prices of those. The lift rests on predictions, so it is compared on equal machines only.
- Machines round differently. With a tolerance, versions are equal if only their numbers differ, by no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from worker.console import ProgressBar
from worker.errors import InputError
from worker.logs.findings import Findings, Mismatch
from worker.logs.ordered import OrderedLog
from worker.logs.versions import PublishedVersion, RecordedVersion
from worker.replay.report import ReplayReport, Status, VersionResult
from worker.stream.accounts import NOTHING, ROWS
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import Command, Order, Progress
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.starting import started
from worker.stream.versions import KEPT, difference, keep, other_kernels
from worker.stream.windows import Watermark


class FoldAudit:
    """Fold the journal of a log, in its order, and compare the versions with the recorded ones."""

    def __init__(self, log: OrderedLog, report: ReplayReport, *, tolerance: float = 0.0) -> None:
        self._log = log
        self._versions = log.versions
        self._report = report
        self._tolerance = tolerance
        self._results: dict[int, VersionResult] = {}
        self._made_under = log.versions.made_under()
        self._learner: Learner | None = None
        self._kept: dict[int, Parameters] = {}  # the last versions of the learner
        self._started = -1  # the version that the learner started from
        self._has_figures = False  # and no difference was found yet
        self._first = 0  # the first offset after the last hole in the journal
        self._next: int | None = None  # the offset after the last record

    def run(self) -> None:
        """Fold the journal and add all versions, folded or recorded, to the report."""
        since: int | None = 0
        with self._log.stage("folding the versions again", self._log.counts["journal"]) as bar:
            while since is not None:
                since = self._fold(since, bar)
        if self._next is None:
            self._start(above=-1)  # version 0 needs no journal
        self._report_missing(self._next or 0)
        for number, recorded in self._versions.known.items():
            if number not in self._results:
                self._results[number] = VersionResult(version=number, sha256=recorded.sha256, status="recorded")
        self._report.versions = [self._results[number] for number in sorted(self._results)]

    def _fold(self, since: int, bar: ProgressBar) -> int | None:
        """Fold the journal from an offset on; return the offset to start again from, None at the end."""
        for records in self._log.journal_pieces(since):
            if records[0][0] != self._next:
                self._restart_after_hole(records[0][0])
            self._next = records[-1][0] + 1
            bar.advance(len(records))
            if self._learner is None:
                continue
            outcome = self._learner.handle(records)
            if is_lost(self._learner, outcome):
                self._start(above=self._learner.current.version)
            elif self._compare_all(outcome):
                self._learner = self._learner_from(self._kept[self._newest_kept()])
            else:
                continue
            if self._learner is not None:
                self._next = self._learner.resume_offset
                return self._next
        return None

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, *, above: int) -> None:
        """Start from the lowest version above `above` that needs no journal record before the last hole."""
        self._learner = None
        for number in self._versions.published:
            for record in self._versions.known[number].records if number > above else ():
                if record.resume_offset >= self._first:
                    self._start_from(number, record)
                    return

    def _restart_after_hole(self, end: int) -> None:
        if self._next is not None:
            self._report_missing(self._next)
            if len(self._report.journal_holes) < 10:
                self._report.journal_holes.append((self._next, end - 1))
        self._first = end
        self._start(above=self._newest_kept())

    def _start_from(self, number: int, record: PublishedVersion) -> None:
        self._started = number
        history = self._versions.read_with_history(number, record)
        # Version 0 is made from its settings and arms, unless it is given, and compared; a later version is loaded.
        self._kept = {loaded.version: loaded for loaded in history if number > 0}
        self._has_figures = history[0].version == 0 or len(history) == KEPT
        self._learner = self._learner_from(history[-1])
        if self._compare_all(self._learner.begin()):
            self._learner = self._learner_from(self._kept[number])

    def _learner_from(self, newest: Parameters) -> Learner:
        settings, arms, kept = newest.settings, newest.arms, self._kept.values()
        return Learner(settings, arms, kept, made_under=self._made_under, first=newest if is_given(newest) else None)

    def _newest_kept(self) -> int:
        return max(self._kept, default=-1)

    # ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compare_all(self, outcome: Outcome) -> bool:
        """Compare the new versions; return whether to continue from a recorded one, now the newest of `_kept`."""
        for made in outcome.versions:
            number, again = made.version, made.version == self._newest_kept()
            self._kept = keep(self._kept, made)
            recorded = self._versions.known.get(number)
            if recorded is not None and recorded.sha256 == made.sha256:
                self._compare_figures(made, recorded)
            if again:
                continue  # the same version, from a newer position
            if recorded is None:
                self._results[number] = VersionResult(version=number, sha256=made.sha256, status="folded")
            elif not self._agrees(made, recorded):
                return True
        return False

    def _agrees(self, made: Parameters, recorded: RecordedVersion) -> bool:
        """Compare one version; return False if the learner has to continue from the recorded one."""
        number, sha256 = made.version, made.sha256
        if sha256 == recorded.sha256:
            if made.effective_at != recorded.effective_at:
                self._add_mismatch(number, "effective_at", made.effective_at, recorded.effective_at)
            self._results[number] = VersionResult(version=number, sha256=sha256, status="folded")
            return True
        there = self._versions.read(number)
        status = compare(made, there, self._report.findings, self._tolerance)
        found = recorded.sha256 if status == "rounded" else sha256
        self._results[number] = VersionResult(version=number, sha256=found, status=status)
        following = self._versions.known.get(number + 1)
        if following is not None and following.parent_sha256 == sha256:
            return True
        # The recorded content, at the computed position in the journal.
        names = ("window_end", "journal_offset", "resume_offset", "progress")
        position = {name: getattr(made, name) for name in names}
        self._kept[number] = replace(there, **position)
        return False

    def _compare_figures(self, made: Parameters, recorded: RecordedVersion) -> None:
        record = next((one for one in recorded.records if one.journal_offset == made.journal_offset), None)
        if not self._has_figures or record is None:
            return
        there = self._versions.read(made.version, record)
        difference = _first_difference(made, there)
        if difference is not None and there.accounts != NOTHING:  # as in logs of releases that had none
            self._has_figures = False
            self._add_mismatch(made.version, *difference)

    def _add_mismatch(self, version: int, name: str, expected: object, found: object) -> None:
        self._report.findings.add(Mismatch("version", name, expected, found, version=version))

    def _report_missing(self, end: int) -> None:
        """Report the recorded versions that the journal before `end` should have given."""
        if self._learner is None:
            return
        for number in sorted(self._versions.known):
            recorded = self._versions.known[number]
            if number > self._started and number not in self._results and recorded.records[0].journal_offset < end:
                self._add_mismatch(number, "version", "none, by the journal", f"sha256 {recorded.sha256[:12]}…")
                self._results[number] = VersionResult(version=number, sha256=recorded.sha256, status="differs")


def _first_difference(made: Parameters, there: Parameters) -> tuple[str, object, object] | None:
    """Return a figure in which two versions differ, and its values."""
    arms = [arm.arm for arm in made.arms]
    for day in ("total", "today"):
        mine, theirs = (getattr(one.accounts, day) for one in (made, there))
        if mine.sessions != theirs.sessions:
            return f"sessions ({day})", mine.sessions, theirs.sessions
        a, b = mine.of(len(arms)), theirs.of(len(arms))
        for row, arm in np.argwhere(a != b):
            return f"{ROWS[row]} of {arms[arm]} ({day})", float(a[row, arm]), float(b[row, arm])
    if made.lift != there.lift and made.kernels == there.kernels:
        mine, theirs = (None if one.lift is None else one.lift.document() for one in (made, there))
        return "lift", mine, theirs
    return None


def is_lost(learner: Learner, outcome: Outcome) -> bool:
    """Return whether a rollback was refused because its version, available to the worker then, is missing here."""
    newest = learner.current.version
    return any(
        isinstance(refusal.order, Command)
        and refusal.order.version is not None
        and newest - KEPT < refusal.order.version <= newest
        for refusal in outcome.refusals
    )


def compare(made: Parameters, recorded: Parameters, findings: Findings, tolerance: float) -> Status:
    """Compare a version with a recorded one of another hash; the mismatch names the field that differs most."""
    name, by = difference(made, recorded)
    if by <= tolerance:
        return "rounded"
    detail = f"sha256 ({name} by up to {by:.1e})" if by < inf else f"sha256 ({name})"
    detail += other_kernels(made.kernels, recorded.kernels)
    findings.add(Mismatch("version", detail, made.sha256, recorded.sha256, version=made.version))
    return "differs"


# ── the start of learning ────────────────────────────────────────────────────────────────────────────────────────────


class Origin(NamedTuple):
    """The start of learning.

    learner : at version 0, or at a recorded version that it continues from
    made_at : offset in the recorded journal at which that version was made; it contains the orders up to there
    compared : whether learning must reproduce the recorded versions
    """

    learner: Learner
    made_at: int = -1
    compared: bool = False


class Timetable(NamedTuple):
    """The orders of the recorded journal (watermark, offset, order), and its last watermark, if it has progress.

    `opened` is the number of sessions by the start of their window, where not all were journaled.
    """

    orders: Sequence[tuple[int, int, Order]]
    end: int | None
    opened: Mapping[int, int]


def read_timetable(log: OrderedLog, settings: LearningSettings) -> Timetable:
    """Read orders and progress from the recorded journal, with the watermark of a learner under these settings."""
    watermark, span = Watermark({}), settings.window + settings.grace
    counts: dict[tuple[int, int], int] = {}  # by start of the window and partition
    orders: list[tuple[int, int, Order]] = []
    for offset, value, timestamp in log.journal_records():
        try:
            event = decode_journal(value, timestamp)
        except Rejected:
            continue
        if isinstance(event, Progress):
            watermark.advance(event, span=span)
            for start, sessions in event.opened or ():
                key = start, event.partition
                counts[key] = max(counts.get(key, 0), sessions)
        elif isinstance(event, Order):
            orders.append((watermark.time, offset, event))
    opened: Counter[int] = Counter()
    for (start, _), sessions in counts.items():
        opened[start] += sessions
    return Timetable(orders, watermark.time or watermark.reached or None, opened)


def find_origin(log: OrderedLog, *, changes: Mapping[str, Any], arms: Sequence[Arm] | None) -> Origin:
    """Return the start of learning: the oldest version of the log with `changes` to its settings.

    Learning starts from version 0 if the log has it, or if arms are given. Otherwise it continues from the oldest
    version after which all windows are complete in the log.
    """
    oldest = log.versions.oldest
    if oldest is None:
        if "dim" not in changes or arms is None:
            missing = [name for name, lacks in (("--dim", "dim" not in changes), ("--catalog", arms is None)) if lacks]
            raise InputError(
                f"the log has no parameters: give {' and '.join(missing)} "
                "(and --horizon and other settings that differ from the defaults)"
            )
        return Origin(Learner(LearningSettings(**changes), arms))
    settings = replace(oldest.settings, **changes)
    same = settings == oldest.settings
    made_under = log.versions.made_under()
    if oldest.version == 0 or arms is not None:
        first = log.versions.read(oldest.version)
        given = first.arms if arms is None else tuple(arms)
        compared = same and oldest.version == 0 and given == first.arms
        made_under = made_under if compared else {}
        zero = first if compared and is_given(first) else _changed(first, settings, given)
        return Origin(Learner(settings, given, made_under=made_under, first=zero), compared=compared)
    base = _first_complete(log)
    *before, loaded = log.versions.read_with_history(base)
    if settings.dim != loaded.settings.dim:
        raise InputError(f"--dim {settings.dim}: version {base} of the log has dim {loaded.settings.dim}")
    # The new journal begins at offset 0 and has the progress of one partition.
    reached = {0: min(loaded.progress.values())} if loaded.progress else {}
    history = [*before, replace(loaded, journal_offset=-1, resume_offset=0, progress=reached)]
    learner = Learner(settings, loaded.arms, history, made_under=made_under if same else {})
    return Origin(learner, loaded.journal_offset, same)


def is_given(first: Parameters) -> bool:
    """Return whether a version 0 is no result of its settings and arms: it has a history, or the mark of one."""
    return first.version == 0 and (first.started_from is not None or first.imported)


def _changed(first: Parameters, settings: LearningSettings, arms: Sequence[Arm]) -> Parameters:
    """Return version 0 under these settings and with these arms, from the same history if it has one."""
    if first.version or first.started_from is None:
        return replace(Parameters.first(settings, tuple(arms)), imported=first.imported)
    again = started(first, settings, arms, trust=1.0, sha256=first.started_from.sha256)
    return replace(again, started_from=first.started_from)


def _first_complete(log: OrderedLog) -> int:
    first = log.first_time or 0
    for number in log.versions.published:
        if (log.versions.known[number].window_end or 0) >= first:
            return number
    return log.versions.published[-1]
