"""One order out of many partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.logs.merge import TimeMerge

LANES = st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=5)


def entries(lane: int, times: list[int], first: int = 0) -> list[tuple[float, int, tuple[int, int]]]:
    return [(time, 1, (lane, number)) for number, time in enumerate(times, first)]


@given(LANES)
def test_lanes_in_order_become_one_list_in_order(lanes: list[list[int]]) -> None:
    lanes = [sorted(lane) for lane in lanes]
    merge = TimeMerge[int, tuple[int, int]](range(len(lanes)))
    for lane, times in enumerate(lanes):
        merge.put(lane, entries(lane, times))
    taken = list(merge.take(exhausted=range(len(lanes))))
    assert [lanes[lane][number] for lane, number in taken] == sorted(time for lane in lanes for time in lane)
    assert len(merge) == 0
    assert set(merge.weights.values()) == {0}


@given(LANES, st.data())
def test_nothing_is_lost_and_no_lane_is_turned_around_however_it_comes(
    lanes: list[list[int]], data: st.DataObject
) -> None:
    merge = TimeMerge[int, tuple[int, int]](range(len(lanes)))
    given_ = [0] * len(lanes)
    taken: list[tuple[int, int]] = []
    while any(given_[lane] < len(times) for lane, times in enumerate(lanes)):
        lane = data.draw(st.sampled_from([i for i, times in enumerate(lanes) if given_[i] < len(times)]))
        count = data.draw(st.integers(1, len(lanes[lane]) - given_[lane]))
        merge.put(lane, entries(lane, lanes[lane][given_[lane] : given_[lane] + count], given_[lane]))
        given_[lane] += count
        taken += merge.take(exhausted=[i for i, times in enumerate(lanes) if given_[i] == len(times)])
    taken += merge.take(exhausted=range(len(lanes)))
    for lane, times in enumerate(lanes):
        assert [number for of, number in taken if of == lane] == list(range(len(times)))


def test_what_is_too_young_stays() -> None:
    merge = TimeMerge[str, tuple[int, int]](["a", "b"])
    merge.put("a", entries(0, [1, 5, 9]))
    assert list(merge.take(exhausted={"b"}, before=5)) == [(0, 0)]
    assert list(merge.take(exhausted={"a", "b"}, before=9)) == [(0, 1)]
    assert list(merge.take(exhausted={"a", "b"})) == [(0, 2)]


def test_a_lane_that_is_awaited_holds_the_others_up() -> None:
    merge = TimeMerge[str, tuple[int, int]](["a", "b"])
    merge.put("a", entries(0, [1, 2]))
    assert list(merge.take(exhausted={"a"})) == []
    merge.put("b", entries(1, [1]))
    assert list(merge.take(exhausted={"a"})) == [(0, 0), (1, 0)]
    assert merge.weights == {"a": 1, "b": 0}
