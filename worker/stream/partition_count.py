"""How a number of partitions that was named in error is given up; the rule is in `learner.py`."""

from __future__ import annotations

from worker.stream.events import Progress


class LowerCount:
    """A number of partitions below the highest, and when each of them first named it."""

    def __init__(self) -> None:
        self._count = 0
        self._since: dict[int, int] = {}

    def is_confirmed(self, event: Progress, span: int) -> bool:
        """Take a record that names it; return whether all partitions have named it for that long."""
        if event.partitions != self._count:
            self._count, self._since = event.partitions, {}
        self._since.setdefault(event.partition, event.time)
        return len(self._since) == self._count and event.time - max(self._since.values()) >= span
