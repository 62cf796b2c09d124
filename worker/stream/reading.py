"""Records to events: decode a batch, and turn what cannot be used into dead letters."""

from __future__ import annotations

from collections.abc import Sequence

from worker.stream.bounds import OutputBounds
from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.encoders import context_encoder
from worker.stream.events import Arrival, Feedback
from worker.stream.topology import Emits, Record, dead_letter
from worker.stream.versions import Versions

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
