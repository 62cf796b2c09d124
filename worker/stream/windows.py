"""Windows of open sessions, and the displays that count when a window is closed.

Rules that hold in this file (docs/design.md §4):

- A session is (session_id, arrived_at). Its window is that of `arrived_at`: [k·window, (k+1)·window).
- Feedback belongs to a session if the id is the same and arrived_at ≤ occurred_at ≤ arrived_at + session_timeout. The
  join in `session.py` decides which displays it answers. Other feedback is no error: it does not count.
- A session opened with several slates (a crash while a version was late): the user saw one of them. Only the slates
  that match the most answers are considered, and a display counts only where all of these agree. The slate that the
  user saw is among them, because every answer matches it. So every display that counts was shown.
- Feedback is kept until the window of its own time is closed: sessions that could use it are closed by then.
- Where a share of the sessions is journaled, `opened` carries the share, and progress the number of all sessions.
- Neither the order nor the repetition of records matters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import fsum

import numpy as np
from msgspec import Struct

from worker.bandit.arrays import Floats
from worker.stream.budget import is_exploring
from worker.stream.contexts import pack_context
from worker.stream.decoding import MAX_FACT_LEAD
from worker.stream.events import MOST, FeedbackFact, Opened, Progress
from worker.stream.exclusions import pack_exclusions
from worker.stream.session import answered


class SessionPlan(Struct, frozen=True, order=True, gc=False):
    """The plan of a session, in little memory.

    `context` and `exclude` are packed; `explored` counts the positions of the slate that explored, `exploring` says
    whether it counts as exploring for the budget of learning.
    """

    parameters_version: int
    slate: tuple[str, ...]
    context: bytes
    exclude: bytes
    explored: int
    exploring: bool = False


class Answer(Struct, frozen=True, gc=False):
    """A feedback record without its session."""

    occurred_at: int
    position: int
    arm: str
    clicked: bool


Display = tuple[int, str, bool]  # position, arm, clicked


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """The sessions of a window, sorted by key, and their displays that count.

    Parameters
    ----------
    plans : the plan of each session
    rows, positions, arms, clicked : per display that was answered, its session (an index into `plans`), its position
        from 1, its arm, and whether it was clicked
    unanswered : position and arm of each display that was shown and not answered: the one after the last answer
    shares : per session, the share of such sessions that is journaled; empty if all are
    opened : the number of sessions that serving has counted; 0 where all are journaled
    """

    start: int
    end: int
    plans: list[SessionPlan]
    rows: list[int]
    positions: list[int]
    arms: list[str]
    clicked: list[bool]
    unanswered: list[tuple[int, str]]
    shares: list[float] = field(default_factory=list)
    opened: int = 0

    @property
    def sessions(self) -> int:
        """The number of all sessions, journaled or not."""
        return max(len(self.plans), self.opened)

    @property
    def weights(self) -> Floats | None:
        """The number of sessions that each plan stands for, (n,); None if each is one."""
        return 1.0 / np.array(self.shares) if self.shares else None

    @property
    def exploring(self) -> float:
        """The number of all sessions that explored."""
        if not self.shares:
            return float(sum(plan.exploring for plan in self.plans))
        return fsum(1.0 / share for share, plan in zip(self.shares, self.plans, strict=True) if plan.exploring)


class _Window:
    __slots__ = ("answered_sessions", "first_offset", "opened", "sessions", "shares")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.sessions: dict[tuple[str, int], SessionPlan | set[SessionPlan]] = {}
        self.shares: dict[tuple[str, int], float] = {}  # of the sessions whose share is below 1
        self.opened: dict[tuple[int, int], int] = {}  # by partition and start of the window
        self.answered_sessions: list[str] = []  # with feedback of this window's time


class OpenWindows:
    """Sessions and feedback by window, until the windows are closed.

    Examples
    --------
    >>> windows = OpenWindows(window=1000)
    >>> windows.open(0, Opened(session_id="s", arrived_at=1, context=(0.5,), slate=("a", "b"), modes=("exploit",) * 2,
    ...                        exclude=(), parameters_version=0))
    True
    >>> windows.answer(1, FeedbackFact(session_id="s", occurred_at=5, position=2, arm="b", clicked=True))
    True
    >>> closed = windows.close(1000, session_timeout=60, whole_slates=False)
    >>> list(zip(closed.arms, closed.clicked))
    [('a', False), ('b', True)]
    """

    def __init__(self, *, window: int, closed_until: int = 0) -> None:
        self._window = window
        self._closed_until = closed_until
        self._windows: dict[int, _Window] = {}
        self._answers: dict[str, Answer | set[Answer]] = {}
        self._names: dict[str, str] = {}  # one string object per arm, not one per record

    @property
    def closed_until(self) -> int:
        """The end of the closed time: a record from before it is late."""
        return self._closed_until

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return sum(len(window.sessions) for window in self._windows.values())

    @property
    def needed_from(self) -> int | None:
        """The oldest journal offset that an open window still needs."""
        return min((window.first_offset for window in self._windows.values()), default=None)

    # ── collecting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, offset: int, event: Opened) -> bool:
        """Add a session; return False if it is late."""
        arrived_at = event.arrived_at
        if arrived_at < self._closed_until:
            return False
        name = self._names.setdefault
        plan = SessionPlan(
            event.parameters_version,
            tuple([name(arm, arm) for arm in event.slate]),
            pack_context(event.context),
            pack_exclusions(event.exclude),
            event.modes.count("explore"),
            is_exploring(event.modes),
        )
        key = (event.session_id, arrived_at)
        window = self._windows.get(arrived_at // self._window) or self._begin(arrived_at, offset)
        known = window.sessions.setdefault(key, plan)
        if event.share is not None or window.shares:
            _note_share(window.shares, key, event.share, is_new=known is plan)
        if known is not plan and known != plan:
            if isinstance(known, SessionPlan):
                window.sessions[key] = {known, plan}
            else:
                known.add(plan)
        return True

    def answer(self, offset: int, event: FeedbackFact) -> bool:
        """Add feedback; return False if it is late."""
        occurred_at = event.occurred_at
        if occurred_at < self._closed_until:
            return False
        answer = Answer(occurred_at, event.position, self._names.setdefault(event.arm, event.arm), event.clicked)
        window = self._windows.get(occurred_at // self._window) or self._begin(occurred_at, offset)
        known = self._answers.setdefault(event.session_id, answer)
        if known is not answer:
            if known == answer:
                return True
            if isinstance(known, Answer):
                self._answers[event.session_id] = {known, answer}
            elif answer in known:
                return True
            else:
                known.add(answer)
        window.answered_sessions.append(event.session_id)
        return True

    def count(self, offset: int, event: Progress) -> None:
        """Note how many sessions of open windows a partition has opened; of several counts the highest is right."""
        for start, sessions in event.opened or ():
            if self._closed_until <= start <= event.time + MAX_FACT_LEAD:
                window = self._windows.get(start // self._window) or self._begin(start, offset)
                key = (event.partition, start)
                window.opened[key] = max(window.opened.get(key, 0), sessions)

    def _begin(self, time: int, offset: int) -> _Window:
        window = self._windows[time // self._window] = _Window(offset)
        return window

    def resize(self, window: int) -> None:
        """Change the length of the windows; closed time stays closed."""
        if window == self._window:
            return
        before, self._window, self._windows = self._windows, window, {}
        for old in before.values():
            for key, plans in old.sessions.items():
                moved = self._moved(key[1], old.first_offset)
                moved.sessions[key] = plans
                if key in old.shares:
                    moved.shares[key] = old.shares[key]
            for of, sessions in old.opened.items():
                self._moved(of[1], old.first_offset).opened[of] = sessions
            for session in set(old.answered_sessions):
                for answer in _several(self._answers[session]):
                    self._moved(answer.occurred_at, old.first_offset).answered_sessions.append(session)

    def _moved(self, time: int, offset: int) -> _Window:
        window = self._windows.get(time // self._window) or self._begin(time, offset)
        window.first_offset = min(window.first_offset, offset)
        return window

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, until: int) -> list[int]:
        """Return the ends, rising, of the windows with something in them that end by `until`."""
        return sorted(end for end in ((k + 1) * self._window for k in self._windows) if end <= until)

    def close(self, end: int, *, session_timeout: int, whole_slates: bool) -> ClosedWindow:
        """Close the window that ends at `end`: everything before is late from now on.

        With `whole_slates`, a session without a click counts as having passed over its whole slate.
        """
        window = self._windows.pop(end // self._window - 1)
        try:
            return self._joined(window, end, session_timeout=session_timeout, whole_slates=whole_slates)
        finally:  # also after an error: the window is closed, whatever became of it
            self._expire(window, end)
            self._names.clear()
            self.skip(end)

    def _joined(self, window: _Window, end: int, *, session_timeout: int, whole_slates: bool) -> ClosedWindow:
        closed = ClosedWindow(
            start=end - self._window,
            end=end,
            plans=[],
            rows=[],
            positions=[],
            arms=[],
            clicked=[],
            unanswered=[],
            shares=[window.shares.get(key, 1.0) for key in sorted(window.sessions)] if window.shares else [],
            opened=min(sum(window.opened.values()), MOST),
        )
        for row, key in enumerate(sorted(window.sessions)):
            plans = window.sessions[key]
            answers = self._belonging(key, session_timeout)
            if isinstance(plans, SessionPlan):
                closed.plans.append(plans)
                shown, clicked = answered(plans.slate, answers, whole_slate=whole_slates)
                _count(closed, row, plans.slate, shown, clicked)
                if not clicked and shown < len(plans.slate):
                    closed.unanswered.append((shown + 1, plans.slate[shown]))
            else:
                plan, displays = agreed(plans, answers, whole_slate=whole_slates)
                closed.plans.append(plan)
                for position, arm, clicked in displays:
                    _count(closed, row, (arm,), 1, clicked, first=position)
        return closed

    def skip(self, until: int) -> None:
        """Close the time before `until`, in which there is nothing."""
        self._closed_until = max(self._closed_until, until)

    def _belonging(self, key: tuple[str, int], session_timeout: int) -> Collection[Answer]:
        known = self._answers.get(key[0])
        if known is None:
            return ()
        first, last = key[1], key[1] + session_timeout
        if isinstance(known, Answer):
            return (known,) if first <= known.occurred_at <= last else ()
        return [answer for answer in known if first <= answer.occurred_at <= last]

    def _expire(self, window: _Window, end: int) -> None:
        """Drop feedback of closed times."""
        for session in window.answered_sessions:
            known = self._answers.get(session)
            if isinstance(known, set):
                left = {answer for answer in known if answer.occurred_at >= end}
                if left:
                    self._answers[session] = left
                else:
                    del self._answers[session]
            elif known is not None and known.occurred_at < end:
                del self._answers[session]


def _note_share(shares: dict[tuple[str, int], float], key: tuple[str, int], share: float | None, is_new: bool) -> None:
    """Note the share of a session, if it is below 1; of several plans the highest counts."""
    if is_new:
        if share is not None and share < 1:
            shares[key] = share
    elif key in shares:
        shares[key] = max(shares[key], 1.0 if share is None else share)


def _several(known: Answer | set[Answer]) -> Collection[Answer]:
    return (known,) if isinstance(known, Answer) else known


def _count(
    closed: ClosedWindow, row: int, slate: tuple[str, ...], shown: int, clicked: bool, *, first: int = 1
) -> None:
    """Add the first displays of a slate, from the position `first` on, all passed over but possibly the last."""
    if shown:
        closed.rows.extend([row] * shown)
        closed.positions.extend(range(first, first + shown))
        closed.arms.extend(slate[:shown])
        closed.clicked.extend([False] * (shown - 1))
        closed.clicked.append(clicked)


# ── several slates ───────────────────────────────────────────────────────────────────────────────────────────────────


def agreed(
    plans: Iterable[SessionPlan], answers: Collection[Answer], *, whole_slate: bool
) -> tuple[SessionPlan, list[Display]]:
    """Return the plan that represents a session opened with several, and the displays that count.

    >>> one, two = (SessionPlan(version, slate, b"", b"", 0) for version, slate in ((0, ("a", "b")), (1, ("c", "b"))))
    >>> agreed([one, two], [Answer(10, 2, "b", True)], whole_slate=False)[1]
    [(2, 'b', True)]
    >>> agreed([one, two], [Answer(10, 2, "b", True), Answer(9, 1, "c", False)], whole_slate=False)[1]
    [(1, 'c', False), (2, 'b', True)]
    """
    said = {(answer.position, answer.arm) for answer in answers}
    matches = {plan: sum((h, arm) in said for h, arm in enumerate(plan.slate, 1)) for plan in plans}
    most = max(matches.values())
    likely = sorted(plan for plan, count in matches.items() if count == most)
    if len({plan.context for plan in likely}) > 1:
        return likely[0], []  # two users under one key: their displays cannot be told apart
    common: set[Display] | None = None
    for plan in likely:
        shown, clicked = answered(plan.slate, answers, whole_slate=whole_slate)
        displays = {(h, plan.slate[h - 1], clicked and h == shown) for h in range(1, shown + 1)}
        common = displays if common is None else common & displays
    return likely[0], sorted(common or ())
