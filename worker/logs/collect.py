"""Logs of one session, from a state folder or from Kafka, to be read as any other log.

Rules that hold in this file:

- A state folder has no arrivals, decisions and episodes: the facts in the journal stand for them, as long as they are
  kept. A session that was not journaled is not found.
- Of Kafka all topics are read to their present ends. What is not about the session is dropped as it comes.
"""

from __future__ import annotations

from pathlib import Path

from worker.embedded.state import StateView
from worker.logs.format import NO_TIMESTAMP, LogWriter
from worker.logs.ordered import about, plain_part
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
    for offset, value in state.journal_with(plain_part(session_id)):
        log(Record(topics.journal, ONLY_PARTITION, offset, NO_TIMESTAMP, None, value))
