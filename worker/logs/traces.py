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

from worker.logs.ordered import ARRIVAL, CLICK, DECISION, FACT, OPENED, Entry, OrderedLog
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
    max_ahead_ms=MOST,
    max_behind_ms=MOST,
)


@dataclass(slots=True, eq=False)
class SessionTrace:
    """The records of one session.

    arrivals : without repetitions; several if two arrivals have the same id and time. Their contexts have the columns
        of the version that their time calls for (see `TraceReader.arrivals`)
    values : the bytes of each of them
    openings : `opened` of the journal, with their entries
    decisions : with their entries
    facts, clicks : feedback of the journal, and of the clicks
    fact_offsets : the offset of each of the facts
    """

    session_id: str
    arrived_at: int
    arrivals: list[Arrival] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    openings: list[tuple[Entry, Opened]] = field(default_factory=list)
    decisions: list[tuple[Entry, Decision]] = field(default_factory=list)
    facts: list[FeedbackFact] = field(default_factory=list)
    fact_offsets: list[int] = field(default_factory=list)
    clicks: list[Feedback] = field(default_factory=list)

    @property
    def feedback(self) -> Iterator[Feedback | FeedbackFact]:
        """All feedback; most of it is in the journal and in the clicks."""
        yield from self.facts
        yield from self.clicks

    def answered(self, slate: tuple[str, ...], settings: LearningSettings) -> tuple[int, bool]:
        """Return how many displays of the slate count, and whether the last of them was clicked.

        Feedback of the journal counts or, of a session that the journal has not opened, that of the clicks.
        """
        return answered(
            slate,
            self.facts if self.openings else self.clicks,
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


class TraceReader:
    """Gather the traffic of a log into traces.

    `unreadable` receives every decision that cannot be read, and the reason. `latest` is the time of the last entry.
    """

    def __init__(
        self, log: OrderedLog, *, unreadable: Callable[[Entry, str], None] = lambda entry, reason: None
    ) -> None:
        self.latest = 0
        self._unreadable = unreadable
        self._versions = log.versions
        self._timeout = log.versions.longest("session_timeout")
        self._open: dict[str, list[SessionTrace]] = {}
        self._queue: deque[SessionTrace] = deque()  # the open traces by arrival
        self._readers: dict[int, Callable[[Entry], None]] = {
            ARRIVAL: self._read_arrival,
            OPENED: self._read_opened,
            DECISION: self._read_decision,
            CLICK: self._read_click,
            FACT: self._read_fact,
        }

    def read(self, entries: Iterable[Entry]) -> Iterator[SessionTrace]:
        """Yield the traces of entries that are in the order of time."""
        queue, timeout, readers = self._queue, self._timeout, self._readers
        for entry in entries:
            self.latest = max(self.latest, entry.time)
            while queue and queue[0].arrived_at + timeout < entry.time:
                yield self._ended(queue.popleft())
            with suppress(Rejected):
                readers[entry.kind](entry)
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

    def _decode(self, value: bytes | None, version: int) -> Arrival:
        dim, encoder = self._versions.known[version].settings.dim, self._versions.encoder(version)
        return decode_arrival(value, limits=UNLIMITED, dim=dim, timestamp=0, encoder=encoder)

    def _read_arrival(self, entry: Entry) -> None:
        newest = self._versions.newest
        if newest is None:
            return
        version = self._versions.called_for(entry.time) if self._versions.since else newest.version
        arrival = self._decode(entry.value, newest.version if version is None else version)
        trace = self._trace(arrival.session_id, arrival.occurred_at)
        if arrival not in trace.arrivals:
            trace.arrivals.append(arrival)
            trace.values.append(entry.value)

    def arrivals(self, trace: SessionTrace, version: int) -> list[Arrival]:
        """Return the arrivals of a session with contexts in the columns of a version."""
        if not self._versions.since or version not in self._versions.known:
            return trace.arrivals
        found: list[Arrival] = []
        for value in trace.values:
            with suppress(Rejected):
                found.append(self._decode(value, version))
        return found

    def candidates(self, trace: SessionTrace, version: int) -> list[Arrival]:
        """Return the possible arrivals of a session under a version: those of the log, else those of the journal."""
        if trace.arrivals:
            return self.arrivals(trace, version)
        known: list[Arrival] = []
        for _, opened in trace.openings:
            if bisect_right(self._versions.since, opened.parameters_version) == bisect_right(
                self._versions.since, version
            ):
                arrival = Arrival(
                    session_id=trace.session_id,
                    occurred_at=trace.arrived_at,
                    context=opened.context,
                    exclude=opened.exclude,
                )
                known += [arrival] if arrival not in known else []
        return known

    def _read_opened(self, entry: Entry) -> None:
        opened = decode_journal(entry.value)
        if isinstance(opened, Opened):
            self._trace(opened.session_id, opened.arrived_at).openings.append((entry, opened))

    def _read_decision(self, entry: Entry) -> None:
        try:
            decision = decode_decision(entry.value)
        except Rejected as rejected:
            self._unreadable(entry, str(rejected))
            return
        self._trace(decision.session_id, decision.arrived_at).decisions.append((entry, decision))

    def _read_click(self, entry: Entry) -> None:
        feedback = decode_feedback(entry.value, limits=UNLIMITED, horizon=MOST, timestamp=0)
        for trace in self._open.get(feedback.session_id, ()):
            trace.clicks.append(feedback)

    def _read_fact(self, entry: Entry) -> None:
        fact = decode_journal(entry.value)
        if isinstance(fact, FeedbackFact):
            for trace in self._open.get(fact.session_id, ()):
                trace.facts.append(fact)
                trace.fact_offsets.append(entry.offset)
