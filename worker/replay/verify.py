"""Verification of a log: every version folded again (`worker.replay.versions`), every decision planned again.

Rules that hold in this file:

- A session is planned under every version that its records name: from its arrival, or, if the log lacks that, from
  `opened` in the journal. Imported sessions were planned by another system. Sessions are planned in batches.
- The journal does not name users. Without its arrival, a session may be in the control group or not: both are planned.
- A decision in mode `fallback` may have been made because the table of sessions was full, for any plan.
- All fields are compared, numbers to a relative 1e-9, because exponentials differ in the last bit between kinds of
  machines. Tokens are not compared: the secret is not in the log.
- For a decision at position p > 1 the log has feedback that passed over p − 1.
- A decision is `unverified` if the log lacks its version, or, at the beginning or end of the log, its arrival or the
  feedback before it. In the middle of the log, a missing arrival or feedback is a mismatch.
- `opened` in the journal is compared in the same way. An uncertain session may have several decisions for one position:
  each is compared with the plan under its own version.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isclose
from typing import Any, Final, NamedTuple, TypeAlias

from worker.logs.findings import Mismatch
from worker.logs.ordered import Entry, OrderedLog, read_log
from worker.logs.traces import SessionTrace, TraceReader
from worker.logs.versions import RecordedVersions
from worker.replay.report import ReplayReport
from worker.replay.versions import FoldAudit
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, Decision, Opened
from worker.stream.session import objection
from worker.stream.slates import Slate
from worker.stream.topology import Topics

BATCH: Final = 1024  # sessions per batch
CLOSE: Final = 1e-9


def verify(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool = False,
    tolerance: float = 0.0,
) -> ReplayReport:
    """Check every decision and every version of a log.

    `tolerance` is the largest relative difference between the numbers of equal versions, for logs of other machines.
    """
    report = ReplayReport(mode="verify")
    with read_log(path, report.findings, topics=topics, skip_bad=skip_bad) as log:
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
            plans = planned_again(self._versions, self._reader, batch)
            for trace in batch:
                for entry, decision in trace.decisions:
                    self._check_decision(trace, entry, decision, plans.get((trace, decision.parameters_version), ()))
                for entry, opened in trace.openings:
                    again = plans.get((trace, opened.parameters_version))  # None if the log lacks its version
                    if again and (found := self._difference(trace, opened, again)) is not None:
                        self._add_mismatch(entry, opened, found)
                self._add_up(trace)

    def _report_unreadable(self, entry: Entry, reason: str) -> None:
        self._report.findings.add(Mismatch("decision", "record", "a decision", reason, line=entry.line))

    # ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_decision(
        self, trace: SessionTrace, entry: Entry, decision: Decision, plans: Sequence[Replanned]
    ) -> None:
        report, version = self._report, decision.parameters_version
        report.modes[decision.mode] += 1
        if decision.mode == "imported":
            report.unverified_because["imported"] += 1
            return
        if version not in self._versions.known:
            report.unverified_because["version"] += 1
            return
        found: Difference | None
        if plans:
            found = self._difference(trace, decision, plans)
        elif self._within_arrivals(entry):
            found = ("arrival", "an arrival of this session at this time", "none")
        else:
            report.unverified_because["arrival"] += 1
            return
        if found is None and decision.position > 1 and not self._passed(trace, decision, plans):
            if trace.arrived_at + self._timeout > self._log.last_feedback:
                report.unverified_because["feedback"] += 1
                return
            found = ("feedback", f"position {decision.position - 1} passed over", "no such feedback")
        if found is not None:
            self._add_mismatch(entry, decision, found)
        elif self._versions.judge(version, trace.arrived_at) == "stale":
            report.stale += 1

    def _difference(
        self, trace: SessionTrace, record: Decision | Opened, plans: Sequence[Replanned]
    ) -> Difference | None:
        """Return the difference to the first of the possible plans, unless one fits and its version was in force."""
        differences, version = [difference(record, plan) for plan in plans], record.parameters_version
        if None not in differences:
            return differences[0]
        if self._versions.judge(version, trace.arrived_at) == "not in force":
            return "parameters_version", self._versions.called_for(trace.arrived_at), version
        return None

    def _within_arrivals(self, entry: Entry) -> bool:
        """Return whether the arrival of a decision must be in the log; both are in the same partition."""
        first, last = self._log.arrivals_of.get(entry.partition, (0, -1))
        return first + self._slack <= entry.time <= last

    def _passed(self, trace: SessionTrace, decision: Decision, plans: Sequence[Replanned]) -> bool:
        """Return whether feedback of this session passed over the position before."""
        last = trace.arrived_at + self._versions.known[decision.parameters_version].settings.session_timeout
        return any(
            not feedback.clicked
            and feedback.position == decision.position - 1
            and objection(plan.slate.arms, trace.arrived_at, last, feedback) is None
            for feedback in trace.feedback
            for plan in plans
        )

    def _add_mismatch(self, entry: Entry, record: Decision | Opened, found: Difference) -> None:
        self._report.findings.add(
            Mismatch(
                "opened" if isinstance(record, Opened) else "decision",
                *found,
                line=entry.line,
                session=record.session_id,
                position=None if isinstance(record, Opened) else record.position,
                version=record.parameters_version,
            )
        )

    def _add_up(self, trace: SessionTrace) -> None:
        """Count the session, its click and the revenue."""
        if not trace.slates:
            return  # an arrival without an answer
        self._report.sessions += 1
        if not self._versions.known:
            return
        served = max(trace.slates, key=lambda record: len(record.slate))
        version = self._versions.nearest(served.parameters_version)
        shown, clicked = trace.answered(served.slate, self._versions.known[version].settings)
        if clicked:
            self._report.clicks += 1
            self._report.revenue += self._versions.prices(version).get(served.slate[shown - 1], 0.0)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Difference: TypeAlias = tuple[str, Any, Any]  # field, expected, found


class Replanned(NamedTuple):
    """A slate that an arrival may have been given."""

    arrival: Arrival
    slate: Slate


#: The possible plans by trace and version.
Plans: TypeAlias = dict[tuple[SessionTrace, int], list[Replanned]]


def planned_again(versions: RecordedVersions, reader: TraceReader, traces: Sequence[SessionTrace]) -> Plans:
    """Plan sessions under every version of the log that their records name."""
    groups: dict[int, list[tuple[SessionTrace, Arrival]]] = {}
    for trace in traces:
        named = {decision.parameters_version for _, decision in trace.decisions if decision.mode != "imported"}
        named.update(opened.parameters_version for _, opened in trace.openings)
        for version in named & versions.known.keys():
            groups.setdefault(version, []).extend((trace, one) for one in reader.arrivals(trace, version))
    plans: Plans = {}
    for version, group in groups.items():
        arrivals = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in arrivals]
        planner = versions.planner(version)
        nameless = planner.parameters.settings.control_share and any(not trace.arrivals for trace, _ in group)
        for share in (None, 0.0, 1.0) if nameless else (None,):
            slates = planner.plan(arrivals, contexts, control_share=share)
            for (trace, arrival), slate in zip(group, slates, strict=True):
                if share is None or not trace.arrivals:
                    plans.setdefault((trace, version), []).append(Replanned(arrival, slate))
        for trace, arrival in group:
            if any(decision.mode == "fallback" for _, decision in trace.decisions):
                plans[trace, version].append(Replanned(arrival, planner.fallback(arrival)))
    return plans


def difference(record: Decision | Opened, plan: Replanned) -> Difference | None:
    """Return the first field in which a record differs from a plan, with the planned value and its own.

    A decision at position p shows the tail of the slate from p on.
    """
    arrival, slate = plan
    expected: dict[str, Any]
    if isinstance(record, Opened):
        expected = {
            "context": arrival.context,
            "exclude": arrival.exclude,
            "slate": slate.arms,
            "modes": slate.modes,
        }
    elif not slate.arms:
        expected = {"position": 1, "arm": None, "slate": (), "mode": "none", "propensity": 1.0, "value": 0.0}
    elif (at := record.position - 1) >= len(slate.arms):
        return "position", f"at most {len(slate.arms)}", record.position
    else:
        expected = {
            "arm": slate.arms[at],
            "slate": slate.arms[at:],
            "mode": slate.modes[at],
            "propensity": 1.0 if slate.propensities is None else slate.propensities[at],
            "value": slate.values[at],
        }
    for name, wanted in expected.items():
        found = getattr(record, name)
        is_close = isinstance(found, float) and isclose(found, wanted, rel_tol=CLOSE, abs_tol=1e-12)
        if found != wanted and not is_close:
            return name, wanted, found
    return None
