"""Verification of a log: every version folded again (`worker.replay.versions`), every decision planned again.

Rules that hold in this file:

- A decision is planned under the version that it names: from the arrival of its session, or, if the log lacks that,
  from `opened` in the journal. Sessions are planned in batches. An imported one was planned by another system.
- A decision at position p shows the tail of that slate from p on. For p > 1 the log has feedback that passed over
  p − 1. All fields are compared, numbers to a relative 1e-9, because exponentials differ in the last bit between kinds
  of machines. Tokens are not compared: the secret is not in the log.
- A decision is `unverified` if the log lacks its version, or, at the beginning or end of the log, its arrival or the
  feedback before it. In the middle of the log, a missing arrival or feedback is a mismatch.
- `opened` in the journal is compared in the same way. An uncertain session may have several decisions for one position:
  each is compared with the plan under its own version.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isclose
from typing import Any, Final, TypeAlias

from worker.logs.findings import Kind, Mismatch, Stage, silent
from worker.logs.ordered import Entry, OrderedLog, read_log
from worker.logs.traces import SessionTrace, TraceReader
from worker.replay.report import ReplayReport
from worker.replay.versions import FoldAudit
from worker.stream.chance import ALL, journal_number
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, Decision, Opened
from worker.stream.session import answered, objection
from worker.stream.slates import Slate
from worker.stream.topology import Topics

BATCH: Final = 1024  # sessions per batch
CLOSE: Final = 1e-9

Difference: TypeAlias = tuple[str, Any, Any]  # field, expected, found
Planned: TypeAlias = dict[tuple[SessionTrace, int], list[Slate]]  # trace and version → possible slates


def verify(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool = False,
    tolerance: float = 0.0,
    stage: Stage = silent,
) -> ReplayReport:
    """Check every decision and every version of a log.

    `tolerance` is the largest relative difference between the numbers of equal versions, for logs of other machines.
    """
    report = ReplayReport(mode="verify")
    with read_log(path, report.findings, topics=topics, skip_bad=skip_bad, stage=stage) as log:
        FoldAudit(log, report, tolerance=tolerance).run()
        DecisionAudit(log, report).run()
        return report.describe(log)


class DecisionAudit:
    """Check every session of a log."""

    def __init__(self, log: OrderedLog, report: ReplayReport) -> None:
        self._log = log
        self._report = report
        self._versions = log.versions
        self._reader = TraceReader(log, unreadable=self._report_unreadable)
        self._timeout = log.versions.longest("session_timeout")
        self._slack = log.versions.longest("lateness")

    def run(self) -> None:
        """Check all sessions, in batches."""
        traces = self._reader.read(self._log.entries("planning the decisions again"))
        while batch := list(islice(traces, BATCH)):
            self._check(batch)

    def _report_unreadable(self, entry: Entry, reason: str) -> None:
        self._report.findings.add(Mismatch("decision", "record", "a decision", reason, line=entry.line))

    # ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, traces: Sequence[SessionTrace]) -> None:
        planned = self._plan(traces)
        for trace in traces:
            for entry, decision in trace.decisions:
                self._check_decision(trace, entry, decision, planned.get((trace, decision.parameters_version), ()))
            for entry, opened in trace.openings:
                self._check_opened(trace, entry.line, opened, planned.get((trace, opened.parameters_version), ()))
            self._add_up(trace, planned)

    def _plan(self, traces: Sequence[SessionTrace]) -> Planned:
        """Plan the slates of all sessions, under every version that their records name."""
        groups: dict[int, list[tuple[SessionTrace, Arrival]]] = {}
        known = self._versions.known
        for trace in traces:
            named = {decision.parameters_version for _, decision in trace.decisions if decision.mode != "imported"}
            named.update(opened.parameters_version for _, opened in trace.openings)
            for version in named:
                if version in known:
                    candidates, dim = self._reader.candidates(trace, version), known[version].settings.dim
                    fitting = [(trace, arrival) for arrival in candidates if len(arrival.context) == dim]
                    groups.setdefault(version, []).extend(fitting)
        planned: Planned = {}
        for version, group in groups.items():
            arrivals = [arrival for _, arrival in group]
            contexts = [pack_context(arrival.context) for arrival in arrivals]
            planner = self._versions.planner(version)
            # The journal does not name users: without its arrival, a session may be in either group.
            nameless = planner.parameters.settings.control_share and any(not trace.arrivals for trace, _ in group)
            for share in (None, 0.0, 1.0) if nameless else (None,):
                for (trace, _), slate in zip(group, planner.plan(arrivals, contexts, control_share=share), strict=True):
                    if share is None or not trace.arrivals:
                        planned.setdefault((trace, version), []).append(slate)
        return planned

    def _check_decision(self, trace: SessionTrace, entry: Entry, decision: Decision, slates: Sequence[Slate]) -> None:
        report, version = self._report, decision.parameters_version
        report.modes[decision.mode] += 1
        if decision.mode == "imported":
            report.unverified_because["imported"] += 1
            return
        if version not in self._versions.known:
            report.unverified_because["version"] += 1
            return
        if decision.mode == "fallback":  # perhaps because the table of sessions was full, for any plan
            fallback = self._versions.planner(version).fallback
            slates = [*slates, *(fallback(arrival) for arrival in self._reader.candidates(trace, version))]
        if slates:
            difference = self._difference(trace, version, [decision_difference(decision, slate) for slate in slates])
        elif self._within_arrivals(entry):
            difference = ("arrival", "an arrival of this session at this time", "none")
        else:
            report.unverified_because["arrival"] += 1
            return
        if difference is None and decision.position > 1 and not self._passed(trace, decision, slates):
            is_sampled = self._versions.planner(version).parameters.shares != ALL
            unjournaled = not trace.openings and is_sampled and not self._log.counts["clicks"]
            if unjournaled or trace.arrived_at + self._timeout > self._log.last_feedback:
                report.unverified_because["feedback"] += 1
                return
            difference = ("feedback", f"position {decision.position - 1} passed over", "no such feedback")
        if difference is not None:
            self._add_mismatch("decision", entry.line, trace, decision.position, version, difference)
        elif self._versions.judge(version, trace.arrived_at) == "stale":
            report.stale += 1

    def _check_opened(self, trace: SessionTrace, line: int, opened: Opened, slates: Sequence[Slate]) -> None:
        if not slates:
            return  # the log lacks its version
        version = opened.parameters_version
        difference = self._difference(trace, version, [opened_difference(opened, slate) for slate in slates])
        candidates = self._reader.candidates(trace, version)
        if difference is None and all(
            opened.context != arrival.context or opened.exclude != arrival.exclude for arrival in candidates
        ):
            difference = ("context", candidates[0].context, opened.context)
        if difference is None:
            difference = self._share_difference(opened, version)
        if difference is not None:
            self._add_mismatch("opened", line, trace, None, version, difference)

    def _difference(
        self, trace: SessionTrace, version: int, differences: Sequence[Difference | None]
    ) -> Difference | None:
        """Return the difference to the first of the possible slates, unless one fits and its version was in force."""
        if None not in differences:
            return differences[0]
        if self._versions.judge(version, trace.arrived_at) == "not in force":
            return "parameters_version", self._versions.called_for(trace.arrived_at), version
        return None

    def _share_difference(self, opened: Opened, version: int) -> Difference | None:
        """Compare the share of a journaled session with that of its plan; uncertain ones are journaled in any case."""
        if opened.uncertain:
            return None
        parameters = self._versions.planner(version).parameters
        expected = parameters.shares.of_slate(opened.modes)
        share = 1.0 if opened.share is None else opened.share
        if share != expected:
            return "share", expected, share
        if journal_number(parameters.settings.salt, opened.session_id) >= share:
            return "share", "not journaled", share
        return None

    def _within_arrivals(self, entry: Entry) -> bool:
        """Return whether the arrival of a decision must be in the log; both are in the same partition."""
        first, last = self._log.arrivals_of.get(entry.partition, (0, -1))
        return first + self._slack <= entry.time <= last

    def _passed(self, trace: SessionTrace, decision: Decision, slates: Sequence[Slate]) -> bool:
        """Return whether feedback of this session passed over the position before."""
        last = trace.arrived_at + self._versions.known[decision.parameters_version].settings.session_timeout
        return any(
            not feedback.clicked
            and feedback.position == decision.position - 1
            and objection(slate.arms, trace.arrived_at, last, feedback) is None
            for feedback in trace.feedback
            for slate in slates
        )

    def _add_mismatch(
        self, kind: Kind, line: int, trace: SessionTrace, position: int | None, version: int, difference: Difference
    ) -> None:
        mismatch = Mismatch(kind, *difference, line=line, session=trace.session_id, position=position, version=version)
        self._report.findings.add(mismatch)

    # ── adding up ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _add_up(self, trace: SessionTrace, planned: Planned) -> None:
        """Count the session, its click and the revenue."""
        if not trace.decisions and not trace.openings:
            return  # an arrival without an answer
        self._report.sessions += 1
        if not any(feedback.clicked for feedback in trace.feedback):
            return
        opened = trace.openings[0][1] if trace.openings else None
        version = (opened or trace.decisions[0][1]).parameters_version
        slates = planned.get((trace, version), ())
        slate = opened.slate if opened else slates[0].arms if slates else ()
        if not opened and trace.decisions[0][1].mode == "imported":
            slate = trace.decisions[0][1].slate
        last = trace.arrived_at + self._timeout
        shown, clicked = answered(slate, trace.feedback, whole_slate=False, first=trace.arrived_at, last=last)
        if clicked:
            self._report.clicks += 1
            newest = self._versions.newest
            known = version if version in self._versions.known else newest.version if newest else None
            if known is not None:
                planner = self._versions.planner(known)
                index = planner.index.get(slate[shown - 1])
                self._report.revenue += 0.0 if index is None else planner.parameters.arms[index].reward


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decision_difference(found: Decision, slate: Slate) -> Difference | None:
    """Return the first field in which a decision differs from its slate."""
    at = found.position - 1
    if not slate.arms:
        expected: tuple[Any, ...] = (1, None, (), "none", 1.0, 0.0)
    elif at >= len(slate.arms):
        return "position", f"at most {len(slate.arms)}", found.position
    else:
        propensity = 1.0 if slate.propensities is None else slate.propensities[at]
        expected = (found.position, slate.arms[at], slate.arms[at:], slate.modes[at], propensity, slate.values[at])
    for name, wanted in zip(("position", "arm", "slate", "mode", "propensity", "value"), expected, strict=True):
        there = getattr(found, name)
        if there != wanted and not (isinstance(wanted, float) and isclose(there, wanted, rel_tol=CLOSE, abs_tol=1e-12)):
            return name, wanted, there
    return None


def opened_difference(found: Opened, slate: Slate) -> Difference | None:
    """Return the first field in which an opened session differs from its slate."""
    if found.slate != slate.arms:
        return "slate", slate.arms, found.slate
    if found.modes != slate.modes:
        return "modes", slate.modes, found.modes
    return None
