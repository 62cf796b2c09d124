"""Recorded versions: fold them again from the journal of a log, and start learning from one of them.

Rules that hold in this file:

- The learner starts from version 0. If the first records of the journal are missing, it starts from the oldest recorded
  version that needs none of them.
- A version with another hash is a mismatch, and so is a recorded version that the journal does not give. All later
  versions follow from it, so none is compared after the first mismatch, nor after a hole in the journal.
- The hash of a version does not cover its figures: accounts and lift. They are compared at every position at which it
  was published, up to the first difference, which all later sums have. The learner needs the versions before it for
  this: clicks earn the prices of those. The lift rests on predictions, so it is compared on equal machines only.
- Machines round differently. With a tolerance, versions are equal if only their numbers differ, by no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from worker.console import ProgressBar, progress
from worker.errors import InputError
from worker.logs.findings import Mismatch
from worker.logs.ordered import OrderedLog
from worker.logs.versions import RecordedVersion
from worker.replay.report import ReplayReport, Status, VersionResult
from worker.stream.accounts import ROWS
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import Command, Order, Progress
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.starting import started
from worker.stream.versions import KEPT, difference, other_kernels
from worker.stream.windows import Watermark


class FoldAudit:
    """Fold the journal of a log, in its order, and compare the versions with the recorded ones."""

    def __init__(self, log: OrderedLog, report: ReplayReport, *, tolerance: float = 0.0) -> None:
        self._log = log
        self._versions = log.versions
        self._report = report
        self._tolerance = tolerance
        self._results: dict[int, VersionResult] = {}
        self._has_figures = False  # and no difference was found yet

    def run(self) -> None:
        """Fold the journal and add all versions, folded or recorded, to the report."""
        with progress("folding the versions again", self._log.counts["journal"], unit="records") as bar:
            self._fold(bar)
        for number, recorded in self._versions.known.items():
            if number not in self._results:
                self._results[number] = VersionResult(version=number, sha256=recorded.sha256, status="recorded")
        self._report.versions = [self._results[number] for number in sorted(self._results)]

    def _fold(self, bar: ProgressBar) -> None:
        end = next((offset for offset, *_ in self._log.journal_records()), 0)
        learner = self._start(end)
        if learner is None:
            return
        for records in self._log.journal_pieces():
            if self._report.stopped_by is None and records[0][0] != end:
                self._report.stop(learner.current, f"offsets {end} to {records[0][0] - 1} missing in the journal")
            if self._report.stopped_by is not None:
                return
            outcome = learner.handle(records)
            if is_lost(learner, outcome):
                self._report.stop(learner.current, LOST)
            else:
                self._compare_all(outcome)
            end = records[-1][0] + 1
            bar.advance(len(records))
        if self._report.stopped_by is not None:
            return
        following = self._versions.known.get(learner.current.version + 1)
        if following is not None and following.records[0].journal_offset < end:
            self._add_mismatch(following.version, "version", "none, by the journal", f"sha256 {following.sha256[:12]}…")

    def _start(self, first: int) -> Learner | None:
        """Start from the lowest version that needs no journal record before the first one; None if there is none."""
        for number in self._versions.published:
            for record in self._versions.known[number].records:
                if record.resume_offset >= first:
                    history = self._versions.read_with_history(number, record)
                    newest, made_under = history[-1], self._versions.made_under()
                    self._has_figures = history[0].version == 0 or len(history) == KEPT
                    # Version 0 is made from its settings and arms, unless it is given; a later version is loaded.
                    given = newest if is_given(newest) else None
                    known = history if number else ()
                    learner = Learner(newest.settings, newest.arms, known, made_under=made_under, first=given)
                    self._compare_all(learner.begin())
                    return learner
        return None

    # ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compare_all(self, outcome: Outcome) -> None:
        """Compare the new versions, up to the first that differs."""
        for made in outcome.versions:
            number, recorded = made.version, self._versions.known.get(made.version)
            if recorded is not None and recorded.sha256 == made.sha256:
                self._compare_figures(made, recorded)
            if number in self._results:
                continue  # the same version, from a newer position
            status: Status = "folded"
            if recorded is not None and recorded.sha256 != made.sha256:
                there = self._versions.read(number)
                status = compare(made, there, self._report, self._tolerance)
            elif recorded is not None and made.effective_at != recorded.effective_at:
                self._add_mismatch(number, "effective_at", made.effective_at, recorded.effective_at)
            sha256 = recorded.sha256 if recorded is not None and status == "rounded" else made.sha256
            self._results[number] = VersionResult(version=number, sha256=sha256, status=status)
            if status == "differs":
                return

    def _compare_figures(self, made: Parameters, recorded: RecordedVersion) -> None:
        record = next((one for one in recorded.records if one.journal_offset == made.journal_offset), None)
        if not self._has_figures or record is None:
            return
        found = next(_other_figures(made, self._versions.read(made.version, record)), None)
        if found is not None:
            self._has_figures = False
            self._add_mismatch(made.version, *found)

    def _add_mismatch(self, version: int, name: str, expected: object, found: object) -> None:
        self._report.findings.add(Mismatch("version", name, expected, found, version=version))


def _other_figures(made: Parameters, there: Parameters) -> Iterator[tuple[str, object, object]]:
    """Yield the figures in which two versions differ, and their values."""
    arms = [arm.arm for arm in made.arms]
    for day in ("total", "today"):
        mine, theirs = (getattr(one.accounts, day) for one in (made, there))
        if mine.sessions != theirs.sessions:
            yield f"sessions ({day})", mine.sessions, theirs.sessions
        a, b = mine.of(len(arms)), theirs.of(len(arms))
        for row, arm in np.argwhere(a != b):
            yield f"{ROWS[row]} of {arms[arm]} ({day})", float(a[row, arm]), float(b[row, arm])
    if made.lift != there.lift and made.kernels == there.kernels:
        mine, theirs = (None if one.lift is None else one.lift.document() for one in (made, there))
        yield "lift", mine, theirs


#: Why versions after a rollback cannot be compared; the worker had its version then.
LOST: Final = "a rollback to a version that is not in the log"


def is_lost(learner: Learner, outcome: Outcome) -> bool:
    """Return whether a rollback was refused because its version, available to the worker then, is missing here."""
    newest = learner.current.version
    return any(
        isinstance(refusal.order, Command)
        and refusal.order.version is not None
        and newest - KEPT < refusal.order.version <= newest
        for refusal in outcome.refusals
    )


def compare(made: Parameters, recorded: Parameters, report: ReplayReport, tolerance: float) -> Status:
    """Compare a version with a recorded one of another hash, the last one if they differ beyond rounding.

    The mismatch names the field that differs most.
    """
    name, by = difference(made, recorded)
    if by <= tolerance:
        return "rounded"
    detail = f"sha256 ({name} by up to {by:.1e})" if by < inf else f"sha256 ({name})"
    detail += other_kernels(made.kernels, recorded.kernels)
    report.findings.add(Mismatch("version", detail, made.sha256, recorded.sha256, version=made.version))
    report.stop(made, "the mismatch")
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


def read_timetable(log: OrderedLog, settings: LearningSettings) -> tuple[Sequence[tuple[int, int, Order]], int | None]:
    """Return the orders of the recorded journal (watermark, offset, order), and its last watermark, if it has progress.

    The watermark is that of a learner under these settings.
    """
    watermark, span = Watermark({}), settings.window + settings.grace
    orders: list[tuple[int, int, Order]] = []
    for offset, value, timestamp in log.journal_records():
        try:
            event = decode_journal(value, timestamp)
        except Rejected:
            continue
        if isinstance(event, Progress):
            watermark.advance(event, span=span)
        elif isinstance(event, Order):
            orders.append((watermark.time, offset, event))
    return orders, watermark.time or watermark.reached or None


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
                f"the log has no parameters of this release: `replay --relearn` needs {' and '.join(missing)} "
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
