"""A person in the state folder of `adcascade serve`, and in the log that it records.

Rules that hold in this file:

- A session that is deleted is as if it had never been opened: further feedback for it is answered with 404.
- Of the journal, only what is learned is deleted: records before the offset from which the learner resumes. So nothing
  that is learned later changes, and the log of `--record` still replays. The last record stays: the journal ends there.
- A process that serves has the sessions in memory, so nothing is deleted while the folder is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from worker.erasure.person import Person, Place, in_logs
from worker.errors import InputError
from worker.serve.control import StateFolderControl
from worker.serve.recording import PART, recorded
from worker.serve.state import StateFolder, StateView
from worker.stream.decoding import decode_journal
from worker.stream.events import Opened
from worker.stream.history import HOUR
from worker.stream.session import Session, decode_state
from worker.stream.topology import ONLY_PARTITION, Record


def in_folder(folder: Path, person: Person, *, keep: int, keep_record: int) -> list[Place]:
    """Search a state folder; `keep` and `keep_record` are those of its server, in milliseconds."""
    with StateView(folder) as state:
        files = recorded(state)
        if person.user is not None and not files:
            raise InputError(f"{folder} has no ids of users and no log of --record: name the sessions (--session)")
        logs = in_logs([file for _, file in files], person)
        ends = [since for since, _ in files[1:]] + [since + min(PART, keep_record) for since, _ in files[-1:]]
        for place, end in zip(logs, ends, strict=True):
            place.until = end + keep_record if keep_record else None
        newest = StateFolderControl(str(folder)).history()[-1]
        journal = _journal(state, person, newest.resume_offset)
        journal.until = (journal.last or 0) + keep + 2 * HOUR
        return [_sessions(state, person, newest.settings.lateness), journal, *logs]


def _sessions(state: StateView, person: Person, lateness: int) -> Place:
    place, keys = Place(f"{state.path}: sessions", until=0), list[bytes]()
    for key, value in state.sessions():
        if person.has(key.decode()):
            session = decode_state(value)
            since, end = (
                (session.arrived_at, session.deadline) if isinstance(session, Session) else (session.latest,) * 2
            )
            place.add(since)
            place.until = max(place.until or 0, end + lateness)
            keys.append(key)
    place.deletable = len(keys)
    place.delete = lambda: _erase(state.path, keys, ())
    return place


def _journal(state: StateView, person: Person, resume_offset: int) -> Place:
    place, offsets = Place(f"{state.path}: journal"), list[int]()
    _, end = state.journal_bounds()
    for offset, value in state.journal():
        if person.owns(Record("journal", ONLY_PARTITION, offset, -1, None, value)):
            fact = decode_journal(value)
            place.add(fact.arrived_at if isinstance(fact, Opened) else getattr(fact, "occurred_at", -1))
            if offset < min(resume_offset, end - 1):
                offsets.append(offset)
    place.deletable = len(offsets)
    place.delete = lambda: _erase(state.path, (), offsets)
    if rest := place.records - len(offsets):
        place.note = f"{rest:,} not learned yet: come again after the next window"
    return place


def _erase(folder: Path, sessions: Sequence[bytes], offsets: Sequence[int]) -> None:
    with StateFolder(folder, create=False) as state:
        state.erase(sessions, offsets)
        state.commit()
