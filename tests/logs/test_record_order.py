"""A recording is in the order of time, and of every partition."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from worker.logs.record import TimeOrder
from worker.stream.topology import Record

TIMES = st.lists(st.lists(st.integers(-1, 50), max_size=12), min_size=1, max_size=5)


@given(TIMES, st.data())
def test_no_record_is_lost_every_partition_keeps_its_order_and_the_times_rise(
    partitions: list[list[int]], data: st.DataObject
) -> None:
    places = [("clicks", number) for number in range(len(partitions))]
    added = [0] * len(partitions)
    latest = [-1] * len(partitions)
    times: dict[tuple[int, int], int] = {}  # an earlier time than before it counts as that
    taken: list[tuple[int, int]] = []
    with closing(TimeOrder(places)) as order:
        while unread := [number for number, stamps in enumerate(partitions) if added[number] < len(stamps)]:
            number = data.draw(st.sampled_from(unread))
            for _ in range(data.draw(st.integers(1, len(partitions[number]) - added[number]))):
                offset, stamp = added[number], partitions[number][added[number]]
                order.add(Record("clicks", number, offset, stamp, None, None))
                times[number, offset] = latest[number] = max(latest[number], stamp)
                added[number] += 1
            exhausted = [places[n] for n, stamps in enumerate(partitions) if added[n] == len(stamps)]
            bound = data.draw(st.integers(0, 60))
            certain = [(place[1], offset) for place, offset, _, _ in order.drain(exhausted, before=bound)]
            assert all(times[record] < bound for record in certain)
            taken += certain
        taken += [(place[1], offset) for place, offset, _, _ in order.drain(exhausted=places)]
    assert taken == sorted(times, key=lambda record: (times[record], *record))
