"""Serving, by partition: arrivals and feedback in; journal, decisions, dead letters and table changes out.

Rules that hold in this file (docs/design.md §3); those of feedback are in `feedback.py`:

- Every record that is valid by itself is journaled, whether or not it changed anything.
- Every session that a batch touches gets its current decision once, at the end, if it is open. Same state, same bytes.
- A bad record costs one dead letter and nothing else. Nothing here raises, for any records.
- Values are deleted at the start of a later batch, once the acknowledged progress of the partition shows that no
  further record can concern them.

Of arrivals:

- Slates are planned at arrival, all of a batch at once, and pinned.
- Without room for more sessions, an arrival is answered with a fallback slate and not remembered: it leaves no value in
  the table and no fact in the journal. If it comes again, it may be remembered then.
- Another arrival with the id of a session in the table is a dead letter.
- Decisions, facts and table values are written together. So a worker can end when only the decision is written, and
  the next owner of the partition plans the arrival again. An arrival that was there before the takeover, and that an
  earlier owner may have planned under another version, is journaled as uncertain: the user may have seen another
  slate. This holds each time that it comes, also if the session is in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.secret import Secret
from worker.stream.contexts import pack_context, unpack_context
from worker.stream.decoding import Limits
from worker.stream.events import Arrival, Decision, Feedback, Opened, encode_event
from worker.stream.feedback import FeedbackJoin, make_token
from worker.stream.reading import Batch, RecordReader
from worker.stream.session import Session, brief_exclusions, encode_state
from worker.stream.slates import SlatePlanner
from worker.stream.table import SessionRoom, SessionTable
from worker.stream.topology import Emits, Record, Tally, Topics
from worker.stream.versions import Versions

REUSED = "another arrival has this session_id; ids must be unique"
NO_ARRIVAL = "no arrival came, or only so long before that its session was over"


def handle_together(work: Iterable[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
    """Process records of several partitions; return the outputs of each.

    The same as one after the other, but the new sessions of all partitions are planned in one call: for few sessions,
    most of the time of a call is its set-up. All outputs have the same tally, that of the whole call.
    """
    tally = Tally()
    batches = [(serving, serving.begin(records, tally)) for serving, records in work]
    plan_together(batches)
    for serving, batch in batches:
        serving.step(batch)
    if batches and (forgotten := tally.unremembered + tally.unparked):
        room = batches[0][0].room
        example = f"{room.held:,} sessions are held, and {room.most:,} may be"
        tally.troubles.add("too-many-sessions", example, forgotten)
    return [batch.emits for _, batch in batches]


def plan_together(work: Sequence[tuple[Serving, Batch]]) -> None:
    """Plan all new sessions that there is room for, over all partitions, with one call per version."""
    groups: dict[SlatePlanner, list[tuple[Batch, Arrival]]] = {}
    claimed = 0  # room for sessions that are not opened yet
    for serving, batch in work:
        for arrival in serving.new(batch):
            # A session whose feedback is parked has room already.
            if not serving.room.is_full(claimed) or arrival.session_id in serving.table:
                claimed += 1
                groups.setdefault(serving.versions.at(arrival.occurred_at), []).append((batch, arrival))
    for planner, group in groups.items():
        new = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in new]
        for (batch, arrival), context, slate in zip(group, contexts, planner.plan(new, contexts), strict=True):
            batch.planned[arrival.session_id] = (planner, context, slate)
            batch.emits.sample = context


class Serving(SessionTable):
    """The sessions of one partition, and how records change them.

    Parameters
    ----------
    versions : the parameters known to this worker, shared by its partitions
    limits : limits on records from outside
    secret : key of the tokens that decisions carry and feedback must return; no tokens by default
    keep_changelog : whether the table's changes are stored
    room : room for sessions, shared by the partitions of a worker; unbounded by default
    """

    def __init__(
        self,
        versions: Versions,
        *,
        partition: int = 0,
        topics: Topics,
        limits: Limits | None = None,
        secret: Secret | None = None,
        keep_changelog: bool = True,
        room: SessionRoom | None = None,
    ) -> None:
        super().__init__(versions, room or SessionRoom(), partition)
        self._secret = secret
        self._keep_changelog = keep_changelog
        self._reader = RecordReader(versions, topics.arrivals, limits or Limits())
        self._feedback = FeedbackJoin(sessions=self, topics=topics, reader=self._reader, secret=secret)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, records: Sequence[Record]) -> Emits:
        """Process records of this partition's arrivals and clicks."""
        return handle_together([(self, records)])[0]

    def begin(self, records: Sequence[Record], tally: Tally) -> Batch:
        """Delete what is due, and decode the records of a batch."""
        emits = Emits(tally=tally)
        self._expire(emits)
        return Batch(records, self._reader.read(records, emits), emits)

    def step(self, batch: Batch) -> None:
        """Let the events of a batch change the table, and encode the outputs that follow."""
        for record, event in zip(batch.records, batch.events, strict=True):
            if type(event) is Feedback:
                self._feedback.take(record, event, batch)
            elif type(event) is Arrival:
                self.take_arrival(record, event, batch)
        emits, decisions, changed_values = batch.emits, list[Decision](), list[tuple[bytes, bytes]]()
        for session_id, changed in batch.touched.items():
            state = self.table[session_id]
            if changed and self._keep_changelog:
                changed_values.append((session_id.encode(), encode_state(state)))
            # An exhausted slate needs no decision; an empty one gets mode `none`.
            if type(state) is not Session or state.clicked or 0 < len(state.slate) <= state.passed:
                continue
            decisions.append(state.decision(session_id, self.tokens(session_id, state)))
        for session_id, session in batch.unremembered.items():
            decisions.append(session.decision(session_id, self.tokens(session_id, session)))
        emits.journal += [(fact.session_id.encode(), encode_event(fact)) for fact in batch.facts]
        emits.changelog += self._reader.fitting("sessions-changelog", changed_values, emits)
        pairs = [(decision.session_id.encode(), encode_event(decision)) for decision in decisions]
        emits.decisions += self._reader.fitting("decisions", pairs, emits)
        emits.tally.decisions.update(decision.mode for decision in decisions)

    # ── arrivals ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def new(self, batch: Batch) -> Iterable[Arrival]:
        """Return the first arrival of every new session."""
        table = self.table
        first: dict[str, Arrival] = {}
        for event in batch.events:
            if type(event) is Arrival and type(table.get(event.session_id)) is not Session:
                first.setdefault(event.session_id, event)
        return first.values()

    def take_arrival(self, record: Record, arrival: Arrival, batch: Batch) -> None:
        """Open the session of an arrival, or find it in the table, and journal it."""
        session_id = arrival.session_id
        # An earlier owner of the partition may have answered it with another slate.
        uncertain = record.offset < self.repeated_until and not self.versions.is_certain(
            arrival.occurred_at, abs(record.timestamp)
        )
        known = self.table.get(session_id)
        if type(known) is Session:
            session, context = known, arrival.context
            if not self.versions.has_same_columns(session.version, arrival.occurred_at):
                context = unpack_context(session.context)  # of a version that came late, or is no longer kept
            if (
                arrival.occurred_at != session.arrived_at
                or brief_exclusions(arrival.exclude) != session.exclude
                or pack_context(context) != session.context
            ):
                self._reader.reject(record, "session-reused", REUSED, batch.emits)
                return
            batch.emits.tally.repeated += 1
            batch.touched.setdefault(session_id, False)
        elif session_id not in batch.planned:
            self._answer_unremembered(record, arrival, batch)
            return
        else:
            session, context = self._open(arrival, batch), arrival.context
        batch.facts.append(
            Opened(
                session_id=session_id,
                arrived_at=session.arrived_at,
                context=context,
                slate=session.slate,
                modes=session.modes,
                exclude=arrival.exclude,
                parameters_version=session.version,
                uncertain=uncertain,
            )
        )

    def _open(self, arrival: Arrival, batch: Batch) -> Session:
        """Put a session that is planned into the table, with the feedback that waited for it."""
        session_id, emits = arrival.session_id, batch.emits
        planner, context, slate = batch.planned[session_id]
        parameters = planner.parameters
        deadline = arrival.occurred_at + parameters.settings.session_timeout
        exclude = brief_exclusions(arrival.exclude)
        session = Session(arrival.occurred_at, deadline, context, exclude, parameters.version, *slate)
        parked = self.open(session_id, session)
        if (over := self.progress - deadline - parameters.settings.lateness) >= 0:
            emits.tally.troubles.add("late-arrivals", f"a session was over for {over / 1000:,.0f} s")
        emits.tally.opened += 1
        if session.values:
            emits.tally.expected_reward += session.values[0]
        batch.touched[session_id] = True
        if parked is not None:
            self._feedback.take_parked(session_id, session, parked, emits)
        return session

    def _answer_unremembered(self, record: Record, arrival: Arrival, batch: Batch) -> None:
        """Answer an arrival for which there is no room."""
        known = batch.unremembered.get(arrival.session_id)
        if known is not None and known.arrived_at != arrival.occurred_at:
            self._reader.reject(record, "session-reused", REUSED, batch.emits)
            return
        planner = self.versions.at(arrival.occurred_at)
        slate, version = planner.fallback(arrival), planner.parameters.version
        session = Session(arrival.occurred_at, arrival.occurred_at, b"", (), version, *slate)
        batch.unremembered[arrival.session_id] = session
        batch.emits.tally.unremembered += 1

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def tokens(self, session_id: str, session: Session) -> tuple[str, ...] | None:
        """Return the tokens of the positions that are left; None without a secret."""
        if self._secret is None:
            return None
        return tuple(
            make_token(self._secret, session_id=session_id, position=position, arm=arm, arrived_at=session.arrived_at)
            for position, arm in enumerate(session.slate[session.passed :], start=session.passed + 1)
        )

    # ── expiry ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _expire(self, emits: Emits) -> None:
        # Deleted here, so that each is reported once, and not again after the next restart.
        if not self.has_due:
            return
        emits.changelog += [(key, None) for key in self.delete_damaged()]
        for session_id, state in self.delete_due():
            if self._keep_changelog:
                emits.changelog.append((session_id.encode(), None))
            if isinstance(state, Session):
                emits.tally.ended[state.ending] += 1
                if self._lacks_feedback(state):
                    emits.tally.troubles.add("unanswered", "")
            else:
                emits.tally.late += len(state.records)
                emits.tally.troubles.add("late-feedback", NO_ARRIVAL, len(state.records))

    def _lacks_feedback(self, session: Session) -> bool:
        answered = session.clicked or session.passed or not session.slate
        return not answered and self.versions.newest.settings.unanswered != "passed"
