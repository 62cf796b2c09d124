"""Serving, by partition: arrivals and feedback in; journal, decisions, dead letters and table changes out.

Rules that hold in this file (docs/design.md §3):

- Every record that is valid by itself is journaled, whether or not it changed anything. This includes feedback that
  does not fit the slate in the table: after a crash the table may hold another slate than the user saw, and the learner
  finds out which by the answers.
- Every session that a batch touches gets its current decision once, at the end, if it is open. Same state, same bytes.
- Slates are planned at arrival, all of a batch at once, and pinned.
- A bad record costs one dead letter and nothing else. Nothing here raises, whatever the records.
- Values are deleted at the start of a later batch, once the acknowledged progress of the partition shows that no
  further record can concern them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

from worker.secret import Secret
from worker.stream.contexts import pack_context
from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.encoding import encode_many, feedback_document, opened_document
from worker.stream.events import Arrival, Feedback
from worker.stream.expiry import ExpiryQueue
from worker.stream.session import Parked, ParkedRecord, Session, State, decode_state, encode_state
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.tokens import check_token, slate_tokens
from worker.stream.topology import Emits, Record, Tally, Topics, dead_letter
from worker.stream.versions import Versions

#: Most feedback records parked for one session; a well-behaved client sends one or two per position.
MOST_PARKED = 64

_mode_and_position = itemgetter("mode", "position")

#: By session id: the planner, the packed context, and the slate.
Planned: TypeAlias = dict[str, tuple[SlatePlanner, bytes, Slate]]


def handle_together(work: Iterable[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
    """Process records of several partitions; return the outputs of each.

    The same as one after the other, but the new sessions of all partitions are planned in one call: for few sessions,
    most of the time of a call is its set-up.
    """
    batches = [serving._read(records) for serving, records in work]
    _plan(batches)
    return [batch.serving._step(batch) for batch in batches]


@dataclass(slots=True)
class _Batch:
    """Records of one partition in progress.

    `touched` maps every session concerned to whether its value has changed; `facts` are for the journal.
    """

    serving: Serving
    records: Sequence[Record]
    events: Sequence[Arrival | Feedback | None]
    emits: Emits
    planned: Planned = field(default_factory=dict)
    touched: dict[str, bool] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)


def _plan(batches: Sequence[_Batch]) -> None:
    """Plan all new sessions, with one call per version."""
    groups: dict[SlatePlanner, list[tuple[_Batch, Arrival]]] = {}
    for batch in batches:
        at = batch.serving._versions.at
        for arrival in batch.serving._new_arrivals(batch):
            groups.setdefault(at(arrival.occurred_at), []).append((batch, arrival))
    for planner, group in groups.items():
        arrivals = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in arrivals]
        for (batch, arrival), context, slate in zip(group, contexts, planner.plan(arrivals, contexts), strict=True):
            batch.planned[arrival.session_id] = (planner, context, slate)


class Serving:
    """The sessions of one partition.

    Parameters
    ----------
    versions : the parameters known to this worker, shared by its partitions
    limits : limits on records from outside
    secret : key of the tokens that decisions carry and feedback must return; no tokens by default
    keep_changelog : whether the table's changes are stored
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
    ) -> None:
        self.table: dict[str, State] = {}
        self.parked = 0  # feedback records without an arrival
        self._awaited = 0  # sessions of these records
        self._versions = versions
        self._partition = partition
        self._arrivals, self._clicks = topics.arrivals, topics.clicks
        self._limits = limits or Limits()
        self._secret = secret
        self._keep_changelog = keep_changelog
        self._progress = -1
        self._expiry = ExpiryQueue()

    @property
    def open_sessions(self) -> int:
        """The number of sessions in the table, including ended ones not yet deleted."""
        return len(self.table) - self._awaited

    # ── ownership ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> Tally:
        """Load the table of the partition."""
        tally = Tally()
        for key, value in items:
            session_id, state = key.decode(), decode_state(value)
            self.table[session_id] = state
            if type(state) is Session:
                tally.recovered += 1
                self._schedule_expiry(session_id, state.deadline)
            elif type(state) is Parked:
                tally.recovered_parked += len(state.records)
                self.parked += len(state.records)
                self._awaited += 1
                self._schedule_expiry(session_id, self._parked_until(state.latest))
        return tally

    def hand_over(self) -> Tally:
        """Drop the partition; return the counts of its table."""
        tally = Tally(handed_over=self.open_sessions, handed_over_parked=self.parked)
        self.table.clear()
        self._expiry = ExpiryQueue()
        self.parked = self._awaited = 0
        return tally

    @property
    def has_due(self) -> bool:
        """Whether the next batch, even an empty one, deletes a value."""
        return self._expiry.has_due(self._progress)

    def acknowledged(self, progress: int) -> None:
        """Note that everything up to this time is processed, journaled and acknowledged."""
        self._progress = max(self._progress, progress)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, records: Sequence[Record]) -> Emits:
        """Process records of this partition's arrivals and clicks."""
        return handle_together([(self, records)])[0]

    def _read(self, records: Sequence[Record]) -> _Batch:
        emits = Emits()
        self._expire(emits)
        return _Batch(self, records, self._decoded(records, emits), emits)

    def _step(self, batch: _Batch) -> Emits:
        for record, event in zip(batch.records, batch.events, strict=True):
            if type(event) is Feedback:
                self._handle_feedback(record, event, batch)
            elif type(event) is Arrival:
                self._handle_arrival(record, event, batch)
        self._write_facts(batch)
        self._write_decisions(batch)
        return batch.emits

    def _decoded(self, records: Sequence[Record], emits: Emits) -> list[Arrival | Feedback | None]:
        settings, limits = self._versions.newest.settings, self._limits
        dim, horizon, topic = settings.dim, settings.horizon, self._arrivals
        events: list[Arrival | Feedback | None] = []
        arrivals = 0
        for record in records:
            try:
                if record.topic == topic:
                    arrivals += 1
                    events.append(decode_arrival(record.value, limits=limits, dim=dim, timestamp=record.timestamp))
                else:
                    events.append(
                        decode_feedback(record.value, limits=limits, horizon=horizon, timestamp=record.timestamp)
                    )
            except Rejected as rejected:
                self._dead_letter(record, rejected.reason, rejected.error, emits)
                events.append(None)
        emits.tally.arrivals += arrivals
        emits.tally.feedback += len(records) - arrivals
        return events

    def _dead_letter(self, record: Record, reason: str, error: str, emits: Emits) -> None:
        emits.dead_letters.append(dead_letter(record, reason, error))
        emits.tally.dead[reason] += 1
        if record.topic == self._arrivals:
            emits.tally.dead_arrivals += 1
        else:
            emits.tally.dead_feedback += 1

    def _new_arrivals(self, batch: _Batch) -> Iterable[Arrival]:
        """Return the first arrival of every new session."""
        table = self.table
        first: dict[str, Arrival] = {}
        for event in batch.events:
            if type(event) is Arrival and type(table.get(event.session_id)) is not Session:
                first.setdefault(event.session_id, event)
        return first.values()

    def _handle_arrival(self, record: Record, arrival: Arrival, batch: _Batch) -> None:
        session_id, emits, touched = arrival.session_id, batch.emits, batch.touched
        before = self.table.get(session_id)
        if type(before) is Session:
            session = before
            if (
                arrival.occurred_at != session.arrived_at
                or arrival.exclude != session.exclude
                or pack_context(arrival.context) != session.context
            ):
                error = "another arrival has this session_id; ids must be unique"
                self._dead_letter(record, "session-reused", error, emits)
                return
            emits.tally.repeated += 1
            touched.setdefault(session_id, False)
        else:
            planner, context, slate = batch.planned[session_id]
            parameters = planner.parameters
            deadline = arrival.occurred_at + parameters.settings.session_timeout
            session = Session(arrival.occurred_at, deadline, context, arrival.exclude, parameters.version, *slate)
            self.table[session_id] = session
            self._schedule_expiry(session_id, deadline)
            emits.tally.opened += 1
            if session.values:
                emits.tally.expected_reward += session.values[0]
            touched[session_id] = True
            if type(before) is Parked:
                self._join(session_id, session, before, emits)
        batch.facts.append(
            opened_document(
                session_id,
                session.arrived_at,
                arrival.context,
                session.slate,
                session.modes,
                session.exclude,
                session.version,
            )
        )

    def _join(self, session_id: str, session: Session, parked: Parked, emits: Emits) -> None:
        """Apply feedback that was parked; it is in the journal already."""
        self.parked -= len(parked.records)
        self._awaited -= 1
        horizon = self._versions.newest.settings.horizon
        for kept in parked.records:
            record = Record(self._clicks, self._partition, kept.offset, kept.timestamp, session_id.encode(), kept.value)
            try:
                feedback = decode_feedback(
                    kept.value, limits=self._limits, horizon=max(horizon, len(session.slate)), timestamp=kept.timestamp
                )
            except Rejected as rejected:  # the limits are stricter than when it was parked
                self._dead_letter(record, rejected.reason, rejected.error, emits)
                continue
            if not self._has_token(feedback, session):
                self._dead_letter(record, "token", "$.token belongs to another session of this id", emits)
                continue
            self._apply(record, feedback, session, emits)

    def _handle_feedback(self, record: Record, feedback: Feedback, batch: _Batch) -> None:
        session_id, touched = feedback.session_id, batch.touched
        state = self.table.get(session_id)
        session = state if type(state) is Session else None
        if not self._has_token(feedback, session):
            self._dead_letter(record, "token", "$.token is missing or does not belong to this display", batch.emits)
            return
        was_shown = session is not None and feedback.arm in session.slate
        if not was_shown and feedback.arm not in self._versions.newest_arms:
            self._dead_letter(record, "unknown-arm", "$.arm is not an arm of any version known here", batch.emits)
            return
        batch.facts.append(feedback_document(feedback))
        if session is None:
            self._park(record, feedback, state if type(state) is Parked else None, batch)
        elif self._apply(record, feedback, session, batch.emits):
            touched[session_id] = True
        else:
            touched.setdefault(session_id, False)

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
        elif verdict == "position":
            self._dead_letter(record, "position", f"$.position is beyond the slate of {len(session.slate)}", emits)
        else:
            self._dead_letter(record, "arm-mismatch", "$.arm is not what was shown at that position", emits)
        return False

    def _park(self, record: Record, feedback: Feedback, parked: Parked | None, batch: _Batch) -> None:
        session_id, emits = feedback.session_id, batch.emits
        latest = feedback.occurred_at
        if parked is None:
            if self._parked_until(latest) + self._versions.newest.settings.lateness <= self._progress:
                emits.tally.late += 1  # its session is deleted
                return
            parked = Parked(latest, [])
            self.table[session_id] = parked
            self._awaited += 1
            self._schedule_expiry(session_id, self._parked_until(latest))
        value = record.value or b""
        if any(kept.value == value for kept in parked.records):
            emits.tally.redundant += 1
        elif len(parked.records) >= MOST_PARKED:
            self._dead_letter(
                record, "parked-overflow", f"{MOST_PARKED} records wait for the arrival of this session", emits
            )
            return
        else:
            parked.records.append(ParkedRecord(record.offset, record.timestamp, value))
            parked.latest = max(parked.latest, latest)
            self.parked += 1
            batch.touched[session_id] = True

    def _write_facts(self, batch: _Batch) -> None:
        keys = [fact["session_id"].encode() for fact in batch.facts]
        batch.emits.journal += zip(keys, encode_many(batch.facts), strict=True)

    def _write_decisions(self, batch: _Batch) -> None:
        table, keep_changelog = self.table, self._keep_changelog
        emits, changelog = batch.emits, batch.emits.changelog
        keys: list[bytes] = []
        decisions: list[dict[str, Any]] = []
        for session_id, changed in batch.touched.items():
            state = table[session_id]
            key = session_id.encode()
            if changed and keep_changelog:
                changelog.append((key, encode_state(state)))
            # An exhausted slate needs no decision; an empty one gets mode `none`.
            if type(state) is not Session or state.clicked or 0 < len(state.slate) <= state.passed:
                continue
            keys.append(key)
            decisions.append(state.decision(session_id, self._tokens(session_id, state)))
        emits.decisions += zip(keys, encode_many(decisions), strict=True)
        emits.tally.decisions.update(map(_mode_and_position, decisions))

    def _tokens(self, session_id: str, session: Session) -> tuple[str, ...] | None:
        if self._secret is None:
            return None
        return slate_tokens(
            self._secret,
            session_id=session_id,
            slate=session.slate[session.passed :],
            arrived_at=session.arrived_at,
            first=session.passed + 1,
        )

    # ── expiry ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _parked_until(self, latest: int) -> int:
        return latest + self._versions.newest.settings.session_timeout

    def _schedule_expiry(self, session_id: str, until: int) -> None:
        self._expiry.add(session_id, until + self._versions.newest.settings.lateness)

    def _expire(self, emits: Emits) -> None:
        lateness = self._versions.newest.settings.lateness
        for session_id in self._expiry.pop_due(self._progress):
            state = self.table.get(session_id)
            if state is None:
                continue
            until = state.deadline if isinstance(state, Session) else self._parked_until(state.latest)
            if until + lateness > self._progress:
                self._schedule_expiry(session_id, until)  # more feedback was parked, or the settings changed
                continue
            del self.table[session_id]
            if self._keep_changelog:
                emits.changelog.append((session_id.encode(), None))
            if isinstance(state, Session):
                emits.tally.ended[state.ending] += 1
            else:
                emits.tally.late += len(state.records)
                self.parked -= len(state.records)
                self._awaited -= 1
