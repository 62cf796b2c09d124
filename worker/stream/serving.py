"""Serving, by partition: arrivals and feedback in; journal, decisions, dead letters and table changes out.

Rules that hold in this file (docs/design.md §3); those of arrivals are in `arrivals.py`, of feedback in `feedback.py`:

- Every record that is valid by itself is journaled, whether or not it changed anything, but for the sessions beyond the
  budget of learning.
- Every session that a batch touches gets its current decision once, at the end, if it is open. Same state, same bytes.
- A bad record costs one dead letter and nothing else. Nothing here raises, whatever the records.
- Values are deleted at the start of a later batch, once the acknowledged progress of the partition shows that no
  further record can concern them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.secret import Secret
from worker.stream.arrivals import Arrivals, plan_together
from worker.stream.decoding import Limits
from worker.stream.encoding import encode_decision, encode_journal
from worker.stream.events import Arrival, Feedback
from worker.stream.feedback import FeedbackJoin, slate_tokens
from worker.stream.partitioning import PartitionSurvey
from worker.stream.reading import Batch, OutputBounds, RecordReader
from worker.stream.session import Session, encode_state
from worker.stream.table import SessionRoom, SessionTable
from worker.stream.topology import Emits, Record, Tally, Topics
from worker.stream.versions import Versions


def handle_together(work: Iterable[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
    """Process records of several partitions; return the outputs of each.

    The same as one after the other, but the new sessions of all partitions are planned in one call: for few sessions,
    most of the time of a call is its set-up. All outputs have the same tally, that of the whole call.
    """
    tally = Tally()
    batches = [(serving, serving.begin(records, tally)) for serving, records in work]
    plan_together([(serving.arrivals, batch) for serving, batch in batches])
    for serving, batch in batches:
        serving.step(batch)
        _write(serving, batch, tally)
    if batches:
        batches[0][0].report_no_room(tally)
    return [batch.emits for _, batch in batches]


def _write(serving: Serving, batch: Batch, tally: Tally) -> None:
    """Encode the facts and the decisions of a batch."""
    emits, decisions = batch.emits, batch.decisions
    emits.journal += [(fact.session_id.encode(), encode_journal(fact)) for fact in batch.facts]
    pairs = [(decision.session_id.encode(), encode_decision(decision)) for decision in decisions]
    emits.decisions += serving.bounds.fitting("decisions", pairs, emits)
    tally.decisions.update((decision.mode, decision.position) for decision in decisions)


class Serving(SessionTable):
    """The sessions of one partition, and how records change them.

    Parameters
    ----------
    versions : the parameters known to this worker, shared by its partitions
    limits : limits on records from outside
    secret : key of the tokens that decisions carry and feedback must return; no tokens by default
    keep_changelog : whether the table's changes are stored
    room : room for sessions, shared by the partitions of a worker; unbounded by default
    survey : check of keys and partitions, shared by the partitions of a worker; none by default
    bounds : bounds on what is written
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
        survey: PartitionSurvey | None = None,
        bounds: OutputBounds | None = None,
    ) -> None:
        super().__init__(versions, room or SessionRoom())
        self._partition = partition
        self._secret = secret
        self._keep_changelog = keep_changelog
        self._survey = survey
        self.bounds = bounds or OutputBounds()
        self._reader = RecordReader(versions, topics.arrivals, limits or Limits(), self.bounds)
        self._feedback = FeedbackJoin(
            sessions=self,
            topic=topics.clicks,
            partition=partition,
            reader=self._reader,
            bounds=self.bounds,
            secret=secret,
            survey=survey,
        )
        self.arrivals = Arrivals(self, self._reader, self._feedback)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, records: Sequence[Record]) -> Emits:
        """Process records of this partition's arrivals and clicks."""
        return handle_together([(self, records)])[0]

    def begin(self, records: Sequence[Record], tally: Tally) -> Batch:
        """Delete what is due, and decode the records of a batch."""
        emits = Emits(tally=tally)
        self._expire(emits)
        events = self._reader.read(records, emits)
        if self._survey is not None:
            self._survey.look(records, events, emits.tally.troubles)
        return Batch(records, events, emits)

    def step(self, batch: Batch) -> None:
        """Let the events of a batch change the table; leave the facts and the decisions that follow in the batch."""
        take_feedback, take_arrival = self._feedback.take, self.arrivals.take
        for record, event in zip(batch.records, batch.events, strict=True):
            if type(event) is Feedback:
                take_feedback(record, event, batch)
            elif type(event) is Arrival:
                take_arrival(record, event, batch)
        self._decide(batch)

    def _decide(self, batch: Batch) -> None:
        table, keep_changelog, decisions = self.table, self._keep_changelog, batch.decisions
        changed_values: list[tuple[bytes, bytes]] = []
        for session_id, changed in batch.touched.items():
            state = table[session_id]
            if changed and keep_changelog:
                changed_values.append((session_id.encode(), encode_state(state)))
            # An exhausted slate needs no decision; an empty one gets mode `none`.
            if type(state) is not Session or state.clicked or 0 < len(state.slate) <= state.passed:
                continue
            decisions.append(state.decision(session_id, self.tokens(session_id, state)))
        for session_id, session in batch.unremembered.items():
            decisions.append(session.decision(session_id, self.tokens(session_id, session)))
        batch.emits.changelog += self.bounds.fitting("sessions-changelog", changed_values, batch.emits)

    def tokens(self, session_id: str, session: Session) -> tuple[str, ...] | None:
        """Return the tokens of the positions that are left; None without a secret."""
        if self._secret is None:
            return None
        return slate_tokens(
            self._secret,
            session_id=session_id,
            slate=session.slate[session.passed :],
            arrived_at=session.arrived_at,
            first=session.passed + 1,
        )

    def report_no_room(self, tally: Tally) -> None:
        """Report what was not remembered because there was no room."""
        if forgotten := tally.unremembered + tally.unparked:
            example = f"{self.room.held:,} sessions are held, and {self.room.most:,} may be"
            tally.troubles.add("too-many-sessions", example, forgotten)

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
                emits.tally.troubles.add("late-feedback", "no arrival came", len(state.records))
                if self._survey is not None:
                    self._survey.check_late(session_id, self._partition, emits.tally.troubles)

    def _lacks_feedback(self, session: Session) -> bool:
        answered = session.clicked or session.passed or not session.slate
        return not answered and self.versions.newest.settings.unanswered != "passed"
