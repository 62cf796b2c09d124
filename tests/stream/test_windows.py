"""Windows, the join, and which displays count."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worker.stream.windows as windows_module
from tests.stream.scenes import feedback, opened
from worker.stream.contexts import pack_context
from worker.stream.events import FeedbackFact, Opened
from worker.stream.joining import ClosedWindow, SessionPlan
from worker.stream.session import answered, pack_exclusions
from worker.stream.windows import OpenWindows

WINDOW, TIMEOUT = 1000, 300


def closed(*events, end=WINDOW, whole_slates=False) -> ClosedWindow:
    windows = OpenWindows(window=WINDOW)
    for offset, event in enumerate(events):
        assert windows.open(offset, event) if isinstance(event, Opened) else windows.answer(offset, event)
    return windows.close(end, session_timeout=TIMEOUT, whole_slates=whole_slates)


def arms_of(window: ClosedWindow, *, answered: bool = True) -> list[str]:
    """Return the arms of the displays of a window that were answered, or of the others."""
    names = list(window.slates.names)
    return [names[code] for code in window.codes[window.answered == answered].tolist()]


def displays(window: ClosedWindow) -> list[tuple[int, str, bool]]:
    counted = window.answered
    return list(zip(window.rows[counted], arms_of(window), window.clicked[counted], strict=True))


# ── the slow reference: one session at a time ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Closed:
    """A closed window as lists, which can be compared."""

    start: int
    end: int
    plans: list[SessionPlan] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    clicked: list[bool] = field(default_factory=list)
    unanswered: list[tuple[int, str]] = field(default_factory=list)
    uncertain: int = 0

    @classmethod
    def of(cls, window: ClosedWindow) -> Closed:
        """Return the lists of a window."""
        counted = window.answered
        return cls(
            start=window.start,
            end=window.end,
            plans=window.plans,
            rows=window.rows[counted].tolist(),
            positions=window.positions[counted].tolist(),
            arms=arms_of(window),
            clicked=window.clicked[counted].tolist(),
            unanswered=list(zip(window.positions[~counted], arms_of(window, answered=False), strict=True)),
            uncertain=window.uncertain,
        )

    def add(self, plan: SessionPlan, shown: int, clicked: bool) -> None:
        """Add a session of which `shown` displays count, all passed over but possibly the last."""
        self.rows += [len(self.plans)] * shown
        self.positions += range(1, 1 + shown)
        self.arms += plan.slate[:shown]
        self.clicked += [clicked and position == shown for position in range(1, 1 + shown)]
        self.plans.append(plan)
        if not clicked and shown < len(plan.slate):
            self.unanswered.append((shown + 1, plan.slate[shown]))


def time_of(event: Opened | FeedbackFact) -> int:
    return event.arrived_at if isinstance(event, Opened) else event.occurred_at


def plan_of(event: Opened) -> SessionPlan:
    context, exclusions = pack_context(event.context), pack_exclusions(event.exclude)
    explored = bytes(mode == "explore" for mode in event.modes)
    return SessionPlan(event.parameters_version, event.slate, context, exclusions, explored if any(explored) else b"")


class WindowsOneByOne:
    """Windows that keep every record of the time that is not closed, and join one session at a time."""

    def __init__(self, *, window: int) -> None:
        self.window = window
        self.closed_until = 0
        self.records: list[tuple[int, Opened | FeedbackFact]] = []

    def add(self, offset: int, event: Opened | FeedbackFact) -> bool:
        """Add a record; return False if it is late."""
        is_late = time_of(event) < self.closed_until
        if not is_late:
            self.records.append((offset, event))
        return not is_late

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len({(event.session_id, event.arrived_at) for _, event in self.records if isinstance(event, Opened)})

    @property
    def oldest(self) -> int | None:
        """The offset of the oldest record."""
        return min((offset for offset, _ in self.records), default=None)

    def due(self, until: int) -> list[int]:
        """Return the ends, rising, of the windows with something in them that end by `until`."""
        ends = {(time_of(event) // self.window + 1) * self.window for _, event in self.records}
        return sorted(end for end in ends if end <= until)

    def close(self, end: int, *, session_timeout: int, whole_slates: bool) -> Closed:
        """Close the window that ends at `end`: everything before is late from now on."""
        closed = Closed(start=end - self.window, end=end)
        facts = defaultdict[tuple[str, int], list[Opened]](list)
        for _, event in self.records:
            if isinstance(event, Opened) and event.arrived_at < end:
                facts[event.session_id, event.arrived_at].append(event)
        for (session_id, arrived_at), several in sorted(facts.items(), key=lambda item: item[0]):
            plan, *others = {plan_of(fact) for fact in several}
            if others or any(fact.uncertain for fact in several):
                closed.uncertain += 1
                continue
            reports = [
                event
                for _, event in self.records
                if isinstance(event, FeedbackFact)
                and event.session_id == session_id
                and arrived_at <= event.occurred_at <= arrived_at + session_timeout
            ]
            closed.add(plan, *answered(plan.slate, reports, whole_slate=whole_slates))
        self.closed_until = end
        self.records = [(offset, event) for offset, event in self.records if time_of(event) >= end]
        return closed


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
    assert bool(arms_of(window)) is counts


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
    assert len(arms_of(window)) == counted
    assert sum(window.clicked) == (counted == 2)


def test_a_session_without_a_slate_counts_as_a_session_and_has_no_displays() -> None:
    window = closed(opened(slate=()), feedback(1, "a", CLICK), whole_slates=True)
    assert len(window.plans) == 1
    assert not arms_of(window)


# ── uncertain sessions ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "facts",
    [
        [opened(uncertain=True)],
        [opened(), opened(uncertain=True)],
        [opened(slate=("a", "b")), opened(slate=("a", "c"))],
        [opened(parameters_version=3), opened(parameters_version=4)],
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
    window = closed(opened(), opened(), feedback(1, "a", CLICK))
    assert (displays(window), window.uncertain) == ([(0, "a", True)], 0)


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


# ── joined in arrays, against one session at a time ──────────────────────────────────────────────────────────────────


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
    assert (fast.needed_from, kept_answers(fast)) == (None, 0)


def kept_answers(windows: OpenWindows) -> int:
    """Return the number of feedback records that are kept."""
    return sum(len(window.answers) for window in windows._windows.values())


def test_repeated_feedback_takes_no_memory_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "LEAST_REPEATED", 100)
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened())
    reports = [feedback(position, "abc"[position - 1], False) for position in (1, 2, 3)]
    for offset in range(1, 1_000):
        for report in reports:
            windows.answer(offset, report)
        assert kept_answers(windows) <= 110
    assert arms_of(windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False)) == ["a", "b", "c"]


def test_the_longest_slate_takes_memory_for_itself_alone() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened("long", slate=("a",) * 100_000))
    for n in range(5_000):
        windows.open(n, opened(f"s{n}"))
    window = windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False)
    assert window.slates.codes.nbytes < 2_000_000
    assert window.slates.indices(np.array([1, 2]), {"b": 5}).tolist() == [[-1, 5, -1]] * 2
