"""Logs of one session, from a state folder or from Kafka, to be read as any other log.

Rules that hold in this file:

- A state folder has no arrivals, decisions and episodes: the fact `opened` in the journal stands for them. Where that
  was not journaled, or deleted after its window was folded, the session table has the session until it is over.
- Of Kafka all topics are read to their present ends. What is not about the session is dropped as it comes.
"""

from __future__ import annotations

from pathlib import Path

from worker.embedded.state import StateView
from worker.errors import InputError
from worker.logs.format import NO_TIMESTAMP, LogWriter
from worker.logs.ordered import about, plain_part
from worker.stream.contexts import unpack_context
from worker.stream.encoding import encode_journal
from worker.stream.events import Opened
from worker.stream.session import Session, decode_state
from worker.stream.topology import ONLY_PARTITION, Record, Topics


class SessionLog(LogWriter):
    """Writes only the lines that may be about a session, or have versions or episodes."""

    def __init__(self, path: str | Path, session_id: str, topics: Topics) -> None:
        super().__init__(path)
        self._is_about = about(session_id, topics)

    def write_line(self, line: bytes) -> None:
        """Write a line, or drop it."""
        if self._is_about(line):
            super().write_line(line)


def write_state(state: StateView, session_id: str, log: LogWriter, topics: Topics) -> None:
    """Write what a state folder has of a session, and its versions."""
    slots = [(slot.encode(), state.in_slot(slot)) for slot in state.slots()]
    for offset, value in enumerate(state.parameters()):
        log(Record(topics.parameters, ONLY_PARTITION, offset, NO_TIMESTAMP, None, value))
    for offset, (slot, kept) in enumerate(slots):
        log(Record(topics.parameters_history, ONLY_PARTITION, offset, NO_TIMESTAMP, slot, kept))
    opened = False
    for offset, value in state.journal_with(plain_part(session_id)):
        log(Record(topics.journal, ONLY_PARTITION, offset, NO_TIMESTAMP, None, value))
        opened |= b'"opened"' in value
    stored = state.session(session_id)
    session = None if stored is None else decode_state(stored)
    if opened or not isinstance(session, Session):
        return
    if any(arm.startswith("\0") for arm in session.exclude):
        raise InputError(
            f"{state.path} has a digest of the ads that session {session_id} excluded: use a log of --record"
        )
    # Where the journal is trimmed it stood in front, else it never was there; both offsets are free.
    first, end = state.journal_bounds()
    value = encode_journal(_opened(session_id, session))
    log(Record(topics.journal, ONLY_PARTITION, 0 if first else end, NO_TIMESTAMP, None, value))


def _opened(session_id: str, session: Session) -> Opened:
    return Opened(
        session_id=session_id,
        arrived_at=session.arrived_at,
        context=unpack_context(session.context),
        slate=session.slate,
        modes=session.modes,
        exclude=session.exclude,
        parameters_version=session.version,
        share=session.share or None,
    )
