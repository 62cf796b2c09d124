"""Feedback, by partition: it is checked, journaled, and joined with its session or parked until the arrival comes.

Rules that hold in this file (docs/design.md §3):

- Feedback that is valid by itself is journaled, whether or not it changed anything or fits the slate in the table.
- Feedback of a session that is not journaled leaves no fact either. Feedback without its arrival is journaled in any
  case.
- Feedback without its arrival is parked as it came, at most `MOST_PARKED` records of a session, and only while there is
  room. It is in the journal then, and is not journaled again when it is joined.
- With a secret, feedback without the token of its display is a dead letter and nothing else.
"""

from __future__ import annotations

from worker.secret import Secret
from worker.stream.batch import Batch
from worker.stream.bounds import OutputBounds
from worker.stream.encoding import feedback_document
from worker.stream.events import Feedback
from worker.stream.partitioning import PartitionSurvey
from worker.stream.reading import RecordReader
from worker.stream.session import Parked, ParkedRecord, Session
from worker.stream.table import SessionTable
from worker.stream.tokens import check_token
from worker.stream.topology import Emits, Record
from worker.stream.versions import Versions

#: Most feedback records parked for one session; a well-behaved client sends one or two per position.
MOST_PARKED = 64


class FeedbackJoin:
    """Joins feedback, which comes from `topic`, with the sessions of one partition."""

    def __init__(
        self,
        sessions: SessionTable,
        versions: Versions,
        *,
        topic: str,
        partition: int,
        reader: RecordReader,
        bounds: OutputBounds,
        secret: Secret | None,
        survey: PartitionSurvey | None,
    ) -> None:
        self._sessions = sessions
        self._versions = versions
        self._topic = topic
        self._partition = partition
        self._reader = reader
        self._bounds = bounds
        self._secret = secret
        self._survey = survey

    def take(self, record: Record, feedback: Feedback, batch: Batch) -> None:
        """Journal feedback; join it with its session, or park it."""
        session_id, touched = feedback.session_id, batch.touched
        state = self._sessions.states.get(session_id)
        session = state if type(state) is Session else None
        if not self._has_token(feedback, session):
            self._reader.reject(record, "token", "$.token is missing or does not belong to this display", batch.emits)
            return
        was_shown = session is not None and feedback.arm in session.slate
        if not was_shown and feedback.arm not in self._versions.newest_arms:
            self._reader.reject(record, "unknown-arm", "$.arm is not an arm of any version known here", batch.emits)
            return
        if session is None or session.share != 0:
            batch.facts.append(feedback_document(feedback))
        if session is None:
            self._park(record, feedback, state if type(state) is Parked else None, batch)
        elif self._apply(record, feedback, session, batch.emits):
            touched[session_id] = True
        else:
            touched.setdefault(session_id, False)

    def take_parked(self, session_id: str, session: Session, parked: Parked, emits: Emits) -> None:
        """Join feedback that was parked with its session; it is in the journal already."""
        horizon = max(self._versions.horizon, len(session.slate))
        for kept in parked.records:
            record = Record(self._topic, self._partition, kept.offset, kept.timestamp, session_id.encode(), kept.value)
            feedback = self._reader.read_parked(record, horizon, emits)
            if feedback is None:
                continue
            if not self._has_token(feedback, session):
                self._reader.reject(record, "token", "$.token belongs to another session of this id", emits)
                continue
            self._apply(record, feedback, session, emits)

    def _has_token(self, feedback: Feedback, session: Session | None) -> bool:
        if self._secret is None:
            return True
        arrived_at = check_token(
            self._secret,
            feedback.token,
            session_id=feedback.session_id,
            position=feedback.position,
            arm=feedback.arm,
        )
        return arrived_at is not None and (session is None or arrived_at == session.arrived_at)

    def _apply(self, record: Record, feedback: Feedback, session: Session, emits: Emits) -> bool:
        tally = emits.tally
        was_clicked = session.clicked
        verdict = session.apply(feedback)
        if verdict == "applied":
            tally.applied += 1
            if session.clicked and not was_clicked:
                tally.clicks[session.clicked] += 1
                tally.reward += self._versions.reward_of(feedback.arm)
            return True
        if verdict == "redundant":
            tally.redundant += 1
        elif verdict == "outside":
            tally.outside += 1
            early, late = session.arrived_at - feedback.occurred_at, feedback.occurred_at - session.deadline
            when = f"{early / 1000:,.0f} s before its arrival" if early > 0 else f"{late / 1000:,.0f} s after its end"
            tally.troubles.add("late-feedback", when)
        else:
            if verdict == "position":
                error = f"$.position is beyond the slate of {len(session.slate)}"
            else:
                error = "$.arm is not what was shown at that position"
            self._reader.reject(record, verdict, error, emits)
        return False

    def _park(self, record: Record, feedback: Feedback, parked: Parked | None, batch: Batch) -> None:
        session_id, emits, sessions = feedback.session_id, batch.emits, self._sessions
        latest = feedback.occurred_at
        if self._survey is not None:
            self._survey.check_parked(record, session_id, emits.tally.troubles)
        if parked is None:
            over = sessions.progress - sessions.parked_until(latest) - self._versions.newest.settings.lateness
            if over >= 0:
                emits.tally.late += 1  # its session is deleted
                emits.tally.troubles.add("late-feedback", f"{over / 1000:,.0f} s too late")
                return
            if sessions.room.is_full:
                emits.tally.unparked += 1
                return
            parked = sessions.await_arrival(session_id, latest)
        value = record.value or b""
        if any(kept.value == value for kept in parked.records):
            emits.tally.redundant += 1
        elif len(parked.records) >= MOST_PARKED or not self._bounds.can_park(parked, value):
            error = f"{len(parked.records)} records wait for the arrival of this session"
            self._reader.reject(record, "parked-overflow", error, emits)
            return
        elif parked.records and sessions.room.is_full:
            emits.tally.unparked += 1
        else:
            sessions.park(parked, ParkedRecord(record.offset, record.timestamp, value), latest)
            batch.touched[session_id] = True
