"""Sorting of more entries than fit into memory."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from worker.logs.sorting import Sorter


@given(st.lists(st.binary(max_size=40)), st.integers(1, 500))
@example([bytes([n]) * 100_000 for n in (3, 1, 2)], 1)  # longer than one read of the file
def test_a_sorter_yields_its_entries_sorted_any_number_of_times(entries: list[bytes], memory: int) -> None:
    with Sorter(memory=memory) as sorter:
        for entry in entries:
            sorter.add(entry)
        assert list(sorter) == list(sorter) == sorted(entries)
        assert len(sorter) == len(entries)
