"""A session's state as a join: tables of transitions, then the laws."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.stream.events import Feedback
from worker.stream.session import Parked, ParkedRecord, Session, decode_state, encode_state

SLATE = ("coat", "shoe", "cap")


def session(slate: tuple[str, ...] = SLATE, clicked: int = 0, passed: int = 0) -> Session:
    modes = ("explore",) * len(slate)
    values = tuple(float(len(slate) - h) for h in range(len(slate)))
    return Session(1_000, 11_000, b"", (), 4, slate, modes, None, values, clicked, passed)


def answer(position: int, clicked: bool, *, at: int = 5_000, arm: str | None = None) -> Feedback:
    shown = SLATE[position - 1] if arm is None else arm
    return Feedback(session_id="s", occurred_at=at, position=position, arm=shown, clicked=clicked)


@pytest.mark.parametrize(
    ("before", "feedback", "verdict", "after"),
    [
        ((0, 0), answer(1, False), "applied", (0, 1)),
        ((0, 0), answer(1, True), "applied", (1, 0)),
        ((0, 0), answer(3, True), "applied", (3, 2)),  # a click implies that everything before was passed
        ((0, 0), answer(3, False), "applied", (0, 3)),
        ((0, 1), answer(1, False), "redundant", (0, 1)),
        ((0, 2), answer(1, False), "redundant", (0, 2)),
        ((2, 1), answer(2, True), "redundant", (2, 1)),
        ((3, 2), answer(2, True), "applied", (2, 2)),  # the lowest click counts
        ((2, 1), answer(3, True), "applied", (2, 2)),
        ((2, 1), answer(3, False), "applied", (2, 3)),
        ((0, 0), answer(1, True, arm="cap"), "arm-mismatch", (0, 0)),
        ((0, 0), answer(1, True, at=999), "outside", (0, 0)),
        ((0, 0), answer(1, True, at=1_000), "applied", (1, 0)),
        ((0, 0), answer(1, True, at=11_000), "applied", (1, 0)),
        ((0, 0), answer(1, True, at=11_001), "outside", (0, 0)),
    ],
)
def test_feedback_joins_lowest_click_and_highest_pass(before, feedback, verdict, after) -> None:
    state = session(clicked=before[0], passed=before[1])
    assert state.apply(feedback) == verdict
    assert (state.clicked, state.passed) == after


def test_a_position_beyond_a_short_slate_is_refused() -> None:
    assert session(slate=("coat",)).apply(answer(2, True)) == "position"


@pytest.mark.parametrize(
    ("state", "is_open", "ending"),
    [
        (session(), True, "expired"),
        (session(passed=2), True, "expired"),
        (session(passed=3), False, "exhausted"),
        (session(clicked=1), False, "clicked"),
        (session(clicked=3, passed=3), False, "clicked"),
        (session(slate=()), False, "empty"),
    ],
)
def test_a_session_is_open_until_a_click_or_the_end_of_its_slate(state: Session, is_open: bool, ending: str) -> None:
    assert (state.is_open, state.ending) == (is_open, ending)


records = st.builds(answer, st.integers(1, 3), st.booleans(), at=st.sampled_from([500, 1_000, 7_000, 11_001]))


@given(st.lists(records, max_size=4))
def test_the_order_of_feedback_does_not_matter(feedback: list[Feedback]) -> None:
    ends = set()
    for order in permutations(feedback):
        state = session()
        for one in order:
            state.apply(one)
        ends.add((state.clicked, state.passed))
    assert len(ends) == 1


@given(st.lists(records, max_size=6))
def test_repeated_feedback_changes_nothing(feedback: list[Feedback]) -> None:
    state = session()
    for one in feedback:
        state.apply(one)
    end = (state.clicked, state.passed)
    assert {state.apply(one) for one in feedback} <= {"redundant", "outside"}
    assert (state.clicked, state.passed) == end


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_table_value_comes_back_as_it_was(clicked: int, passed: int) -> None:
    state = session(clicked=clicked, passed=passed)
    assert decode_state(encode_state(state)) == state
    parked = Parked(7, [ParkedRecord(1, 2, b"\x00\xff"), ParkedRecord(3, 4, b"")])
    assert decode_state(encode_state(parked)) == parked
