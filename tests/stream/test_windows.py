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
from worker.stream.windows import Answer, ClosedWindow, OpenWindows, SessionPlan, agreed

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
    window = closed(opened(slate=(), modes=("none",)), feedback(1, "a", CLICK), whole_slates=True)
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


# ── several slates for one session ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("slates", "reports", "counted"),
    [
        # Only one of them fits the reports: it is the one that was shown.
        ([("a", "b"), ("c", "d")], [(1, "c", PASS)], [("c", PASS)]),
        ([("a", "b"), ("c", "d")], [(2, "d", CLICK)], [("c", PASS), ("d", CLICK)]),
        # Both fit: the first position differs, so its arm is unknown.
        ([("a", "b"), ("c", "b")], [(2, "b", CLICK)], [("b", CLICK)]),
        ([("a", "b"), ("a", "c")], [(1, "a", PASS)], [("a", PASS)]),
        # They fit equally well, and contradict each other.
        ([("a", "b"), ("c", "d")], [(1, "a", PASS), (2, "d", CLICK)], []),
        # A repeated report has no weight.
        ([("a", "b"), ("a", "d")], [(1, "a", PASS), (1, "a", PASS), (2, "d", PASS)], [("a", PASS), ("d", PASS)]),
        ([("a", "b"), ("c", "d"), ("e", "f")], [], []),
        ([("a",), ("a", "b")], [(1, "a", PASS)], [("a", PASS)]),
    ],
)
def test_of_several_slates_those_that_fit_best_count_where_they_agree(slates, reports, counted) -> None:
    for order in permutations(slates):
        events = [opened(slate=slate) for slate in order] + [feedback(*report) for report in reports]
        assert displays(closed(*events)) == [(0, arm, clicked) for arm, clicked in counted]


def test_unanswered_slates_that_differ_count_as_passed_only_where_they_agree() -> None:
    window = closed(opened(slate=("a", "b")), opened(slate=("a", "c")), whole_slates=True)
    assert displays(window) == [(0, "a", False)]


def test_the_same_slate_from_two_versions_is_one_slate_served_by_the_older() -> None:
    window = closed(opened(parameters_version=4), opened(parameters_version=3), feedback(1, "a", CLICK))
    assert displays(window) == [(0, "a", True)]
    assert window.plans[0].parameters_version == 3


def test_two_users_under_one_key_train_nothing() -> None:
    assert not closed(opened(context=(0.5,)), opened(context=(0.6,)), feedback(1, "a", CLICK)).arms


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ARMS = st.sampled_from("abc")
SLATES = st.lists(ARMS, max_size=4).map(tuple)
REPORTS = st.builds(Answer, occurred_at=st.integers(0, 9), position=st.integers(1, 5), arm=ARMS, clicked=st.booleans())
EVENTS = st.lists(
    st.one_of(
        st.builds(
            opened,
            session_id=st.sampled_from("st"),
            arrived_at=st.sampled_from([100, 200, 999]),
            slate=SLATES,
            parameters_version=st.integers(0, 2),
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


@given(st.lists(SLATES, min_size=1, max_size=4), st.data(), st.booleans())
def test_only_displays_count_whatever_else_was_planned(slates, data, whole_slate) -> None:
    """The user saw one of the slates, and every report is about it."""
    true = data.draw(st.sampled_from(slates))
    click = data.draw(st.integers(1, len(true) + 1))  # after the end: none
    seen = true[:click]
    reported = data.draw(st.sets(st.integers(1, len(seen)))) if seen else set()
    reports = [Answer(0, h, seen[h - 1], h == click) for h in reported]
    plans = [SessionPlan(version, slate, b"", b"", 0) for version, slate in enumerate(slates)]
    _, counted = agreed(plans, reports, whole_slate=whole_slate and click not in range(1, len(true) + 1))
    for position, arm, clicked in counted:
        assert position <= len(seen)
        assert arm == seen[position - 1]
        assert clicked == (position == click)


@given(st.lists(SLATES, min_size=1, max_size=4), st.lists(REPORTS), st.booleans())
def test_one_slate_is_the_simplest_case_of_several(slates, reports, whole_slate) -> None:
    slate = slates[0]
    plan, counted = agreed([SessionPlan(0, slate, b"", b"", 0)] * 2, reports, whole_slate=whole_slate)
    shown, clicked = answered(slate, reports, whole_slate=whole_slate)
    assert plan.slate == slate
    assert counted == [(h, slate[h - 1], clicked and h == shown) for h in range(1, shown + 1)]
