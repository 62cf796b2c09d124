"""Records to events: decode a batch, and turn what cannot be used into dead letters.

Rules that hold in this file:

- No output is larger than its topic takes. An input whose outputs might not fit is rejected before anything of it is
  written, so that journal, table and decisions agree: a session whose table value cannot be stored is not in the
  journal either.
- What does not fit all the same is left out and reported: a topic may take less than when a session was opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.encoding import encode_opened
from worker.stream.events import Arrival, Feedback, FeedbackFact, Opened
from worker.stream.features import context_encoder
from worker.stream.session import Parked, Session
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.topology import MOST_BYTES, RESERVED_BYTES, Emits, Record, Tally, dead_letter
from worker.stream.versions import Versions

#: By session id: the planner, the packed context, and the slate.
Planned: TypeAlias = dict[str, tuple[SlatePlanner, bytes, Slate]]


@dataclass(slots=True)
class Batch:
    """Records with their events, None in place of dead letters, and what became of them so far.

    `planned` are the new sessions; `touched` maps every session concerned to whether its value has changed; `facts` are
    for the journal; `unremembered` are sessions without room; `decisions` are what clients are answered.
    """

    records: Sequence[Record]
    events: Sequence[Arrival | Feedback | None]
    emits: Emits
    planned: Planned = field(default_factory=dict)
    touched: dict[str, bool] = field(default_factory=dict)
    facts: list[Opened | FeedbackFact] = field(default_factory=list)
    unremembered: dict[str, Session] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)


class OutputBounds:
    """Bounds by the largest record that all output topics take."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._room = most_bytes - RESERVED_BYTES  # for key and value

    def surely_fits(self, slate_bytes: int) -> int:
        """Return the length up to which an input needs no further check; slates add so many bytes to its outputs."""
        # A number of one digit and a comma become eight bytes at most, in the journal or in the table.
        return (self._room - slate_bytes) // 4

    def check(self, record: Record, event: Arrival | Feedback, slate_bytes: int, tally: Tally) -> None:
        """Raise `Rejected` if an output of a longer input might not fit."""
        if isinstance(event, Feedback):
            size = 2 * len(record.value or b"")  # the key and the fact, or what is parked
        else:
            fact = Opened(
                session_id=event.session_id,
                arrived_at=event.occurred_at,
                context=event.context,
                slate=(),
                modes=(),
                exclude=event.exclude,
                parameters_version=0,
            )
            size = len(event.session_id.encode()) + len(encode_opened(fact)) + 4 * len(event.context) + slate_bytes
        if size > self._room:
            tally.troubles.add("too-large-output", f"{record.where}: up to {size} bytes, more than {self._room}")
            raise Rejected("too-large", f"its outputs may have {size} bytes, and the topics take {self._room}")

    def can_park(self, parked: Parked, value: bytes) -> bool:
        """Whether another record fits into a table value."""
        return sum(len(kept.value) for kept in parked.records) + len(value) <= self._room // 2

    def fits(self, key: bytes, value: bytes) -> bool:
        """Whether a record fits."""
        return len(key) + len(value) <= self._room

    def fitting(self, topic: str, pairs: Iterable[tuple[bytes, bytes]], emits: Emits) -> list[tuple[bytes, bytes]]:
        """Return the records that fit, and report the others."""
        written, fits = list(pairs), self.fits
        if self.most_bytes >= MOST_BYTES or all(fits(*pair) for pair in written):
            return written
        for key, value in written:
            if not fits(key, value):
                emits.tally.troubles.add("too-large-output", f"{topic}: {len(value)} bytes, more than {self._room}")
        return [pair for pair in written if fits(*pair)]


#: Bytes of a number of a context and a comma, at most.
LONGEST_NUMBER = 26


class RecordReader:
    """Reads the inputs of one partition under the limits of the newest version; `arrivals` is the name of a topic."""

    def __init__(self, versions: Versions, arrivals: str, limits: Limits, bounds: OutputBounds) -> None:
        self._versions = versions
        self._arrivals = arrivals
        self._limits = limits
        self._bounds = bounds

    def read(self, records: Sequence[Record], emits: Emits) -> list[Arrival | Feedback | None]:
        """Decode records; return None in place of those that become dead letters."""
        settings, limits = self._versions.newest.settings, self._limits
        dim, horizon, topic = settings.dim, self._versions.horizon, self._arrivals
        grace, standardise = settings.grace, settings.standardise
        encoder = context_encoder(settings.features)
        # Of an object, the outputs have all columns, whatever its length.
        encoded = 0 if encoder is None else LONGEST_NUMBER * dim
        small = self._bounds.surely_fits(self._versions.slate_bytes + encoded)
        events: list[Arrival | Feedback | None] = []
        arrivals = 0
        for record in records:
            try:
                event: Arrival | Feedback
                if record.topic == topic:
                    arrivals += 1
                    event = decode_arrival(
                        record.value,
                        limits=limits,
                        dim=dim,
                        timestamp=record.timestamp,
                        grace=grace,
                        encoder=encoder,
                        standardise=standardise,
                    )
                else:
                    event = decode_feedback(
                        record.value, limits=limits, horizon=horizon, timestamp=record.timestamp, grace=grace
                    )
                if len(record.value or b"") > small:
                    self._bounds.check(record, event, self._versions.slate_bytes, emits.tally)
                events.append(event)
            except Rejected as rejected:
                self.reject(record, rejected.reason, rejected.error, emits)
                events.append(None)
        emits.tally.arrivals += arrivals
        emits.tally.feedback += len(records) - arrivals
        return events

    def read_parked(self, record: Record, horizon: int, emits: Emits) -> Feedback | None:
        """Decode feedback that was parked; the limits may be stricter than they were then."""
        grace = self._versions.newest.settings.grace
        try:
            return decode_feedback(
                record.value, limits=self._limits, horizon=horizon, timestamp=record.timestamp, grace=grace
            )
        except Rejected as rejected:
            self.reject(record, rejected.reason, rejected.error, emits)
            return None

    def reject(self, record: Record, reason: str, error: str, emits: Emits) -> None:
        """Add a dead letter, and count it."""
        emits.dead_letters.append(dead_letter(record, reason, error, self._bounds.most_bytes))
        emits.tally.dead[reason] += 1
        emits.tally.troubles.add("dead-letters", f"{record.where}: {reason}")
        if record.topic == self._arrivals:
            emits.tally.dead_arrivals += 1
        else:
            emits.tally.dead_feedback += 1
