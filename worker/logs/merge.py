"""One time order for the records of many partitions, without changing the order within a partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)


class _Held(NamedTuple, Generic[Item]):
    time: float
    weight: int
    item: Item


class TimeMerge(Generic[Name, Item]):
    """Hold the items of each source until no other source can still deliver an earlier one.

    A source keeps its own order: an item with an earlier time than its predecessor gets the time of the predecessor.

    >>> merge = TimeMerge[str, str](["left", "right"])
    >>> merge.put("left", [(1, 1, "a"), (5, 1, "d")])
    >>> list(merge.take())  # the right source may still deliver an earlier item
    []
    >>> merge.put("right", [(4, 1, "b"), (2, 1, "c")])
    >>> list(merge.take()), list(merge.take(exhausted={"right"}))
    (['a', 'b', 'c'], ['d'])
    """

    def __init__(self, sources: Iterable[Name]) -> None:
        self._queues: dict[Name, deque[_Held[Item]]] = {source: deque() for source in sources}
        self._latest: dict[Name, float] = dict.fromkeys(self._queues, -inf)
        self.weights: dict[Name, int] = dict.fromkeys(self._queues, 0)  # sums over the items held

    def put(self, source: Name, items: Iterable[tuple[float, int, Item]]) -> None:
        """Add the next items of a source: times, weights and items."""
        queue, latest, weight = self._queues[source], self._latest[source], self.weights[source]
        for time, heavy, item in items:
            latest = max(latest, time)
            weight += heavy
            queue.append(_Held(latest, heavy, item))
        self._latest[source], self.weights[source] = latest, weight

    def take(self, exhausted: Container[Name] = (), before: float = inf) -> Iterator[Item]:
        """Yield the items whose order is certain.

        `exhausted` sources have no more items for the time being, so no item waits for them. Items with a time at or
        after `before` stay.
        """
        queues, weights = self._queues, self.weights
        if any(not queue and source not in exhausted for source, queue in queues.items()):
            return
        sources = list(queues)
        heads = [(queues[source][0].time, index) for index, source in enumerate(sources) if queues[source]]
        heapify(heads)
        while heads and heads[0][0] < before:
            index = heads[0][1]
            source = sources[index]
            queue = queues[source]
            held = queue.popleft()
            weights[source] -= held.weight
            yield held.item
            if queue:
                heapreplace(heads, (queue[0].time, index))
            elif source in exhausted:
                heappop(heads)
            else:
                return

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
