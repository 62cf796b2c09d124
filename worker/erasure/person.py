"""A person, and the records of a person in one place.

Rules that hold in this file:

- A person is a user, or some sessions. The sessions of a user are those of the arrivals that name the user.
- A record is of a person if its key or its `session_id` is one of the sessions, or its `user_id` is the user. So dead
  letters are found, whatever their key is. Versions, their history and episodes have no ids, and are passed over.
- A log is never changed: without some of its records, what was learned from it could not be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from worker.console import progress
from worker.errors import InputError
from worker.logs.findings import ticking
from worker.logs.format import LogReader
from worker.stream.topology import Record

#: Topics without ids of sessions or users.
IMPERSONAL: Final = ("parameters", "parameters-history", "episodes")


class _Ids(msgspec.Struct, gc=False):
    session_id: Any = None
    user_id: Any = None


def _ids(record: Record) -> _Ids:
    try:
        return msgspec.json.decode(record.value or b"", type=_Ids)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Ids()


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user, whose sessions are found in arrivals, or some sessions; `found` are those that have a record."""

    user: str | None = None
    sessions: set[str]
    found: set[str] = field(default_factory=set)

    def learn(self, records: Iterable[Record]) -> None:
        """Note the sessions of the arrivals that name the user."""
        found = map(_ids, records)
        self.sessions.update(
            ids.session_id for ids in found if ids.user_id == self.user and type(ids.session_id) is str
        )

    def owns(self, record: Record) -> bool:
        """Return whether a record is one of this person."""
        if self.has((record.key or b"").decode(errors="replace")):
            return True
        if record.topic.endswith(IMPERSONAL):
            return False
        ids = _ids(record)
        is_named = self.user is not None and ids.user_id == self.user
        return self.has(ids.session_id) or is_named

    def has(self, session_id: Any) -> bool:
        """Return whether a session is one of this person, and note that it was found."""
        if type(session_id) is not str or session_id not in self.sessions:
            return False
        self.found.add(session_id)
        return True


@dataclass(slots=True)
class Place:
    """The records of a person in a topic, a table or a file; times in milliseconds since the epoch.

    `until` is the time at which the last of them is gone by itself; None: it stays. `deletable` counts what `delete`
    would delete now; `note` says what becomes of the rest.
    """

    name: str
    records: int = 0
    first: int | None = None
    last: int | None = None
    until: int | None = None
    deletable: int = 0
    note: str = ""
    delete: Callable[[], None] = field(default=lambda: None, repr=False)

    def add(self, time: int) -> None:
        """Count a record of this time; a negative one is none."""
        self.records += 1
        if time >= 0:
            self.first = time if self.first is None else min(self.first, time)
            self.last = time if self.last is None else max(self.last, time)


def in_logs(files: Iterable[Path], person: Person) -> list[Place]:
    """Search logs; a user is looked for in all of them first."""
    places = {file: Place(str(file), note="a log is not changed") for file in files}
    for file in places if person.user is not None else ():
        person.learn(_records(places[file]))
    for place in places.values():
        for record in _records(place):
            if person.owns(record):
                place.add(record.timestamp)
    return list(places.values())


def _records(place: Place) -> Iterator[Record]:
    reading = progress(f"searching {place.name}", unit="records")
    with LogReader(place.name, skip_bad=True) as log, reading as bar:
        yield from (line.record for line in ticking(log, bar))
        if log.bad == log.lines > 0:
            raise InputError(f"{place.name} is not a log: {log.first_bad}")
        if log.bad:
            place.note = f"{log.bad:,} of {log.lines:,} lines cannot be read: {log.first_bad}"
