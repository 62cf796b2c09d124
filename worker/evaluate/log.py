"""From a log to its sessions: what each was opened with, and how it ended.

Rules that hold in this file:

- Sessions are those that the journal opened, with the journal's feedback; where the log has no journal, those that were
  decided, with the context of their arrival and the feedback from `clicks`. Feedback counts as it does for the learner
  (`worker.stream.windows`).
- Only sessions that are told to their end count: their timeout is over before the last record of the log. This depends
  on when they came, not on how they went, and so favours nobody.
- A session that was opened with several slates (a crash) is left out: nobody can say by which rule it was served.
- Memory: a few hundred bytes per session. The log itself may be larger.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from math import nan
from typing import Final, NamedTuple

from worker.errors import InputError
from worker.logs.format import LogReader
from worker.logs.ordered import ARRIVAL, CLICK, DECISION, OPENED, Entry, ReplayLog
from worker.logs.versions import RecordedVersions
from worker.replay.decisions import UNLIMITED
from worker.replay.replay import Stage, no_bar, ticking
from worker.stream.codec import Rejected, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.contexts import pack_context
from worker.stream.events import MOST, Decision, Feedback, FeedbackFact, Mode, Opened
from worker.stream.windows import Report, answered

#: Why a session is left out.
OPEN: Final = "not over at the end of the log"
NO_VERSION: Final = "version not in the log"
NO_SLATE: Final = "slate not in the log"
SEVERAL: Final = "opened with several slates"
FALLBACK: Final = "served by the fallback"


class Opening(NamedTuple):
    """What a session was opened with; `context` is packed."""

    version: int
    slate: tuple[str, ...]
    mode: Mode
    context: bytes
    exclude: tuple[str, ...]


class LoggedSession(NamedTuple):
    """A session from beginning to end; `propensity` is that of its first decision, nan if that is not in the log."""

    session_id: str
    arrived_at: int
    opening: Opening
    propensity: float
    answered: int
    clicked: bool

    @property
    def displayed(self) -> int:
        """How many positions were displayed: those answered, and the one at which the user left."""
        if self.clicked:
            return self.answered
        return min(self.answered + 1, len(self.opening.slate))


class _Trace:
    """What the log says about one session."""

    __slots__ = ("arrived_at", "clicks", "context", "decision", "exclude", "facts", "openings", "session_id")

    def __init__(self, session_id: str, arrived_at: int) -> None:
        self.session_id = session_id
        self.arrived_at = arrived_at
        self.context: bytes | None = None
        self.exclude: tuple[str, ...] = ()
        self.openings: set[Opening] = set()
        self.decision: Decision | None = None  # at the first position
        self.facts: list[Report] = []
        self.clicks: list[Report] = []


class SessionReader:
    """Gathers the sessions of a log, by the version that served them."""

    def __init__(self, versions: RecordedVersions) -> None:
        self.sessions: dict[int, list[LoggedSession]] = {}
        self.left_out: Counter[str] = Counter()
        self._versions = versions
        self._timeout = versions.longest("session_timeout")
        newest = versions.newest
        self._dim = newest.settings.dim if newest else 0
        self._open: dict[str, _Trace] = {}
        self._queue: deque[_Trace] = deque()
        self._latest = 0

    def take(self, entry: Entry) -> None:
        """Take the next record of the traffic, in the order of time."""
        self._latest = max(self._latest, entry.time)
        while self._queue and self._queue[0].arrived_at + self._timeout < entry.time:
            self._end(self._queue.popleft())
        with suppress(Rejected):  # a dead letter then as now
            self._note(entry)

    def finish(self) -> dict[int, list[LoggedSession]]:
        """End what is left; return the sessions by version, in the order of their arrival."""
        while self._queue:
            self._end(self._queue.popleft())
        return self.sessions

    # ── gathering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, entry: Entry) -> None:
        if entry.kind == OPENED:
            event = decode_journal(entry.value)
            if isinstance(event, Opened):
                mode: Mode = event.modes[0] if event.modes else "none"
                opening = Opening(
                    event.parameters_version, event.slate, mode, pack_context(event.context), event.exclude
                )
                self._trace(event.session_id, event.arrived_at).openings.add(opening)
        elif entry.kind == ARRIVAL:
            arrival = decode_arrival(entry.value, limits=UNLIMITED, dim=self._dim, timestamp=MOST)
            trace = self._trace(arrival.session_id, arrival.occurred_at)
            trace.context, trace.exclude = pack_context(arrival.context), arrival.exclude
        elif entry.kind == DECISION:
            decision = decode_decision(entry.value)
            if decision.position == 1:
                self._trace(decision.session_id, decision.arrived_at).decision = decision
        else:
            self._hear(entry)

    def _hear(self, entry: Entry) -> None:
        event: Feedback | FeedbackFact
        if entry.kind == CLICK:
            event = decode_feedback(entry.value, limits=UNLIMITED, horizon=MOST, timestamp=MOST)
        else:
            fact = decode_journal(entry.value)
            if not isinstance(fact, FeedbackFact):
                return
            event = fact
        trace = self._open.get(event.session_id)
        if trace is not None:
            report = Report(event.occurred_at, event.position, event.arm, event.clicked)
            (trace.clicks if entry.kind == CLICK else trace.facts).append(report)

    def _trace(self, session_id: str, arrived_at: int) -> _Trace:
        trace = self._open.get(session_id)
        if trace is None or trace.arrived_at != arrived_at:
            trace = self._open[session_id] = _Trace(session_id, arrived_at)
            self._queue.append(trace)
        return trace

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, trace: _Trace) -> None:
        if self._open.get(trace.session_id) is trace:
            del self._open[trace.session_id]
        opening = self._opening(trace)
        if isinstance(opening, str):
            self.left_out[opening] += 1
            return
        settings = self._versions.known[opening.version].settings
        until = trace.arrived_at + settings.session_timeout
        if until > self._latest:
            self.left_out[OPEN] += 1
            return
        reports = [r for r in (trace.facts if trace.openings else trace.clicks) if r.occurred_at <= until]
        shown, clicked = answered(opening.slate, reports, whole_slate=settings.unanswered == "passed")
        propensity = trace.decision.propensity if trace.decision else nan
        self.sessions.setdefault(opening.version, []).append(
            LoggedSession(trace.session_id, trace.arrived_at, opening, propensity, shown, clicked)
        )

    def _opening(self, trace: _Trace) -> Opening | str:
        """Return what a session was opened with, or why it is left out."""
        decision = trace.decision
        if len(trace.openings) > 1:
            return SEVERAL
        if trace.openings:
            (opening,) = trace.openings
        elif decision is None or trace.context is None:
            return NO_SLATE
        else:
            opening = Opening(decision.parameters_version, decision.slate, decision.mode, trace.context, trace.exclude)
        if opening.mode == "fallback":
            return FALLBACK
        known = self._versions.known.get(opening.version)
        if known is None or len(opening.context) != 8 * known.settings.dim:
            return NO_VERSION
        return opening


def read_log(path: str, log: ReplayLog, *, skip_bad: bool = False, stage: Stage = no_bar) -> LogReader:
    """Read a log into `log`; return the reader, which has counted its lines."""
    with LogReader(path, skip_bad=skip_bad) as reader, stage("reading", None) as bar:
        for line in ticking(reader, bar):
            log.take(line)
    if not log.versions.known:
        others = f" (its topics are {', '.join(sorted(log.others)[:3])}; see --prefix)" if log.others else ""
        raise InputError(
            f"{reader.name}: has no parameters{others}: without them nobody can say how sessions were served, nor how "
            "another policy would have served them"
        )
    return reader
