"""Records to events: decode a batch, and turn what cannot be used into dead letters.

Rules that hold in this file:

- No output is larger than its topic takes. An input whose outputs might not fit, by its length alone, is rejected
  before anything of it is written, so that journal, table and decisions agree: a session whose table value cannot be
  stored is not in the journal either.
- What does not fit all the same is left out and reported: a topic may take less than when a session was opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.events import Arrival, Feedback, FeedbackFact, Opened
from worker.stream.session import Session
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.topology import MOST_BYTES, RESERVED_BYTES, Emits, Record, dead_letter
from worker.stream.versions import Versions

#: By session id: the planner, the packed context, and the slate.
Planned: TypeAlias = dict[str, tuple[SlatePlanner, bytes, Slate]]


@dataclass(slots=True)
class Batch:
    """Records with their events, None in place of dead letters, and what became of them so far.

    `planned` are the new sessions; `touched` maps every session concerned to whether its value has changed; `facts` are
    for the journal; `unremembered` are sessions without room.
    """

    records: Sequence[Record]
    events: Sequence[Arrival | Feedback | None]
    emits: Emits
    planned: Planned = field(default_factory=dict)
    touched: dict[str, bool] = field(default_factory=dict)
    facts: list[Opened | FeedbackFact] = field(default_factory=list)
    unremembered: dict[str, Session] = field(default_factory=dict)


#: Bytes of a number of a context and a comma, at most.
LONGEST_NUMBER = 26
#: Bytes of an output for key and value.
ROOM = MOST_BYTES - RESERVED_BYTES


class RecordReader:
    """Reads the inputs of one partition under the limits of the newest version; `arrivals` is the name of a topic."""

    def __init__(self, versions: Versions, arrivals: str, limits: Limits) -> None:
        self._versions = versions
        self._arrivals = arrivals
        self._limits = limits

    def fitting(self, topic: str, pairs: Iterable[tuple[bytes, bytes]], emits: Emits) -> list[tuple[bytes, bytes]]:
        """Return the records that fit, and report the others."""
        written = []
        for key, value in pairs:
            if len(key) + len(value) <= ROOM:
                written.append((key, value))
            else:
                emits.tally.troubles.add("too-large-output", f"{topic}: {len(value)} bytes, more than {ROOM}")
        return written

    def read(self, records: Sequence[Record], emits: Emits) -> list[Arrival | Feedback | None]:
        """Decode records; return None in place of those that become dead letters."""
        settings, horizon, encoder = self._versions.newest.settings, self._versions.horizon, self._versions.encoders
        # Of an object, the outputs have all columns, for any length.
        encoded = 0 if encoder is None else LONGEST_NUMBER * self._versions.dim
        # A number of one digit and a comma become eight bytes at most, in the journal or in the table.
        largest = (ROOM - self._versions.slate_bytes - encoded) // 4
        events: list[Arrival | Feedback | None] = []
        unlisted: list[tuple[str, str]] = []
        arrivals = 0
        for record in records:
            try:
                event: Arrival | Feedback
                if record.topic == self._arrivals:
                    arrivals += 1
                    timestamp, limits = record.timestamp, self._limits
                    event = decode_arrival(
                        record.value, settings, limits=limits, timestamp=timestamp, encoder=encoder, unlisted=unlisted
                    )
                else:
                    event = self._feedback(record, horizon)
                if (size := len(record.value or b"")) > largest:
                    more = f"{size} bytes, more than {largest}, beyond which its outputs may not fit into their topics"
                    emits.tally.troubles.add("too-large-output", f"{record.where}: {more}")
                    raise Rejected("too-large", f"the record has {more}")
                if record.key != event.session_id.encode():
                    wrong = "the key is not the session_id" if record.key else "no key"
                    emits.tally.troubles.add("wrong-key", f"{record.where}: {wrong}")
                events.append(event)
            except Rejected as rejected:
                self.reject(record, rejected.reason, rejected.error, emits)
                events.append(None)
        emits.tally.arrivals += arrivals
        emits.tally.feedback += len(records) - arrivals
        if unlisted:
            emits.tally.unlisted.add(unlisted)
            emits.tally.troubles.add("unlisted-values", f"the feature {unlisted[-1][0]}", len(unlisted))
        return events

    def read_parked(self, record: Record, horizon: int, emits: Emits) -> Feedback | None:
        """Decode feedback that was parked; the limits may be stricter than they were then."""
        try:
            return self._feedback(record, horizon)
        except Rejected as rejected:
            self.reject(record, rejected.reason, rejected.error, emits)
            return None

    def _feedback(self, record: Record, horizon: int) -> Feedback:
        grace = self._versions.newest.settings.grace
        return decode_feedback(
            record.value, limits=self._limits, horizon=horizon, timestamp=record.timestamp, grace=grace
        )

    def reject(self, record: Record, reason: str, error: str, emits: Emits) -> None:
        """Add a dead letter, and count it."""
        emits.dead_letters.append(dead_letter(record, reason, error))
        emits.tally.dead[reason] += 1
        emits.tally.troubles.add("dead-letters", f"{record.where}: {reason}")
        if record.topic == self._arrivals:
            emits.tally.dead_arrivals += 1
        else:
            emits.tally.dead_feedback += 1
