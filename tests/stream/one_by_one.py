"""Windows that join one session at a time, in plain Python. The slow reference."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from worker.stream.contexts import pack_context
from worker.stream.events import FeedbackFact, Opened
from worker.stream.joining import SlateColumns
from worker.stream.session import answered, pack_exclusions
from worker.stream.windows import ClosedWindow, SessionPlan


class Answer(Struct, frozen=True):
    """A feedback record without its session."""

    occurred_at: int
    position: int
    arm: str
    clicked: bool


@dataclass(slots=True, kw_only=True)
class Closed:
    """A closed window as lists."""

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
        """Return the lists of a window, which can be compared."""
        return cls(
            start=window.start,
            end=window.end,
            plans=window.plans,
            rows=window.rows.tolist(),
            positions=window.positions.tolist(),
            arms=window.arms,
            clicked=window.clicked.tolist(),
            unanswered=window.unanswered,
            uncertain=window.uncertain,
        )

    def in_columns(self) -> ClosedWindow:
        """Return the window as the learner folds it."""
        slates = SlateColumns.of([plan.slate for plan in self.plans])
        return ClosedWindow(
            start=self.start,
            end=self.end,
            plans=self.plans,
            slates=slates,
            rows=np.array(self.rows, dtype=np.intp),
            positions=np.array(self.positions, dtype=np.intp),
            codes=np.array([slates.names[arm] for arm in self.arms], dtype=np.intp),
            clicked=np.array(self.clicked, dtype=np.bool_),
            unanswered_positions=np.array([position for position, _ in self.unanswered], dtype=np.intp),
            unanswered_codes=np.array([slates.names[arm] for _, arm in self.unanswered], dtype=np.intp),
            uncertain=self.uncertain,
        )


class _Window:
    __slots__ = ("answered_sessions", "first_offset", "sessions")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.sessions: dict[tuple[str, int], set[SessionPlan | None]] = {}
        self.answered_sessions: list[str] = []  # with feedback of this window's time


class WindowsOneByOne:
    """Sessions and feedback by window: every record is taken, joined and dropped by itself."""

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
        )
        key = (event.session_id, arrived_at)
        window = self._windows.get(arrived_at // self._window) or self._begin(arrived_at, offset)
        window.sessions.setdefault(key, set()).add(None if event.uncertain else plan)
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

    def _begin(self, time: int, offset: int) -> _Window:
        window = self._windows[time // self._window] = _Window(offset)
        return window

    def resize(self, window: int) -> None:
        """Change the length of the windows; closed time stays closed."""
        if window == self._window:
            return
        length = self._window
        before, self._window, self._windows = self._windows, window, {}
        for old in before.values():
            for key, plans in old.sessions.items():
                self._moved(key[1], old.first_offset).sessions[key] = plans
            for session in set(old.answered_sessions):
                for answer in _several(self._answers[session]):
                    if answer.occurred_at // length in before and before[answer.occurred_at // length] is not old:
                        continue  # is moved with its own window
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
        closed = Closed(start=end - self._window, end=end)
        for key in sorted(window.sessions):
            plan, *others = window.sessions[key]
            if plan is None or others:
                closed.uncertain += 1
                continue
            shown, clicked = answered(plan.slate, self._belonging(key, session_timeout), whole_slate=whole_slates)
            _count(closed, len(closed.plans), plan.slate, shown, clicked)
            closed.plans.append(plan)
            if not clicked and shown < len(plan.slate):
                closed.unanswered.append((shown + 1, plan.slate[shown]))
        return closed.in_columns()

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


def _several(known: Answer | set[Answer]) -> Collection[Answer]:
    return (known,) if isinstance(known, Answer) else known


def _count(closed: Closed, row: int, slate: tuple[str, ...], shown: int, clicked: bool) -> None:
    """Add the first displays of a slate, all passed over but possibly the last."""
    if shown:
        closed.rows.extend([row] * shown)
        closed.positions.extend(range(1, 1 + shown))
        closed.arms.extend(slate[:shown])
        closed.clicked.extend([False] * (shown - 1))
        closed.clicked.append(clicked)
