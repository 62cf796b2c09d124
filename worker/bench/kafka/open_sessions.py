"""A table full of open sessions, and a backlog in which every event belongs to a different session.

The traffic of real users lets a worker save work: if all clicks of a session are waiting, it writes only the last
state. Here it cannot: each event has to be journalled, stored and answered by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker.bench.kafka.recording import TIMEOUT, Recording, live_arrival
from worker.bench.kafka.topics import Pair
from worker.stream.encoding import encode_feedback
from worker.stream.events import Feedback
from worker.stream.partitioning import murmur2_partition
from worker.stream.session import Session, decode_state, encode_state
from worker.stream.topology import Topics


def backlog(
    recording: Recording, names: Topics, count: int, now: int, *, partitions: int
) -> dict[tuple[str, int], list[Pair]]:
    """Return a changelog with `count` sessions, a pass for each, and arrivals of new sessions in the usual ratio."""
    parts: dict[tuple[str, int], list[Pair]] = {}
    arrivals = len(recording.arrivals) / len(recording.clicks)
    for number, session in enumerate(open_sessions(recording.states, count, now)):
        name = f"open-{number}"
        key = name.encode()
        partition = murmur2_partition(key, partitions)
        answer = Feedback(session_id=name, occurred_at=now, position=1, arm=session.slate[0], clicked=False)
        parts.setdefault((names.changelog, partition), []).append((key, encode_state(session)))
        parts.setdefault((names.clicks, partition), []).append((key, encode_feedback(answer)))
        if int((number + 1) * arrivals) > int(number * arrivals):
            new = b"new-%d" % number
            script = recording.scripts[number % len(recording.scripts)]
            topic = names.arrivals, murmur2_partition(new, partitions)
            parts.setdefault(topic, []).append((new, live_arrival(script, new, now)))
    return parts


def open_sessions(states: Sequence[bytes], count: int, now: int) -> Iterator[Session]:
    """Yield sessions that have just begun, made from recorded ones."""
    sessions = [state for state in map(decode_state, states) if isinstance(state, Session)]
    for session in sessions:
        session.arrived_at, session.deadline = now, now + TIMEOUT
    for number in range(count):
        yield sessions[number % len(sessions)]
