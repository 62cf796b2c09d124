"""Serving, by partition: arrivals and feedback in; journal, decisions, dead letters and table changes out.

Rules that hold in this file (docs/design.md §3):

- Every record that is valid by itself is journaled, whether or not it changed anything. This includes feedback that
  does not fit the slate in the table: after a crash the table may hold another slate than the user saw, and the learner
  finds out which by the answers.
- Beyond the budget of learning, a share of the sessions is journaled (`budget.py`). The others are served alike, and
  leave no fact in the journal. Feedback without its arrival is journaled in any case.
- Every session that a batch touches gets its current decision once, at the end, if it is open. Same state, same bytes.
- Slates are planned at arrival, all of a batch at once, and pinned.
- Without room for more sessions, an arrival is answered with a fallback slate and not remembered: it leaves no value in
  the table and no fact in the journal. If it comes again, it may be remembered then.
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
from worker.stream.bounds import OutputBounds
from worker.stream.budget import ALL, journaled
from worker.stream.contexts import pack_context
from worker.stream.decoding import Limits, Rejected, decode_feedback
from worker.stream.encoding import encode_many, feedback_document, opened_document
from worker.stream.events import Arrival, Feedback
from worker.stream.exclusions import brief_exclusions
from worker.stream.parameters import Parameters
from worker.stream.partitioning import PartitionSurvey
from worker.stream.reading import RecordReader
from worker.stream.replanning import Plan, Replans
from worker.stream.room import SessionRoom
from worker.stream.session import Parked, ParkedRecord, Session, State, encode_state
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.table import SessionTable
from worker.stream.tokens import check_token, slate_tokens
from worker.stream.topology import Emits, Record, Tally, Topics
from worker.stream.versions import Versions

#: Most feedback records parked for one session; a well-behaved client sends one or two per position.
MOST_PARKED = 64

REUSED = "another arrival has this session_id; ids must be unique"

_mode_and_position = itemgetter("mode", "position")

#: By session id: the planner, the packed context, and the slate.
Planned: TypeAlias = dict[str, tuple[SlatePlanner, bytes, Slate]]


def handle_together(work: Iterable[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
    """Process records of several partitions; return the outputs of each.

    The same as one after the other, but the new sessions of all partitions are planned in one call: for few sessions,
    most of the time of a call is its set-up. All outputs have the same tally, that of the whole call.
    """
    tally = Tally()
    batches = [serving._read(records, tally) for serving, records in work]
    _plan(batches)
    emits = [batch.serving._step(batch) for batch in batches]
    if batches:
        batches[0].serving._report_no_room(tally)
    return emits


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
    unremembered: dict[str, Session] = field(default_factory=dict)
    shares: dict[str, float | None] = field(default_factory=dict)  # of sessions with several plans


def _plan(batches: Sequence[_Batch]) -> None:
    """Plan all new sessions that there is room for, with one call per version."""
    groups: dict[SlatePlanner, list[tuple[_Batch, Arrival]]] = {}
    for batch in batches:
        batch.serving._sessions.room.claimed = 0
    for batch in batches:
        serving = batch.serving
        at, table, claim = serving._versions.at, serving.table, serving._sessions.room.claim
        for arrival in serving._new_arrivals(batch):
            if claim(waiting=arrival.session_id in table):
                groups.setdefault(at(arrival.occurred_at), []).append((batch, arrival))
    for planner, group in groups.items():
        arrivals = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in arrivals]
        for (batch, arrival), context, slate in zip(group, contexts, planner.plan(arrivals, contexts), strict=True):
            batch.planned[arrival.session_id] = (planner, context, slate)
            batch.emits.sample = context
    for batch in batches:
        batch.serving._plan_again(batch)


class Serving:
    """The sessions of one partition.

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
        self._sessions = SessionTable(versions, room or SessionRoom())
        self.table: dict[str, State] = self._sessions.states
        self._versions = versions
        self._partition = partition
        self._clicks = topics.clicks
        self._limits = limits or Limits()
        self._secret = secret
        self._keep_changelog = keep_changelog
        self._survey = survey
        self._bounds = bounds or OutputBounds()
        self._reader = RecordReader(versions, topics.arrivals, self._limits, self._bounds)
        self._replans = Replans(versions)

    # ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_sessions(self) -> int:
        """The number of sessions in the table, including ended ones not yet deleted."""
        return self._sessions.open_sessions

    @property
    def parked(self) -> int:
        """The number of feedback records without an arrival."""
        return self._sessions.parked

    def restore(self, records: Iterable[Record]) -> Tally:
        """Load the table of the partition, one record per session."""
        return self._sessions.restore(records)

    def take_over(self, start: int, end: int) -> None:
        """Note that other workers may have answered the arrivals between these offsets, the end excluded."""
        self._replans.begin(start, end)

    def hand_over(self) -> Tally:
        """Drop the partition; return the counts of its table."""
        return self._sessions.hand_over()

    @property
    def has_due(self) -> bool:
        """Whether the next batch, even an empty one, deletes a value."""
        return self._sessions.has_due

    def acknowledged(self, progress: int) -> None:
        """Note that everything up to this time is processed, journaled and acknowledged."""
        self._sessions.acknowledge(progress)

    @property
    def opened(self) -> tuple[tuple[int, int], ...] | None:
        """The sessions opened by the start of their window, for progress; None where all are journaled."""
        return self._sessions.opened.report() if self._versions.are_sampled else None

    # ── a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, records: Sequence[Record]) -> Emits:
        """Process records of this partition's arrivals and clicks."""
        return handle_together([(self, records)])[0]

    def _read(self, records: Sequence[Record], tally: Tally) -> _Batch:
        emits = Emits(tally=tally)
        self._expire(emits)
        events = self._reader.read(records, emits)
        if self._survey is not None:
            self._survey.look(records, events, emits.tally.troubles)
        return _Batch(self, records, events, emits)

    def _step(self, batch: _Batch) -> Emits:
        for record, event in zip(batch.records, batch.events, strict=True):
            if type(event) is Feedback:
                self._handle_feedback(record, event, batch)
            elif type(event) is Arrival:
                self._handle_arrival(record, event, batch)
        self._write_facts(batch)
        self._write_decisions(batch)
        return batch.emits

    def _new_arrivals(self, batch: _Batch) -> Iterable[Arrival]:
        """Return the first arrival of every new session."""
        table = self.table
        first: dict[str, Arrival] = {}
        for event in batch.events:
            if type(event) is Arrival and type(table.get(event.session_id)) is not Session:
                first.setdefault(event.session_id, event)
        return first.values()

    def _plan_again(self, batch: _Batch) -> None:
        """Journal how an earlier owner of the partition may have planned arrivals that come again."""
        again = [
            (record, event)
            for record, event in zip(batch.records, batch.events, strict=True)
            if type(event) is Arrival and self._replans.concerns(record)
        ]
        if not again:
            return
        plans: dict[str, Plan] = {}
        for _, arrival in again:
            known = self.table.get(arrival.session_id)
            if arrival.session_id in batch.planned:
                planner, _, slate = batch.planned[arrival.session_id]
                share = planner.parameters.shares.of_slate(slate.modes)
                plans[arrival.session_id] = Plan(planner.parameters.version, slate.arms, share, False)
            elif type(known) is Session and known.arrived_at == arrival.occurred_at:
                plans[arrival.session_id] = Plan(known.version, known.slate, known.share, True)
        facts, batch.shares = self._replans.others(again, plans)
        batch.facts += facts

    def _handle_arrival(self, record: Record, arrival: Arrival, batch: _Batch) -> None:
        session_id, emits, touched = arrival.session_id, batch.emits, batch.touched
        before = self.table.get(session_id)
        if type(before) is Session:
            session = before
            if (
                arrival.occurred_at != session.arrived_at
                or brief_exclusions(arrival.exclude) != session.exclude
                or pack_context(arrival.context) != session.context
            ):
                self._reader.reject(record, "session-reused", REUSED, emits)
                return
            emits.tally.repeated += 1
            touched.setdefault(session_id, False)
        elif session_id not in batch.planned:
            self._answer_unremembered(record, arrival, batch)
            return
        else:
            planner, context, slate = batch.planned[session_id]
            parameters = planner.parameters
            deadline = arrival.occurred_at + parameters.settings.session_timeout
            exclude = brief_exclusions(arrival.exclude)
            session = Session(arrival.occurred_at, deadline, context, exclude, parameters.version, *slate)
            session.share = self._share(session_id, slate, parameters, batch)
            parked = self._sessions.open(session_id, session)
            if (over := self._sessions.progress - deadline - parameters.settings.lateness) >= 0:
                emits.tally.troubles.add("late-arrivals", f"session {session_id!r}, over for {over / 1000:,.0f} s")
            emits.tally.opened += 1
            emits.tally.unjournaled += session.share == 0
            if session.values:
                emits.tally.expected_reward += session.values[0]
            touched[session_id] = True
            if parked is not None:
                self._join(session_id, session, parked, emits)
        if session.share == 0:
            return
        batch.facts.append(
            opened_document(
                session_id,
                session.arrived_at,
                arrival.context,
                session.slate,
                session.modes,
                arrival.exclude,
                session.version,
                session.share,
            )
        )

    def _share(self, session_id: str, slate: Slate, parameters: Parameters, batch: _Batch) -> float | None:
        """Return what a new session remembers of its share in the journal."""
        if session_id in batch.shares:
            return batch.shares[session_id]
        if parameters.shares == ALL:
            return None
        return journaled(parameters.settings.salt, session_id, parameters.shares.of_slate(slate.modes))

    def _answer_unremembered(self, record: Record, arrival: Arrival, batch: _Batch) -> None:
        """Answer an arrival for which there is no room."""
        known = batch.unremembered.get(arrival.session_id)
        if known is not None and known.arrived_at != arrival.occurred_at:
            self._reader.reject(record, "session-reused", REUSED, batch.emits)
            return
        planner = self._versions.at(arrival.occurred_at)
        slate, version = planner.fallback(arrival), planner.parameters.version
        session = Session(arrival.occurred_at, arrival.occurred_at, b"", (), version, *slate)
        batch.unremembered[arrival.session_id] = session
        batch.emits.tally.unremembered += 1

    def _report_no_room(self, tally: Tally) -> None:
        if forgotten := tally.unremembered + tally.unparked:
            room = self._sessions.room
            example = f"{room.held:,} sessions are held, and {room.most:,} may be"
            tally.troubles.add("too-many-sessions", example, forgotten)

    def _join(self, session_id: str, session: Session, parked: Parked, emits: Emits) -> None:
        """Apply feedback that was parked; it is in the journal already."""
        settings = self._versions.newest.settings
        horizon, grace = max(self._versions.horizon, len(session.slate)), settings.grace
        for kept in parked.records:
            record = Record(self._clicks, self._partition, kept.offset, kept.timestamp, session_id.encode(), kept.value)
            try:
                feedback = decode_feedback(
                    kept.value, limits=self._limits, horizon=horizon, timestamp=kept.timestamp, grace=grace
                )
            except Rejected as rejected:  # the limits are stricter than when it was parked
                self._reader.reject(record, rejected.reason, rejected.error, emits)
                continue
            if not self._has_token(feedback, session):
                self._reader.reject(record, "token", "$.token belongs to another session of this id", emits)
                continue
            self._apply(record, feedback, session, emits)

    def _handle_feedback(self, record: Record, feedback: Feedback, batch: _Batch) -> None:
        session_id, touched = feedback.session_id, batch.touched
        state = self.table.get(session_id)
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
            tally.troubles.add("late-feedback", f"session {feedback.session_id!r}, {when}")
        else:
            tally.replanned += self._replans.explain(feedback)
            if verdict == "position":
                error = f"$.position is beyond the slate of {len(session.slate)}"
            else:
                error = "$.arm is not what was shown at that position"
            self._reader.reject(record, verdict, error, emits)
        return False

    def _park(self, record: Record, feedback: Feedback, parked: Parked | None, batch: _Batch) -> None:
        session_id, emits, sessions = feedback.session_id, batch.emits, self._sessions
        latest = feedback.occurred_at
        if self._survey is not None:
            self._survey.check_parked(record, session_id, emits.tally.troubles)
        if parked is None:
            over = sessions.progress - sessions.parked_until(latest) - self._versions.newest.settings.lateness
            if over >= 0:
                emits.tally.late += 1  # its session is deleted
                emits.tally.troubles.add("late-feedback", f"session {session_id!r}, {over / 1000:,.0f} s too late")
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

    def _write_facts(self, batch: _Batch) -> None:
        keys = [fact["session_id"].encode() for fact in batch.facts]
        batch.emits.journal += zip(keys, encode_many(batch.facts), strict=True)

    def _write_decisions(self, batch: _Batch) -> None:
        table, keep_changelog = self.table, self._keep_changelog
        emits = batch.emits
        changed_values: list[tuple[bytes, bytes]] = []
        keys: list[bytes] = []
        decisions: list[dict[str, Any]] = []
        for session_id, changed in batch.touched.items():
            state = table[session_id]
            key = session_id.encode()
            if changed and keep_changelog:
                changed_values.append((key, encode_state(state)))
            # An exhausted slate needs no decision; an empty one gets mode `none`.
            if type(state) is not Session or state.clicked or 0 < len(state.slate) <= state.passed:
                continue
            keys.append(key)
            decisions.append(state.decision(session_id, self._tokens(session_id, state)))
        for session_id, session in batch.unremembered.items():
            keys.append(session_id.encode())
            decisions.append(session.decision(session_id, self._tokens(session_id, session)))
        emits.changelog += self._bounds.fitting("sessions-changelog", changed_values, emits)
        emits.decisions += self._bounds.fitting("decisions", zip(keys, encode_many(decisions), strict=True), emits)
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

    def _expire(self, emits: Emits) -> None:
        # Deleted here, so that each is reported once, and not again after the next restart.
        emits.changelog += [(key, None) for key in self._sessions.delete_damaged()]
        for session_id, state in self._sessions.delete_due():
            if self._keep_changelog:
                emits.changelog.append((session_id.encode(), None))
            self._replans.forget(session_id)
            if isinstance(state, Session):
                emits.tally.ended[state.ending] += 1
                if self._lacks_feedback(state):
                    emits.tally.troubles.add("unanswered", f"session {session_id!r}")
            else:
                emits.tally.late += len(state.records)
                emits.tally.troubles.add("late-feedback", f"session {session_id!r}, no arrival", len(state.records))
                if self._survey is not None:
                    self._survey.check_late(session_id, self._partition, emits.tally.troubles)

    def _lacks_feedback(self, session: Session) -> bool:
        answered = session.clicked or session.passed or not session.slate
        return not answered and self._versions.newest.settings.unanswered != "passed"
