"""When table values may be deleted: session ids by time, in steps of a second."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

STEP = 1000  # milliseconds


class ExpiryQueue:
    """Session ids, each to be looked at within one step after a time.

    >>> queue = ExpiryQueue()
    >>> queue.add("s", 1500)
    >>> queue.has_due(1999), queue.has_due(2000), list(queue.pop_due(2000))
    (False, True, ['s'])
    """

    def __init__(self) -> None:
        self._due: dict[int, list[str]] = {}
        self._steps: list[int] = []

    def add(self, session_id: str, time: int) -> None:
        """Add a session."""
        step = time // STEP + 1
        due = self._due.get(step)
        if due is None:
            self._due[step] = due = []
            heappush(self._steps, step)
        due.append(session_id)

    def has_due(self, now: int) -> bool:
        """Return whether a session is due."""
        return bool(self._steps) and self._steps[0] * STEP <= now

    def pop_due(self, now: int) -> Iterator[str]:
        """Remove and yield all sessions that are due."""
        while self.has_due(now):
            yield from self._due.pop(heappop(self._steps))
