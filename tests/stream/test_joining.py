"""Windows joined in arrays, against windows that join one session at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worker.stream.windows as windows_module
from tests.stream.one_by_one import Closed, WindowsOneByOne
from tests.stream.scenes import feedback, opened, progress
from tests.stream.test_hostile_journal import ARMS, SETTINGS
from tests.stream.test_windows import EVENTS, TIMEOUT, WINDOW
from worker.stream.encoding import encode_journal
from worker.stream.events import Opened
from worker.stream.learner import Learner
from worker.stream.windows import OpenWindows

# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200)
@given(EVENTS, st.lists(st.integers(1, 6)), st.booleans(), st.sampled_from([WINDOW, 350, 700, 2_500]))
def test_windows_joined_in_arrays_close_as_those_joined_one_by_one(
    events: list[Any], sizes: list[int], whole_slates: bool, length: int
) -> None:
    fast, slow = OpenWindows(window=WINDOW), WindowsOneByOne(window=WINDOW)
    across = [opened(arrived_at=1_900), feedback(1, "a", True, occurred_at=2_050)]  # of two windows
    numbered = list(enumerate([*events, *across]))

    def close(end: int) -> None:
        how = {"session_timeout": TIMEOUT, "whole_slates": whole_slates}
        assert Closed.of(fast.close(end, **how)) == slow.close(end, **how)

    for size in [*sizes, len(numbered)]:
        for offset, event in numbered[:size]:
            taken = fast.open(offset, event) if isinstance(event, Opened) else fast.answer(offset, event)
            assert taken == slow.add(offset, event)
        assert (fast.needed_from, fast.sessions) == (slow.oldest, slow.sessions)
        del numbered[:size]
        if fast.due(WINDOW):
            close(WINDOW)
    fast.resize(length)
    slow.window = length
    while due := fast.due(10_000):
        assert due == slow.due(10_000)
        # The records of a window that was divided are needed as long as any of them.
        assert fast.needed_from is not None
        assert slow.oldest is not None
        assert fast.needed_from <= slow.oldest
        close(due[0])
    assert not slow.records
    assert (fast.needed_from, fast.answers) == (None, 0)


def test_repeated_feedback_takes_no_memory_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "LEAST_REPEATED", 100)
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened())
    reports = [feedback(position, "abc"[position - 1], False) for position in (1, 2, 3)]
    for offset in range(1, 1_000):
        for report in reports:
            windows.answer(offset, report)
        assert windows.answers <= 110
    assert windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False).arms == ["a", "b", "c"]


# ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fact_that_raises_costs_itself_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = windows_module.pack_context

    def raising(context: tuple[float, ...]) -> bytes:
        if context == (6.0, 6.0):
            raise ZeroDivisionError("as a test")
        return pack(context)

    monkeypatch.setattr(windows_module, "pack_context", raising)
    facts = [opened(f"s{n}", context=(float(n), float(n))) for n in range(9)]
    answers = [feedback(1, "a", n % 2 == 0, session_id=f"s{n}") for n in range(9)]
    values = [*map(encode_journal, facts), b"{", *map(encode_journal, answers), encode_journal(progress(1_000))]
    outcome = Learner(SETTINGS, ARMS).handle(enumerate(values))
    assert [episode.sessions for episode in outcome.episodes] == [8]
    assert [(kind, times) for kind, times, _ in outcome.troubles] == [("fold-passed-over", 2)]
    (_, _, example), *_ = outcome.troubles
    assert example.startswith("journal offset 9: "), "in the order of the journal"


def test_the_longest_slate_takes_memory_for_itself_alone() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened("long", slate=("a",) * 100_000))
    for n in range(5_000):
        windows.open(n, opened(f"s{n}"))
    window = windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False)
    assert window.slates.codes.nbytes < 2_000_000
    assert window.slates.indices(np.array([1, 2]), {"b": 5}).tolist() == [[-1, 5, -1]] * 2
