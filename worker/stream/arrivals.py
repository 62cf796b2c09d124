"""Arrivals, by partition: new sessions are planned, opened and journaled; arrivals that come again change nothing.

Rules that hold in this file (docs/design.md §3):

- Slates are planned at arrival, all of a batch at once, and pinned.
- Beyond the budget of learning, a share of the sessions is journaled (`chance.py`). The others are served alike, and
  leave no fact in the journal.
- Without room for more sessions, an arrival is answered with a fallback slate and not remembered: it leaves no value in
  the table and no fact in the journal. If it comes again, it may be remembered then.
- Another arrival with the id of a session in the table is a dead letter.
- Decisions, facts and table values are written together. So a worker can end when only the decision is written, and
  the next owner of the partition plans the arrival again. An arrival that was there before the takeover, and that an
  earlier owner may have planned under another version, is journaled as uncertain, whatever its share: the user may have
  seen another slate. This holds each time that it comes, also if the session is in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.stream.chance import ALL, journaled
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, Opened
from worker.stream.feedback import FeedbackJoin
from worker.stream.parameters import Parameters
from worker.stream.reading import Batch, RecordReader
from worker.stream.session import Session, brief_exclusions
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.table import SessionTable
from worker.stream.topology import Record

REUSED = "another arrival has this session_id; ids must be unique"


def plan_together(work: Sequence[tuple[Arrivals, Batch]]) -> None:
    """Plan all new sessions that there is room for, over all partitions, with one call per version."""
    groups: dict[SlatePlanner, list[tuple[Batch, Arrival]]] = {}
    for arrivals, _ in work:
        arrivals.sessions.room.claimed = 0
    for arrivals, batch in work:
        sessions = arrivals.sessions
        for arrival in arrivals.new(batch):
            if sessions.room.claim(waiting=arrival.session_id in sessions.table):
                groups.setdefault(sessions.versions.at(arrival.occurred_at), []).append((batch, arrival))
    for planner, group in groups.items():
        new = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in new]
        for (batch, arrival), context, slate in zip(group, contexts, planner.plan(new, contexts), strict=True):
            batch.planned[arrival.session_id] = (planner, context, slate)
            batch.emits.sample = context


@dataclass(slots=True)
class Arrivals:
    """Opens the sessions of one partition in its table; `feedback` joins what was parked for them."""

    sessions: SessionTable
    reader: RecordReader
    feedback: FeedbackJoin

    def new(self, batch: Batch) -> Iterable[Arrival]:
        """Return the first arrival of every new session."""
        table = self.sessions.table
        first: dict[str, Arrival] = {}
        for event in batch.events:
            if type(event) is Arrival and type(table.get(event.session_id)) is not Session:
                first.setdefault(event.session_id, event)
        return first.values()

    def take(self, record: Record, arrival: Arrival, batch: Batch) -> None:
        """Open the session of an arrival, or find it in the table; journal it if it is to be."""
        session_id = arrival.session_id
        # An earlier owner of the partition may have answered it with another slate.
        uncertain = record.offset < self.sessions.repeated_until and not self.sessions.versions.is_certain(
            arrival.occurred_at, abs(record.timestamp)
        )
        known = self.sessions.table.get(session_id)
        if type(known) is Session:
            session = known
            if (
                arrival.occurred_at != session.arrived_at
                or brief_exclusions(arrival.exclude) != session.exclude
                or pack_context(arrival.context) != session.context
            ):
                self.reader.reject(record, "session-reused", REUSED, batch.emits)
                return
            batch.emits.tally.repeated += 1
            batch.touched.setdefault(session_id, False)
        elif session_id not in batch.planned:
            self._answer_unremembered(record, arrival, batch)
            return
        else:
            session = self._open(arrival, batch, uncertain)
        if session.share == 0:
            return
        batch.emits.tally.replanned += uncertain
        batch.facts.append(
            Opened(
                session_id=session_id,
                arrived_at=session.arrived_at,
                context=arrival.context,
                slate=session.slate,
                modes=session.modes,
                exclude=arrival.exclude,
                parameters_version=session.version,
                share=session.share,
                uncertain=uncertain,
            )
        )

    def _open(self, arrival: Arrival, batch: Batch, uncertain: bool) -> Session:
        """Put a session that is planned into the table, with the feedback that waited for it."""
        session_id, emits = arrival.session_id, batch.emits
        planner, context, slate = batch.planned[session_id]
        parameters = planner.parameters
        deadline = arrival.occurred_at + parameters.settings.session_timeout
        exclude = brief_exclusions(arrival.exclude)
        session = Session(arrival.occurred_at, deadline, context, exclude, parameters.version, *slate)
        session.share = None if uncertain else _share(session_id, slate, parameters)
        parked = self.sessions.open(session_id, session)
        if (over := self.sessions.progress - deadline - parameters.settings.lateness) >= 0:
            emits.tally.troubles.add("late-arrivals", f"a session was over for {over / 1000:,.0f} s")
        emits.tally.opened += 1
        emits.tally.unjournaled += session.share == 0
        if session.values:
            emits.tally.expected_reward += session.values[0]
        batch.touched[session_id] = True
        if parked is not None:
            self.feedback.take_parked(session_id, session, parked, emits)
        return session

    def _answer_unremembered(self, record: Record, arrival: Arrival, batch: Batch) -> None:
        """Answer an arrival for which there is no room."""
        known = batch.unremembered.get(arrival.session_id)
        if known is not None and known.arrived_at != arrival.occurred_at:
            self.reader.reject(record, "session-reused", REUSED, batch.emits)
            return
        planner = self.sessions.versions.at(arrival.occurred_at)
        slate, version = planner.fallback(arrival), planner.parameters.version
        session = Session(arrival.occurred_at, arrival.occurred_at, b"", (), version, *slate)
        batch.unremembered[arrival.session_id] = session
        batch.emits.tally.unremembered += 1


def _share(session_id: str, slate: Slate, parameters: Parameters) -> float | None:
    """Return what a new session remembers of its share in the journal."""
    if parameters.shares == ALL:
        return None
    return journaled(parameters.settings.salt, session_id, parameters.shares.of_slate(slate.modes))
