"""How far every partition has come: the watermark, and the number of partitions that it is taken over.

Rules that hold in this file (docs/design.md §4):

- **Watermark** = lowest progress over all partitions. A partition that has not reported is at 0, which closes nothing.
- The number of partitions is the highest in any progress record: if topics grow, the watermark waits for the new
  partitions. It falls to a lower number when, since the newest version, all partitions of that number have named it
  for window + session_timeout + lateness and nobody has named more: then the higher number was an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.stream.events import Progress


class Watermark:
    """The highest progress of each partition.

    >>> watermark = Watermark({})
    >>> for partition in (0, 1):
    ...     watermark.advance(Progress(partition=partition, partitions=2, time=1_000 + partition), span=60_000)
    >>> watermark.time, watermark.slowest, watermark.reached
    (1000, 0, 1001)
    """

    def __init__(self, progress: Mapping[int, int]) -> None:
        self._progress = dict(progress)
        self._lower = _LowerCount()

    @property
    def time(self) -> int:
        """How far every partition has come; 0 until all have reported."""
        return min(self._progress.values(), default=0)

    @property
    def slowest(self) -> int:
        """The partition that holds the watermark back; -1 before any progress."""
        return min(self._progress, key=lambda partition: self._progress[partition], default=-1)

    @property
    def reached(self) -> int:
        """How far any partition has come; 0 before any progress."""
        return max(self._progress.values(), default=0)

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return len(self._progress)

    def by_partition(self) -> dict[int, int]:
        """Return the highest progress of each partition."""
        return dict(self._progress)

    def advance(self, event: Progress, *, span: int) -> None:
        """Take a progress record; `span` is how long a lower number of partitions is to be named."""
        self._count_partitions(event, span)
        self._progress[event.partition] = max(self._progress[event.partition], event.time)

    def forget_lower_count(self) -> None:
        """Count anew who names a lower number of partitions, as after a restart from a version made now."""
        self._lower = _LowerCount()

    def _count_partitions(self, event: Progress, span: int) -> None:
        for partition in range(len(self._progress), event.partitions):
            self._progress[partition] = 0
        if event.partitions == len(self._progress):
            self._lower = _LowerCount()
        elif self._lower.is_confirmed(event, span):
            for partition in range(event.partitions, len(self._progress)):
                del self._progress[partition]
            self._lower = _LowerCount()


class _LowerCount:
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
