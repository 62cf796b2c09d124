"""The records of a state folder as a log, so that what reads logs reads folders too.

A folder has the journal of the time that `serve --keep` gives, the last versions and their thinned history. It has no
arrivals, clicks and decisions; the journal says what came of them.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from worker.embedded.state import StateView
from worker.logs.format import NO_TIMESTAMP, LogWriter
from worker.stream.topology import ONLY_PARTITION, Record, Topics

_PIECE: Final = 10_000


def write_state(state: StateView, topics: Topics, log: LogWriter) -> None:
    """Write a log of a state folder, also while a process writes to it: the journal first, then the versions."""

    def put(topic: str, offset: int, key: bytes | None, value: bytes | None) -> None:
        log(Record(topic, ONLY_PARTITION, offset, NO_TIMESTAMP, key, value))

    start, _ = state.journal_bounds()
    while piece := state.journal(start, _PIECE):
        for offset, value in piece:
            put(topics.journal, offset, None, value)
        start = piece[-1][0] + 1
    offsets = count()
    for slot in state.slots():
        put(topics.parameters_history, next(offsets), slot.encode(), state.in_slot(slot))
    for value in state.parameters():
        put(topics.parameters, next(offsets), None, value)
