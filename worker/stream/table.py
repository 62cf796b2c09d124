"""The session table of one partition: states by session, the room that they take, and their deletion.

Rules that hold in this file (docs/design.md §3):

- A value is deleted once the acknowledged progress of the partition has reached its deadline + lateness. For parked
  feedback the deadline is its latest `occurred_at` + session_timeout.
- Values that are taken over are kept, whatever the room. One that cannot be read is skipped, reported and deleted.
- A batch that was answered may not be committed when its worker ends. So the arrivals after the committed offset, up to
  `MOST_REPEATED` of them, may have been answered by an earlier owner of the partition.
- `SessionRoom` bounds what arrivals and feedback can make a worker remember, over all of its partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from worker.stream.events import MOST
from worker.stream.session import Parked, ParkedRecord, Session, State, decode_state
from worker.stream.topology import Record, Tally
from worker.stream.versions import Versions

#: Sessions are due in steps of this many milliseconds, so that few times have to be compared.
STEP: Final = 1000

#: Arrivals of a partition that can have been answered and not be committed: more than a worker handles between two
#: commits, and few compared with a backlog of hours.
MOST_REPEATED: Final = 65_536


#: Bytes of a parked record that take the room of one more session.
_BYTES = 1_024


class SessionRoom:
    """The sessions that a worker remembers, over all of its partitions, and how many these may be.

    A parked feedback record counts as a session, or as several if it is large. Sessions that are taken over with a
    partition always count, and may exceed the bound; so may feedback that is parked while the sessions of its batch are
    opened. `tables` are the states of each partition.

    >>> room = SessionRoom(1)
    >>> room.is_full(), room.is_full(claimed=1)
    (False, True)
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = MOST if most is None else most
        self.held = 0
        self.tables: dict[int, dict[str, State]] = {}

    def is_full(self, claimed: int = 0) -> bool:
        """Return whether nothing more is to be remembered; `claimed` sessions are planned and not opened."""
        return self.held + claimed >= self.most

    def partition_of(self, session_id: str) -> int | None:
        """Return the partition in which a session is open; None if there is none."""
        partitions = (number for number, table in self.tables.items() if type(table.get(session_id)) is Session)
        return next(partitions, None)


def state_size(state: State) -> int:
    """Return the room that a session or parked feedback takes."""
    return 1 if isinstance(state, Session) else sum(map(record_size, state.records))


def record_size(record: ParkedRecord) -> int:
    """Return the room that a parked record takes.

    >>> record_size(ParkedRecord(0, 0, b"{}")), record_size(ParkedRecord(0, 0, bytes(65_536)))
    (1, 65)
    """
    return 1 + len(record.value) // _BYTES


class SessionTable:
    """States by session; every change goes through a method, so that the counts are right.

    `parked` is the number of feedback records without an arrival; `progress` is the acknowledged one; earlier owners
    may have answered the arrivals before the offset `repeated_until`.
    """

    def __init__(self, versions: Versions, room: SessionRoom, partition: int) -> None:
        self.table: dict[str, State] = {}
        self.partition = partition
        self.room = room
        room.tables[partition] = self.table
        self.parked = 0
        self.progress = -1
        self.repeated_until = 0
        self.versions = versions
        self._awaited = 0  # sessions of the parked records
        self._due: dict[int, list[str]] = {}  # session ids by the time at which they are looked at, a whole step
        self._damaged: list[bytes] = []  # keys of values that could not be restored

    @property
    def open_sessions(self) -> int:
        """The number of sessions, including ended ones not yet deleted."""
        return len(self.table) - self._awaited

    # ── ownership ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, records: Iterable[Record]) -> Tally:
        """Load the table of the partition, one record per session; skip values that cannot be read.

        A skipped session starts anew if its arrival comes again. Its feedback waits for that, and is late in the end.
        """
        tally = Tally()
        for record in records:
            try:
                session_id, state = (record.key or b"").decode(), decode_state(record.value or b"")
            except ValueError as error:
                tally.troubles.add("damaged-state", f"{record.where}: {type(error).__name__}")
                if record.key is not None:
                    self._damaged.append(record.key)
                continue
            self.table[session_id] = state
            if type(state) is Session:
                tally.recovered += 1
            elif type(state) is Parked:
                tally.recovered_parked += len(state.records)
                self.parked += len(state.records)
                self._awaited += 1
            self.room.held += state_size(state)
            self._schedule(session_id, self._until(state))
        return tally

    def take_over(self, start: int, end: int) -> None:
        """Note that earlier owners may have answered the arrivals between these offsets, the end excluded."""
        self.repeated_until = min(end, start + MOST_REPEATED)

    def hand_over(self) -> Tally:
        """Drop everything; return the counts."""
        tally = Tally(handed_over=self.open_sessions, handed_over_parked=self.parked)
        self.room.held -= sum(map(state_size, self.table.values()))
        self.room.tables.pop(self.partition, None)
        self.table.clear()
        self._due.clear()
        self.parked = self._awaited = 0
        return tally

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, session_id: str, session: Session) -> Parked | None:
        """Add a session; return the feedback that waited for it."""
        before = self.table.get(session_id)
        self.table[session_id] = session
        self.room.held += 1
        self._schedule(session_id, session.deadline)
        if type(before) is not Parked:
            return None
        self._forget(before)
        return before

    def await_arrival(self, session_id: str, latest: int) -> Parked:
        """Add a place for the feedback of a session whose arrival is missing."""
        parked = self.table[session_id] = Parked(latest, [])
        self._awaited += 1
        self._schedule(session_id, self.parked_until(latest))
        return parked

    def park(self, parked: Parked, record: ParkedRecord, occurred_at: int) -> None:
        """Add feedback to what is parked."""
        parked.records.append(record)
        parked.latest = max(parked.latest, occurred_at)
        self.parked += 1
        self.room.held += record_size(record)

    def _forget(self, parked: Parked) -> None:
        self.parked -= len(parked.records)
        self._awaited -= 1
        self.room.held -= state_size(parked)

    # ── deletion ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def acknowledged(self, progress: int) -> None:
        """Note that everything up to this time is processed, journaled and acknowledged."""
        self.progress = max(self.progress, progress)

    @property
    def has_due(self) -> bool:
        """Whether a value is to be deleted."""
        return bool(self._damaged) or any(time <= self.progress for time in self._due)

    def delete_damaged(self) -> list[bytes]:
        """Return the keys of the values that could not be read, once."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def delete_due(self) -> Iterator[tuple[str, State]]:
        """Delete and yield all that no further record can concern."""
        lateness = self.versions.newest.settings.lateness
        times = sorted(time for time in self._due if time <= self.progress)
        for session_id in [session_id for time in times for session_id in self._due.pop(time)]:
            state = self.table.get(session_id)
            if state is None:
                continue
            until = self._until(state)
            if until + lateness > self.progress:
                self._schedule(session_id, until)  # more feedback was parked, or the settings changed
                continue
            del self.table[session_id]
            if isinstance(state, Session):
                self.room.held -= 1
            else:
                self._forget(state)
            yield session_id, state

    def parked_until(self, latest: int) -> int:
        """Return the last time that feedback waits for its arrival, from its latest `occurred_at`."""
        return latest + self.versions.newest.settings.session_timeout

    def _until(self, state: State) -> int:
        return state.deadline if isinstance(state, Session) else self.parked_until(state.latest)

    def _schedule(self, session_id: str, until: int) -> None:
        time = until + self.versions.newest.settings.lateness
        self._due.setdefault((time // STEP + 1) * STEP, []).append(session_id)
