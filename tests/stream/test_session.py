"""A session's state as a join: tables of transitions, then the laws."""

from __future__ import annotations

import pytest

from worker.stream.events import Feedback
from worker.stream.session import Session

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
