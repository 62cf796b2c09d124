"""Every decision of a log made again, under the version that it names.

Rules that hold in this file:

- A session's traffic is gathered until its timeout is over, in event time; then its slate is planned from the arrival
  (or, if that is not in the log, from the journal's `opened`), for many sessions at once.
- A decision at position p shows the tail of that slate from p on, and for p > 1 the log has feedback of this session
  that passed over p − 1. All fields are compared, numbers to a relative 1e-9: exponentials differ in the last bit from
  one kind of machine to another. Tokens are not: the secret is not in the log.
- `unverified` decisions cannot be judged: their version is not in the log, or, where the log begins or ends, their
  arrival or the feedback before them. In the middle of the log these are mismatches: nobody decides without an arrival.
- What the journal says was opened is checked likewise.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, Final, TypeAlias

from worker.logs.findings import Findings, Kind, Mismatch
from worker.logs.ordered import ARRIVAL, CLICK, DECISION, FACT, OPENED, UNREADABLE, Entry, ReplayLog
from worker.stream.codec import Limits, Rejected, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.contexts import pack_context
from worker.stream.events import MOST, Arrival, Decision, Feedback, FeedbackFact, Opened
from worker.stream.slates import Slate

BATCH: Final = 1024  # sessions planned at once
CLOSE: Final = 1e-9

#: What was decided was valid then, under limits that the log does not tell.
UNLIMITED: Final = Limits(
    max_record_bytes=MOST,
    max_session_id=MOST,
    max_arm_id=MOST,
    max_exclude=MOST,
    max_norm=1.7e308,
    max_ahead_ms=MOST,
)

Difference: TypeAlias = tuple[str, Any, Any]  # field, expected, found


class Trace:
    """What the log says about one session."""

    __slots__ = ("arrivals", "arrived_at", "decisions", "feedback", "openings", "session_id")

    def __init__(self, session_id: str, arrived_at: int) -> None:
        self.session_id = session_id
        self.arrived_at = arrived_at
        self.arrivals: list[Arrival] = []  # different ones; more than one if an id was used twice at one time
        self.openings: list[tuple[int, Opened]] = []
        self.decisions: list[tuple[Entry, Decision]] = []
        self.feedback: list[Feedback | FeedbackFact] = []

    @property
    def candidates(self) -> list[Arrival]:
        """The arrivals that its slate may have been planned for."""
        if self.arrivals:
            return self.arrivals
        known: list[Arrival] = []
        for _, opened in self.openings:
            arrival = Arrival(
                session_id=self.session_id,
                occurred_at=self.arrived_at,
                context=opened.context,
                exclude=opened.exclude,
            )
            if arrival not in known:
                known.append(arrival)
        return known


@dataclass(slots=True)
class Audit:
    """What came out."""

    decisions: int = 0
    sessions: int = 0
    clicks: int = 0
    revenue: float = 0.0
    stale: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    unverified: Counter[str] = field(default_factory=Counter)  # by what is not in the log


class DecisionAudit:
    """Takes the traffic of a log in the order of time and checks every session in it."""

    def __init__(self, log: ReplayLog, findings: Findings) -> None:
        self.audit = Audit()
        self._log = log
        self._findings = findings
        self._versions = log.versions
        newest = log.versions.newest
        self._dim = newest.settings.dim if newest else None
        self._timeout = log.versions.longest("session_timeout")
        self._slack = log.versions.longest("lateness")
        self._open: dict[str, list[Trace]] = {}
        self._queue: deque[Trace] = deque()  # the same by arrival
        self._ended: list[Trace] = []

    # ── gathering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, entry: Entry) -> None:
        """Take the next record."""
        queue = self._queue
        while queue and queue[0].arrived_at + self._timeout < entry.time:
            self._end(queue.popleft())
        kind = entry.kind
        if kind == DECISION:
            self._take_decision(entry)
        elif kind in (CLICK, FACT):
            self._take_feedback(entry)
        elif kind == ARRIVAL:
            self._take_arrival(entry)
        elif kind == OPENED:
            self._take_opened(entry)
        elif kind == UNREADABLE:
            self._unreadable(entry, "it is not a decision")

    def finish(self) -> Audit:
        """End every session; return what came out."""
        while self._queue:
            self._end(self._queue.popleft())
        self._check_ended()
        return self.audit

    def _trace(self, session_id: str, arrived_at: int) -> Trace:
        traces = self._open.setdefault(session_id, [])
        for trace in traces:
            if trace.arrived_at == arrived_at:
                return trace
        trace = Trace(session_id, arrived_at)
        traces.append(trace)
        self._queue.append(trace)
        return trace

    def _end(self, trace: Trace) -> None:
        traces = self._open[trace.session_id]
        if len(traces) == 1:
            del self._open[trace.session_id]
        else:
            traces.remove(trace)
        self._ended.append(trace)
        if len(self._ended) >= BATCH:
            self._check_ended()

    def _take_arrival(self, entry: Entry) -> None:
        if self._dim is None:
            return
        try:
            arrival = decode_arrival(entry.value, limits=UNLIMITED, dim=self._dim, timestamp=0)
        except Rejected:
            return
        trace = self._trace(arrival.session_id, arrival.occurred_at)
        if arrival not in trace.arrivals:
            trace.arrivals.append(arrival)

    def _take_opened(self, entry: Entry) -> None:
        try:
            opened = decode_journal(entry.value)
        except Rejected:
            return  # the learner passes over it too
        if isinstance(opened, Opened):
            self._trace(opened.session_id, opened.arrived_at).openings.append((entry.line, opened))

    def _take_decision(self, entry: Entry) -> None:
        try:
            decision = decode_decision(entry.value)
        except Rejected as rejected:
            self._unreadable(entry, str(rejected))
            return
        self._trace(decision.session_id, decision.arrived_at).decisions.append((entry, decision))

    def _take_feedback(self, entry: Entry) -> None:
        feedback: Feedback | FeedbackFact
        try:
            if entry.kind == CLICK:
                feedback = decode_feedback(entry.value, limits=UNLIMITED, horizon=MOST, timestamp=0)
            else:
                event = decode_journal(entry.value)
                if not isinstance(event, FeedbackFact):
                    return
                feedback = event
        except Rejected:
            return
        for trace in self._open.get(feedback.session_id, ()):
            trace.feedback.append(feedback)

    def _unreadable(self, entry: Entry, found: str) -> None:
        self.audit.decisions += 1
        self._findings.add(
            Mismatch(kind="decision", name="record", expected="a decision", found=found, line=entry.line)
        )

    # ── planning again ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_ended(self) -> None:
        traces, self._ended = self._ended, []
        groups: dict[int, list[tuple[Trace, Arrival]]] = {}
        known = self._versions.known
        for trace in traces:
            named = {decision.parameters_version for _, decision in trace.decisions}
            named.update(opened.parameters_version for _, opened in trace.openings)
            candidates = [arrival for arrival in trace.candidates if len(arrival.context) == self._dim]
            for version in named:
                if version in known:
                    groups.setdefault(version, []).extend((trace, arrival) for arrival in candidates)
        planned: dict[tuple[Trace, int], list[Slate]] = {}
        for version in sorted(groups):
            group = groups[version]
            arrivals = [arrival for _, arrival in group]
            contexts = [pack_context(arrival.context) for arrival in arrivals]
            slates = self._versions.planner(version).plan(arrivals, contexts)
            for (trace, _), slate in zip(group, slates, strict=True):
                planned.setdefault((trace, version), []).append(slate)
        for trace in traces:
            for entry, decision in trace.decisions:
                self._check_decision(trace, entry, decision, planned.get((trace, decision.parameters_version), ()))
            for line, opened in trace.openings:
                self._check_opened(trace, line, opened, planned.get((trace, opened.parameters_version), ()))
            self._add_up(trace, planned)

    def _check_decision(self, trace: Trace, entry: Entry, decision: Decision, slates: Sequence[Slate]) -> None:
        audit = self.audit
        audit.decisions += 1
        audit.modes[decision.mode] += 1
        version = decision.parameters_version
        if version not in self._versions.known:
            audit.unverified["version"] += 1
            return
        difference: Difference | None
        if slates:
            difference = _closest(decision_difference(decision, slate) for slate in slates)
        elif self._within_arrivals(entry):
            difference = ("arrival", "an arrival of this session at this time", "none")
        else:
            audit.unverified["arrival"] += 1
            return
        judged = self._versions.judge(version, trace.arrived_at)
        if difference is None and judged == "not in force":
            called = self._versions.called_for(trace.arrived_at)
            difference = ("parameters_version", called, version)
        if difference is None and decision.position > 1 and not self._passed(trace, decision, slates):
            if trace.arrived_at + self._timeout > self._log.last_feedback:
                audit.unverified["feedback"] += 1
                return
            difference = ("feedback", f"position {decision.position - 1} passed over", "no such feedback")
        if difference is not None:
            self._report("decision", entry.line, trace, decision.position, version, difference)
        elif judged == "stale":
            audit.stale += 1

    def _check_opened(self, trace: Trace, line: int, opened: Opened, slates: Sequence[Slate]) -> None:
        if not slates:
            return  # the version, without which nothing can be said, is not in the log
        difference = _closest(opened_difference(opened, slate) for slate in slates)
        if difference is None and all(
            opened.context != arrival.context or opened.exclude != arrival.exclude for arrival in trace.candidates
        ):
            difference = ("context", trace.candidates[0].context, opened.context)
        version = opened.parameters_version
        if difference is None and self._versions.judge(version, trace.arrived_at) == "not in force":
            difference = ("parameters_version", self._versions.called_for(trace.arrived_at), version)
        if difference is not None:
            self._report("opened", line, trace, None, version, difference)

    def _within_arrivals(self, entry: Entry) -> bool:
        """Say whether the log would hold the arrival if there had been one; its decisions are in the same partition."""
        first, last = self._log.arrivals_of.get(entry.partition, (0, -1))
        return first + self._slack <= entry.time <= last

    def _passed(self, trace: Trace, decision: Decision, slates: Sequence[Slate]) -> bool:
        """Say whether feedback of this session passed over the position before, as serving would have taken it."""
        position = decision.position - 1
        timeout = self._versions.known[decision.parameters_version].settings.session_timeout
        arms = {slate.arms[position - 1] for slate in slates if len(slate.arms) >= position}
        return any(
            not feedback.clicked
            and feedback.position == position
            and feedback.arm in arms
            and trace.arrived_at <= feedback.occurred_at <= trace.arrived_at + timeout
            for feedback in trace.feedback
        )

    def _report(
        self, kind: Kind, line: int, trace: Trace, position: int | None, version: int, difference: Difference
    ) -> None:
        name, expected, found = difference
        self._findings.add(
            Mismatch(
                kind=kind,
                name=name,
                expected=expected,
                found=found,
                line=line,
                session=trace.session_id,
                position=position,
                version=version,
            )
        )

    # ── adding up ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _add_up(self, trace: Trace, planned: dict[tuple[Trace, int], list[Slate]]) -> None:
        """Count the session, and its click and what that earned."""
        if not trace.decisions and not trace.openings:
            return  # an arrival that nobody answered
        self.audit.sessions += 1
        if not any(feedback.clicked for feedback in trace.feedback):
            return
        version = (
            trace.openings[0][1].parameters_version if trace.openings else trace.decisions[0][1].parameters_version
        )
        slates = planned.get((trace, version), ())
        shown = trace.openings[0][1].slate if trace.openings else slates[0].arms if slates else ()
        arm = clicked_arm(shown, trace, self._timeout)
        if arm is not None:
            self.audit.clicks += 1
            newest = self._versions.newest
            known = version if version in self._versions.known else newest.version if newest else None
            if known is not None:
                planner = self._versions.planner(known)
                place = planner.index.get(arm)
                self.audit.revenue += 0.0 if place is None else planner.parameters.arms[place].reward


def clicked_arm(slate: tuple[str, ...], trace: Trace, timeout: int) -> str | None:
    """Return the arm that ended the session: the first of the slate that was clicked in time."""
    positions = [
        feedback.position
        for feedback in trace.feedback
        if feedback.clicked
        and feedback.position <= len(slate)
        and slate[feedback.position - 1] == feedback.arm
        and trace.arrived_at <= feedback.occurred_at <= trace.arrived_at + timeout
    ]
    return slate[min(positions) - 1] if positions else None


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decision_difference(found: Decision, slate: Slate) -> Difference | None:
    """Return the first field in which a decision is not what the slate calls for at its position."""
    at = found.position - 1
    if not slate.arms:
        expected: tuple[Any, ...] = (1, None, (), "none", 1.0, 0.0)
    elif at >= len(slate.arms):
        return "position", f"at most {len(slate.arms)}", found.position
    else:
        propensity = 1.0 if slate.propensities is None else slate.propensities[at]
        expected = (
            found.position,
            slate.arms[at],
            slate.arms[at:],
            slate.modes[at],
            propensity,
            slate.values[at],
        )
    for name, wanted in zip(("position", "arm", "slate", "mode", "propensity", "value"), expected, strict=True):
        there = getattr(found, name)
        if there != wanted and not (isinstance(wanted, float) and isclose(there, wanted, rel_tol=CLOSE, abs_tol=1e-12)):
            return name, wanted, there
    return None


def opened_difference(found: Opened, slate: Slate) -> Difference | None:
    """Return the first field in which an opened session is not what was planned for it."""
    if found.slate != slate.arms:
        return "slate", slate.arms, found.slate
    if found.modes != slate.modes and (slate.arms or found.modes != ("none",)):
        return "modes", slate.modes, found.modes
    return None


def _closest(differences: Any) -> Difference | None:
    """Return None if one of the slates that are possible fits, else what the first lacks."""
    first: Difference | None = None
    for difference in differences:
        if difference is None:
            return None
        first = first or difference
    return first
