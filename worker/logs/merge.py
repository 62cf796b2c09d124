"""One order out of many partitions: by time, and never against the order of a partition."""

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
    """Holds what has come of each lane until it is known that nothing earlier can come of another.

    Within a lane the order is that of coming; a time that lies before the one ahead of it counts as that.

    Parameters
    ----------
    lanes : their names

    Examples
    --------
    >>> merge = TimeMerge[str, str](["left", "right"])
    >>> merge.put("left", [(1, 1, "a"), (5, 1, "d")])
    >>> list(merge.take())  # the right one may still bring something earlier
    []
    >>> merge.put("right", [(4, 1, "b"), (2, 1, "c")])
    >>> list(merge.take()), list(merge.take(resting={"right"}))
    (['a', 'b', 'c'], ['d'])
    """

    def __init__(self, lanes: Iterable[Name]) -> None:
        self._lanes: dict[Name, deque[_Held[Item]]] = {lane: deque() for lane in lanes}
        self._latest: dict[Name, float] = dict.fromkeys(self._lanes, -inf)
        self.weights: dict[Name, int] = dict.fromkeys(self._lanes, 0)  # of what is held

    def put(self, name: Name, items: Iterable[tuple[float, int, Item]]) -> None:
        """Take what has come of a lane: times, weights and items."""
        lane, latest, weight = self._lanes[name], self._latest[name], self.weights[name]
        for time, heavy, item in items:
            latest = max(latest, time)
            weight += heavy
            lane.append(_Held(latest, heavy, item))
        self._latest[name], self.weights[name] = latest, weight

    def take(self, resting: Container[Name] = (), before: float = inf) -> Iterator[Item]:
        """Yield what is in order now.

        `resting` lanes have nothing more to bring for the time being, so nobody waits for them; what is of a time at or
        after `before` stays.
        """
        lanes, weights = self._lanes, self.weights
        if any(not lane and name not in resting for name, lane in lanes.items()):
            return
        names = list(lanes)
        heads = [(lanes[name][0].time, place) for place, name in enumerate(names) if lanes[name]]
        heapify(heads)
        while heads and heads[0][0] < before:
            place = heads[0][1]
            name = names[place]
            lane = lanes[name]
            held = lane.popleft()
            weights[name] -= held.weight
            yield held.item
            if lane:
                heapreplace(heads, (lane[0].time, place))
            elif name in resting:
                heappop(heads)
            else:
                return

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))
