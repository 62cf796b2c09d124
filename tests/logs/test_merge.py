"""The time order of several sources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.logs.merge import TimeMerge

SOURCES = st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=5)


def entries(source: int, times: list[int], first: int = 0) -> list[tuple[float, int, tuple[int, int]]]:
    return [(time, 1, (source, number)) for number, time in enumerate(times, first)]


@given(SOURCES)
def test_sorted_sources_give_one_sorted_list(sources: list[list[int]]) -> None:
    sources = [sorted(source) for source in sources]
    merge = TimeMerge[int, tuple[int, int]](range(len(sources)))
    for source, times in enumerate(sources):
        merge.put(source, entries(source, times))
    taken = list(merge.take(exhausted=range(len(sources))))
    assert [sources[source][number] for source, number in taken] == sorted(
        time for source in sources for time in source
    )
    assert len(merge) == 0
    assert set(merge.weights.values()) == {0}


@given(SOURCES, st.data())
def test_no_item_is_lost_and_every_source_keeps_its_order(sources: list[list[int]], data: st.DataObject) -> None:
    merge = TimeMerge[int, tuple[int, int]](range(len(sources)))
    delivered = [0] * len(sources)
    taken: list[tuple[int, int]] = []
    while any(delivered[source] < len(times) for source, times in enumerate(sources)):
        source = data.draw(st.sampled_from([i for i, times in enumerate(sources) if delivered[i] < len(times)]))
        count = data.draw(st.integers(1, len(sources[source]) - delivered[source]))
        merge.put(
            source, entries(source, sources[source][delivered[source] : delivered[source] + count], delivered[source])
        )
        delivered[source] += count
        taken += merge.take(exhausted=[i for i, times in enumerate(sources) if delivered[i] == len(times)])
    taken += merge.take(exhausted=range(len(sources)))
    for source, times in enumerate(sources):
        assert [number for of, number in taken if of == source] == list(range(len(times)))


def test_items_after_the_bound_stay() -> None:
    merge = TimeMerge[str, tuple[int, int]](["a", "b"])
    merge.put("a", entries(0, [1, 5, 9]))
    assert list(merge.take(exhausted={"b"}, before=5)) == [(0, 0)]
    assert list(merge.take(exhausted={"a", "b"}, before=9)) == [(0, 1)]
    assert list(merge.take(exhausted={"a", "b"})) == [(0, 2)]


def test_a_source_that_may_deliver_more_holds_the_others_back() -> None:
    merge = TimeMerge[str, tuple[int, int]](["a", "b"])
    merge.put("a", entries(0, [1, 2]))
    assert list(merge.take(exhausted={"a"})) == []
    merge.put("b", entries(1, [1]))
    assert list(merge.take(exhausted={"a"})) == [(0, 0), (1, 0)]
    assert merge.weights == {"a": 1, "b": 0}
