"""Windows, the join, and which displays count."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.one_by_one import Closed
from tests.stream.scenes import feedback, opened
from worker.stream.events import Opened
from worker.stream.session import answered
from worker.stream.windows import ClosedWindow, OpenWindows

WINDOW, TIMEOUT = 1000, 300


def closed(*events, end=WINDOW, whole_slates=False) -> ClosedWindow:
    windows = OpenWindows(window=WINDOW)
    for offset, event in enumerate(events):
        assert windows.open(offset, event) if isinstance(event, Opened) else windows.answer(offset, event)
    return windows.close(end, session_timeout=TIMEOUT, whole_slates=whole_slates)


def displays(window: ClosedWindow) -> list[tuple[int, str, bool]]:
    return list(zip(window.rows, window.arms, window.clicked, strict=True))


# ── one session, one slate ───────────────────────────────────────────────────────────────────────────────────────────

CLICK, PASS = True, False


@pytest.mark.parametrize(
    ("reports", "counted"),
    [
        ([], []),
        ([(1, "a", PASS)], [("a", PASS)]),
        ([(1, "a", CLICK)], [("a", CLICK)]),
        ([(2, "b", PASS)], [("a", PASS), ("b", PASS)]),
        ([(3, "c", CLICK)], [("a", PASS), ("b", PASS), ("c", CLICK)]),
        ([(1, "a", CLICK), (1, "a", PASS)], [("a", CLICK)]),
        ([(2, "b", CLICK), (3, "c", PASS)], [("a", PASS), ("b", CLICK)]),
        ([(2, "b", CLICK), (1, "a", CLICK)], [("a", CLICK)]),
        ([(1, "b", CLICK)], []),
        ([(2, "a", PASS), (1, "a", PASS)], [("a", PASS)]),
        ([(4, "a", CLICK)], []),
        ([(4, "c", PASS), (2, "b", PASS)], [("a", PASS), ("b", PASS)]),
    ],
)
def test_the_reports_of_a_session_decide_which_displays_count_in_any_order(reports, counted) -> None:
    for order in permutations(reports):
        window = closed(opened(), *(feedback(*report) for report in order))
        assert displays(window) == [(0, arm, clicked) for arm, clicked in counted]


@pytest.mark.parametrize(
    ("occurred_at", "counts"), [(99, False), (100, True), (100 + TIMEOUT, True), (101 + TIMEOUT, False)]
)
def test_feedback_counts_from_the_arrival_until_the_timeout(occurred_at, counts) -> None:
    window = closed(opened(), feedback(1, "a", CLICK, occurred_at))
    assert bool(window.arms) is counts


@pytest.mark.parametrize(
    ("reports", "counted"),
    [
        ([], 3),
        ([(1, "a", PASS)], 3),
        ([(2, "b", CLICK)], 2),
        ([(2, "x", CLICK)], 3),
    ],
)
def test_where_only_clicks_are_reported_a_session_without_one_passed_over_its_whole_slate(reports, counted) -> None:
    window = closed(opened(), *(feedback(*report) for report in reports), whole_slates=True)
    assert len(window.arms) == counted
    assert sum(window.clicked) == (counted == 2)


def test_a_session_without_a_slate_counts_as_a_session_and_has_no_displays() -> None:
    window = closed(opened(slate=()), feedback(1, "a", CLICK), whole_slates=True)
    assert len(window.plans) == 1
    assert not window.arms


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_uses_feedback_whose_own_time_is_in_the_next_window() -> None:
    window = closed(opened(arrived_at=999), feedback(1, "a", CLICK, occurred_at=1001))
    assert displays(window) == [(0, "a", True)]


def test_sessions_with_one_id_differ_by_their_arrival() -> None:
    windows = OpenWindows(window=WINDOW)
    for offset, at in enumerate((100, 900, 1900)):
        windows.open(offset, opened(arrived_at=at))
    windows.answer(3, feedback(1, "a", CLICK, occurred_at=950))
    windows.answer(4, feedback(1, "a", PASS, occurred_at=2000))
    assert displays(windows.close(1000, session_timeout=TIMEOUT, whole_slates=False)) == [(1, "a", True)]
    assert displays(windows.close(2000, session_timeout=TIMEOUT, whole_slates=False)) == [(0, "a", False)]


def test_sessions_are_sorted_by_key_whatever_the_order_they_came_in() -> None:
    events = [opened("b", 1), opened("a", 9), opened("a", 3, slate=("z",))]
    for order in permutations(events):
        assert [plan.slate for plan in closed(*order).plans] == [("z",), ("a", "b", "c"), ("a", "b", "c")]


def test_a_record_for_a_closed_window_is_late_and_leaves_nothing_behind() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened())
    windows.close(1000, session_timeout=TIMEOUT, whole_slates=False)
    assert not windows.open(1, opened(arrived_at=999))
    assert not windows.answer(2, feedback(1, "a", CLICK, occurred_at=999))
    assert windows.open(3, opened(arrived_at=1000))
    assert windows.answer(4, feedback(1, "a", CLICK, occurred_at=1000))
    assert windows.needed_from == 3


def test_windows_are_due_in_order_and_empty_ones_are_not_named() -> None:
    windows = OpenWindows(window=WINDOW)
    for offset, at in enumerate((5200, 100, 3100)):
        windows.open(offset, opened(arrived_at=at))
    assert windows.due(3999) == [1000]
    assert windows.due(6000) == [1000, 4000, 6000]


def test_the_oldest_offset_needed_is_that_of_the_first_record_of_an_open_window() -> None:
    windows = OpenWindows(window=WINDOW)
    assert windows.needed_from is None
    windows.open(5, opened("x", 100))
    windows.answer(6, feedback(1, "a", PASS, occurred_at=1200, session_id="x"))
    windows.open(7, opened("y", 1300))
    assert windows.needed_from == 5
    windows.close(1000, session_timeout=TIMEOUT, whole_slates=False)
    assert windows.needed_from == 6, "feedback is kept until the window of its own time is closed"
    windows.close(2000, session_timeout=TIMEOUT, whole_slates=False)
    assert windows.needed_from is None
    assert not windows.answers


def test_windows_of_another_length_hold_the_same_sessions_and_closed_ones_stay_closed() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened("x", 100))
    windows.open(1, opened("y", 1100))
    windows.open(2, opened("z", 1900))
    windows.answer(3, feedback(1, "a", CLICK, occurred_at=1950, session_id="z"))
    windows.close(1000, session_timeout=TIMEOUT, whole_slates=False)
    windows.resize(700)
    assert windows.due(9999) == [1400, 2100]
    assert not windows.open(4, opened("w", 950))
    assert len(windows.close(1400, session_timeout=TIMEOUT, whole_slates=False).plans) == 1
    assert displays(windows.close(2100, session_timeout=TIMEOUT, whole_slates=False)) == [(0, "a", True)]
    assert not windows.answers


# ── uncertain sessions ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "facts",
    [
        [opened(uncertain=True)],
        [opened(), opened(uncertain=True)],
        [opened(slate=("a", "b")), opened(slate=("a", "c"))],
        [opened(parameters_version=3), opened(parameters_version=4)],
        [opened(share=0.5), opened()],
        [opened(context=(0.5,)), opened(context=(0.6,))],  # two users under one key
        [opened(slate=("a",)), opened(slate=("b",)), opened(slate=("a",))],
    ],
)
@pytest.mark.parametrize("whole_slates", [False, True])
def test_a_session_that_is_marked_or_whose_facts_differ_is_counted_and_not_learned_from(facts, whole_slates) -> None:
    for order in permutations(facts):
        window = closed(opened("t"), *order, feedback(1, "a", CLICK), whole_slates=whole_slates)
        assert (len(window.plans), window.uncertain, window.sessions) == (1, 1, 2)
        assert not window.clicked.any()


def test_a_session_whose_fact_is_repeated_is_certain() -> None:
    window = closed(opened(share=1.0), opened(), feedback(1, "a", CLICK))
    assert (displays(window), window.uncertain) == ([(0, "a", True)], 0)


def test_an_uncertain_session_stays_uncertain_in_windows_of_another_length() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened(uncertain=True))
    windows.resize(700)
    windows.open(1, opened())
    assert windows.close(700, session_timeout=TIMEOUT, whole_slates=False).uncertain == 1


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ARMS = st.sampled_from("abc")
SLATES = st.lists(ARMS, max_size=4).map(tuple)
REPORTS = st.builds(feedback, position=st.integers(1, 5), arm=ARMS, clicked=st.booleans())
EVENTS = st.lists(
    st.one_of(
        st.builds(
            opened,
            session_id=st.sampled_from("st"),
            arrived_at=st.sampled_from([100, 200, 999]),
            slate=SLATES,
            parameters_version=st.integers(0, 2),
            uncertain=st.booleans(),
        ),
        st.builds(
            feedback,
            position=st.integers(1, 5),
            arm=ARMS,
            clicked=st.booleans(),
            occurred_at=st.sampled_from([90, 150, 450, 1001, 1400]),
            session_id=st.sampled_from("st"),
        ),
    ),
    max_size=14,
)


@given(EVENTS, st.data(), st.booleans())
def test_neither_order_nor_repetition_changes_a_window(events, data, whole_slates) -> None:
    events.append(opened())
    again = data.draw(st.lists(st.sampled_from(events), max_size=6))
    shuffled = data.draw(st.permutations(events + again))
    window, again = closed(*events, whole_slates=whole_slates), closed(*shuffled, whole_slates=whole_slates)
    assert Closed.of(window) == Closed.of(again)


@given(SLATES, st.lists(REPORTS), st.lists(REPORTS), st.booleans())
def test_answers_join_commutatively_associatively_and_idempotently(slate, some, others, whole_slate) -> None:
    def join(reports):
        return answered(slate, reports, whole_slate=whole_slate)

    assert join(some + others) == join(others + some) == join(some + others + some)


@given(SLATES, st.lists(REPORTS), REPORTS)
def test_another_report_only_adds_displays_or_moves_the_click_forward(slate, reports, another) -> None:
    shown, clicked = answered(slate, reports, whole_slate=False)
    shown_then, clicked_then = answered(slate, [*reports, another], whole_slate=False)
    if clicked:
        assert clicked_then
        assert shown_then <= shown
    else:
        assert clicked_then or shown_then >= shown
