"""Session traces: all records of a log about one session.

Rules that hold in this file:

- A session is its id and its arrival time. A trace ends when the longest session timeout of the log is over, in event
  time, so memory holds the open sessions only.
- Feedback joins every open trace of its id. The feedback join (`worker.stream`) decides later whether it counts.
- Records were valid when they were served, under limits that the log does not have. So no limits apply here. Records
  that are invalid in themselves are left out, as the worker left them out; unreadable decisions are reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from worker.logs.ordered import ARRIVAL, CLICK, DECISION, Entry, OrderedLog
from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.events import MOST, Arrival, Decision, Feedback, FeedbackFact, Mode, Opened
from worker.stream.session import answered
from worker.stream.settings import LearningSettings

UNLIMITED: Final = Limits(
    max_record_bytes=MOST,
    max_session_id=MOST,
    max_arm_id=MOST,
    max_exclude=MOST,
    max_norm=1.7e308,
    max_ahead=MOST,
    max_behind=MOST,
)


@dataclass(slots=True, eq=False)
class SessionTrace:
    """The records of one session, each with its entry.

    arrivals : the entries of arrivals; several if two have the same id and time, or if one was sent again
    openings : `opened` of the journal
    decisions : of the worker, or of another system
    facts, clicks : feedback of the journal, and of the clicks
    contexts : the arrivals that were decoded so far, by the features that were declared (`TraceReader.arrivals`)
    """

    session_id: str
    arrived_at: int
    arrivals: list[Entry] = field(default_factory=list)
    openings: list[tuple[Entry, Opened]] = field(default_factory=list)
    decisions: list[tuple[Entry, Decision]] = field(default_factory=list)
    facts: list[tuple[Entry, FeedbackFact]] = field(default_factory=list)
    clicks: list[tuple[Entry, Feedback]] = field(default_factory=list)
    contexts: dict[int, list[Arrival]] = field(default_factory=dict)

    @property
    def feedback(self) -> Iterator[Feedback | FeedbackFact]:
        """All feedback; most of it is in the journal and in the clicks."""
        yield from (fact for _, fact in self.facts)
        yield from (click for _, click in self.clicks)

    @property
    def slates(self) -> list[Opened | Decision]:
        """The records with its slate, or the rest of it: of the journal first."""
        return [*(opened for _, opened in self.openings), *(decision for _, decision in self.decisions)]

    @property
    def first_decision(self) -> Decision | None:
        """The decision for the first position, which has the whole slate."""
        return next((decision for _, decision in reversed(self.decisions) if decision.position == 1), None)

    def answered(self, slate: tuple[str, ...], settings: LearningSettings) -> tuple[int, bool]:
        """Return how many displays of the slate count, and whether the last of them was clicked.

        Feedback of the journal counts or, of a session that the journal has not opened, that of the clicks.
        """
        return answered(
            slate,
            (one for _, one in (self.facts if self.openings else self.clicks)),
            whole_slate=settings.unanswered == "passed",
            first=self.arrived_at,
            last=self.arrived_at + settings.session_timeout,
        )


def opening(arrival: Arrival, slate: tuple[str, ...], modes: tuple[Mode, ...], version: int) -> Opened:
    """Return the fact that the journal would have of a session: its arrival, and the slate that a version gave it."""
    return Opened(
        session_id=arrival.session_id,
        arrived_at=arrival.occurred_at,
        context=arrival.context,
        slate=slate,
        modes=modes,
        exclude=arrival.exclude,
        parameters_version=version,
    )


def opened_by(arrival: Arrival, decision: Decision) -> Opened:
    """Return the same for the first decision of a session; its mode stands for those of all positions."""
    modes = (decision.mode,) * len(decision.slate)
    return opening(arrival, decision.slate, modes, decision.parameters_version)


def arrival_of(opened: Opened) -> Arrival:
    """Return the arrival that the journal has opened a session by; it does not name the user."""
    return Arrival(
        session_id=opened.session_id, occurred_at=opened.arrived_at, context=opened.context, exclude=opened.exclude
    )


class _ArrivalId(msgspec.Struct, gc=False):
    session_id: str


_decode_id: Final = msgspec.json.Decoder(_ArrivalId).decode


class TraceReader:
    """Gather the traffic of a log into traces, which end after the longest session timeout or this one.

    `unreadable` receives every decision that cannot be read, and the reason. `latest` is the time of the last entry.
    """

    def __init__(
        self,
        log: OrderedLog,
        *,
        timeout: int = 0,
        unreadable: Callable[[Entry, str], None] = lambda entry, reason: None,
    ) -> None:
        self.latest = 0
        self._unreadable = unreadable
        self._versions = log.versions
        self._timeout = max(timeout, log.versions.longest("session_timeout"))
        self._open: dict[str, list[SessionTrace]] = {}
        self._queue: deque[SessionTrace] = deque()  # the open traces by arrival

    def read(self, entries: Iterable[Entry]) -> Iterator[SessionTrace]:
        """Yield the traces of entries that are in the order of time."""
        queue, timeout = self._queue, self._timeout
        for entry in entries:
            self.latest = max(self.latest, entry.time)
            while queue and queue[0].arrived_at + timeout < entry.time:
                yield self._ended(queue.popleft())
            with suppress(Rejected, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._take(entry)
        while queue:
            yield self._ended(queue.popleft())

    def _ended(self, trace: SessionTrace) -> SessionTrace:
        traces = self._open[trace.session_id]
        traces.remove(trace)
        if not traces:
            del self._open[trace.session_id]
        return trace

    def _trace(self, session_id: str, arrived_at: int) -> SessionTrace:
        traces = self._open.setdefault(session_id, [])
        for trace in traces:
            if trace.arrived_at == arrived_at:
                return trace
        traces.append(SessionTrace(session_id, arrived_at))
        self._queue.append(traces[-1])
        return traces[-1]

    def arrivals(self, trace: SessionTrace, version: int) -> list[Arrival]:
        """Return the possible arrivals of a session, with contexts in the columns of a version.

        They are those of the log or, if it has none, those of the journal.
        """
        newest = self._versions.newest
        if newest is None:
            return []
        known = self._versions.known.get(version, newest)
        declared = bisect_right(self._versions.since, known.version)
        if declared not in trace.contexts:
            settings, encoder = known.settings, self._versions.encoder(known.version)
            found = list[Arrival]()
            for entry in trace.arrivals:
                with suppress(Rejected):
                    found.append(decode_arrival(entry.value, settings, limits=UNLIMITED, timestamp=0, encoder=encoder))
            for _, opened in () if found else trace.openings:
                if bisect_right(self._versions.since, opened.parameters_version) == declared:
                    found.append(arrival_of(opened))
            trace.contexts[declared] = list(dict.fromkeys(one for one in found if len(one.context) == settings.dim))
        return trace.contexts[declared]

    def openings(self, trace: SessionTrace) -> list[Opened]:
        """Return how a session was opened: by the journal, or else by its first decision and its arrival."""
        decision, known = trace.first_decision, [opened for _, opened in trace.openings]
        if known or decision is None:
            return known
        return [opened_by(arrival, decision) for arrival in self.arrivals(trace, decision.parameters_version)[-1:]]

    def _take(self, entry: Entry) -> None:
        """Add an entry to the traces that it is about."""
        if entry.kind == ARRIVAL:
            self._trace(_decode_id(entry.value).session_id, entry.time).arrivals.append(entry)
        elif entry.kind == DECISION:
            try:
                decision = decode_decision(entry.value)
            except Rejected as rejected:
                self._unreadable(entry, str(rejected))
                return
            self._trace(decision.session_id, decision.arrived_at).decisions.append((entry, decision))
        elif entry.kind == CLICK:
            feedback = decode_feedback(entry.value, limits=UNLIMITED, horizon=MOST, timestamp=0)
            for trace in self._open.get(feedback.session_id, ()):
                trace.clicks.append((entry, feedback))
        elif isinstance(fact := decode_journal(entry.value), Opened):
            self._trace(fact.session_id, fact.arrived_at).openings.append((entry, fact))
        elif isinstance(fact, FeedbackFact):
            for trace in self._open.get(fact.session_id, ()):
                trace.facts.append((entry, fact))
