"""A table full of open sessions, and a backlog in which every event is about another one of them.

What users leave behind lets a worker save work: of a session whose clicks all wait already, only the last state is
written. Here nothing can be saved: each event has to be journalled, stored and answered by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker.bench.kafka import recording as traffic
from worker.bench.kafka.recording import Recording
from worker.bench.kafka.topics import Pair
from worker.simulation.traffic.client import partition_of
from worker.stream.codec import encode_feedback
from worker.stream.events import Feedback
from worker.stream.session import Session, decode_state, encode_state
from worker.stream.topology import Topics


def backlog(
    recording: Recording, names: Topics, count: int, now: int, *, partitions: int
) -> dict[tuple[str, int], list[Pair]]:
    """Return a changelog with so many sessions, a pass for each, and as many arrivals beside them as users bring."""
    parts: dict[tuple[str, int], list[Pair]] = {}
    arrivals = len(recording.arrivals) / len(recording.clicks)
    for number, session in enumerate(open_sessions(recording.states, count, now)):
        name = f"open-{number}"
        key = name.encode()
        place = partition_of(key, partitions)
        answer = Feedback(session_id=name, occurred_at=now, position=1, arm=session.slate[0], clicked=False)
        parts.setdefault((names.changelog, place), []).append((key, encode_state(session)))
        parts.setdefault((names.clicks, place), []).append((key, encode_feedback(answer)))
        if int((number + 1) * arrivals) > int(number * arrivals):
            new = b"new-%d" % number
            script = recording.scripts[number % len(recording.scripts)]
            place = partition_of(new, partitions)
            parts.setdefault((names.arrivals, place), []).append((new, traffic.live_arrival(script, new, now)))
    return parts


def open_sessions(states: Sequence[bytes], count: int, now: int) -> Iterator[Session]:
    """Yield sessions that have just begun, from recorded ones."""
    sessions = [state for state in map(decode_state, states) if isinstance(state, Session)]
    for session in sessions:
        session.arrived_at, session.deadline = now, now + traffic.TIMEOUT
    for number in range(count):
        yield sessions[number % len(sessions)]
