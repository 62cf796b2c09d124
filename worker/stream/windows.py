"""Windows of sessions that are still open, and which of their displays count when a window is closed.

Rules that hold in this file (design.md §4):

- A session is (session_id, arrived_at). Its window is that of `arrived_at`: [k·window, (k+1)·window).
- Feedback belongs to a session if the id is the same, arrived_at ≤ occurred_at ≤ arrived_at + session_timeout, and the
  arm is what the slate has at that position. Anything else is no error: it just does not count.
- The answer of a session is the join (lowest clicked, highest passed) of its feedback. A click at h says that all
  before h was passed over, whatever else was reported; nothing after h counts. Without a click, everything up to the
  highest passed position was passed over; under `unanswered = "passed"` the whole slate was.
- A session opened with several slates (a crash while a version was late): the user saw one of them. Those that match
  the most reports are considered, and a display counts only where all of them say the same. So what is counted was
  displayed, provided that the slate which the user saw is among them, and it is: all reports match it.
- Feedback is kept until the window of its own time is closed: sessions that could use it are closed by then.
- Nothing depends on the order in which records came, nor on how often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec import Struct

from worker.stream.contexts import pack_context
from worker.stream.events import FeedbackFact, Opened


class Plan(Struct, frozen=True, order=True, gc=False):
    """What a session was opened with, in as little memory as will do; `explored` counts positions of the slate."""

    parameters_version: int
    slate: tuple[str, ...]
    context: bytes
    exclude: tuple[str, ...]
    explored: int


class Report(Struct, frozen=True, gc=False):
    """Feedback without the session it is kept under."""

    occurred_at: int
    position: int
    arm: str
    clicked: bool


Display = tuple[int, str, bool]  # position, arm, clicked


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """The sessions of a window, sorted by key, and the displays of theirs that count.

    Parameters
    ----------
    plans : what each session was opened with
    rows, arms, clicked : per display, its session (an index into `plans`), its arm, and whether it was clicked
    """

    start: int
    end: int
    plans: list[Plan]
    rows: list[int]
    arms: list[str]
    clicked: list[bool]


class _Window:
    __slots__ = ("first_offset", "reported", "sessions")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.sessions: dict[tuple[str, int], Plan | set[Plan]] = {}
        self.reported: list[str] = []  # sessions with feedback of this window's time


class OpenWindows:
    """Collects sessions and feedback by window until the windows are closed.

    Examples
    --------
    >>> windows = OpenWindows(window=1000)
    >>> windows.open(0, Opened(session_id="s", arrived_at=1, context=(0.5,), slate=("a", "b"), modes=("exploit",) * 2,
    ...                        exclude=(), parameters_version=0))
    True
    >>> windows.report(1, FeedbackFact(session_id="s", occurred_at=5, position=2, arm="b", clicked=True))
    True
    >>> closed = windows.close(1000, session_timeout=60, whole_slates=False)
    >>> list(zip(closed.arms, closed.clicked))
    [('a', False), ('b', True)]
    """

    def __init__(self, *, window: int, closed_until: int = 0) -> None:
        self._window = window
        self._closed_until = closed_until
        self._windows: dict[int, _Window] = {}
        self._reports: dict[str, Report | set[Report]] = {}
        self._names: dict[str, str] = {}  # one string per arm instead of one per record

    @property
    def closed_until(self) -> int:
        """Everything before this time is closed: a record of it is late."""
        return self._closed_until

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return sum(len(window.sessions) for window in self._windows.values())

    @property
    def needed_from(self) -> int | None:
        """The oldest journal offset that an open window still needs."""
        return min((window.first_offset for window in self._windows.values()), default=None)

    # ── collecting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, offset: int, event: Opened) -> bool:
        """Take a session in; return False if it is late."""
        arrived_at = event.arrived_at
        if arrived_at < self._closed_until:
            return False
        window = self._windows.get(arrived_at // self._window) or self._begin(arrived_at, offset)
        name = self._names.setdefault
        plan = Plan(
            event.parameters_version,
            tuple([name(arm, arm) for arm in event.slate]),
            pack_context(event.context),
            event.exclude,
            event.modes.count("explore"),
        )
        key = (event.session_id, arrived_at)
        known = window.sessions.setdefault(key, plan)
        if known is not plan and known != plan:
            if isinstance(known, Plan):
                window.sessions[key] = {known, plan}
            else:
                known.add(plan)
        return True

    def report(self, offset: int, event: FeedbackFact) -> bool:
        """Take feedback in; return False if it is late."""
        occurred_at = event.occurred_at
        if occurred_at < self._closed_until:
            return False
        window = self._windows.get(occurred_at // self._window) or self._begin(occurred_at, offset)
        report = Report(occurred_at, event.position, self._names.setdefault(event.arm, event.arm), event.clicked)
        known = self._reports.setdefault(event.session_id, report)
        if known is not report:
            if known == report:
                return True
            if isinstance(known, Report):
                self._reports[event.session_id] = {known, report}
            elif report in known:
                return True
            else:
                known.add(report)
        window.reported.append(event.session_id)
        return True

    def _begin(self, time: int, offset: int) -> _Window:
        window = self._windows[time // self._window] = _Window(offset)
        return window

    def resize(self, window: int) -> None:
        """Go on with windows of another length; what is closed stays closed."""
        if window == self._window:
            return
        before, self._window, self._windows = self._windows, window, {}
        for old in before.values():
            for key, plans in old.sessions.items():
                self._moved(key[1], old.first_offset).sessions[key] = plans
            for session in set(old.reported):
                for report in _several(self._reports[session]):
                    self._moved(report.occurred_at, old.first_offset).reported.append(session)

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
        closed = ClosedWindow(start=end - self._window, end=end, plans=[], rows=[], arms=[], clicked=[])
        for row, key in enumerate(sorted(window.sessions)):
            plans = window.sessions[key]
            reports = self._belonging(key, session_timeout)
            if isinstance(plans, Plan):
                closed.plans.append(plans)
                if reports or whole_slates:
                    _count(closed, row, plans.slate, *answered(plans.slate, reports, whole_slate=whole_slates))
            else:
                plan, displays = agreed(plans, reports, whole_slate=whole_slates)
                closed.plans.append(plan)
                for _, arm, clicked in displays:
                    _count(closed, row, (arm,), 1, clicked)
        self._forget(window, end)
        self._names.clear()
        self.skip(end)
        return closed

    def skip(self, until: int) -> None:
        """Count everything before `until` as closed, because nothing is in it."""
        self._closed_until = max(self._closed_until, until)

    def _belonging(self, key: tuple[str, int], session_timeout: int) -> Collection[Report]:
        known = self._reports.get(key[0])
        if known is None:
            return ()
        first, last = key[1], key[1] + session_timeout
        if isinstance(known, Report):
            return (known,) if first <= known.occurred_at <= last else ()
        return [report for report in known if first <= report.occurred_at <= last]

    def _forget(self, window: _Window, end: int) -> None:
        """Drop feedback of times that are closed."""
        for session in window.reported:
            known = self._reports.get(session)
            if isinstance(known, set):
                left = {report for report in known if report.occurred_at >= end}
                if left:
                    self._reports[session] = left
                else:
                    del self._reports[session]
            elif known is not None and known.occurred_at < end:
                del self._reports[session]


def _several(known: Report | set[Report]) -> Collection[Report]:
    return (known,) if isinstance(known, Report) else known


def _count(closed: ClosedWindow, row: int, slate: tuple[str, ...], shown: int, clicked: bool) -> None:
    """Add the first displays of a slate, all passed over but possibly the last."""
    if shown:
        closed.rows.extend([row] * shown)
        closed.arms.extend(slate[:shown])
        closed.clicked.extend([False] * (shown - 1))
        closed.clicked.append(clicked)


# ── the join ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(slate: tuple[str, ...], reports: Iterable[Report], *, whole_slate: bool) -> tuple[int, bool]:
    """Return how many displays of a slate count, from the first on, and whether the last of them was clicked.

    >>> passed = Report(10, 1, "a", False)
    >>> answered(("a", "b", "c"), [passed], whole_slate=False)
    (1, False)
    >>> answered(("a", "b", "c"), [passed, Report(11, 2, "b", True), Report(12, 3, "c", False)], whole_slate=False)
    (2, True)
    """
    length = len(slate)
    lowest_clicked, highest_passed = length + 1, 0
    for report in reports:
        position = report.position
        if 1 <= position <= length and slate[position - 1] == report.arm:
            if report.clicked:
                lowest_clicked = min(lowest_clicked, position)
            else:
                highest_passed = max(highest_passed, position)
    if lowest_clicked <= length:
        return lowest_clicked, True
    return (length if whole_slate else highest_passed), False


def agreed(plans: Iterable[Plan], reports: Collection[Report], *, whole_slate: bool) -> tuple[Plan, list[Display]]:
    """Return which plan stands for a session that was opened with several, and the displays that count.

    >>> one, two = (Plan(version, slate, b"", (), 0) for version, slate in ((0, ("a", "b")), (1, ("c", "b"))))
    >>> agreed([one, two], [Report(10, 2, "b", True)], whole_slate=False)[1]
    [(2, 'b', True)]
    >>> agreed([one, two], [Report(10, 2, "b", True), Report(9, 1, "c", False)], whole_slate=False)[1]
    [(1, 'c', False), (2, 'b', True)]
    """
    said = {(report.position, report.arm) for report in reports}
    matches = {plan: sum((h, arm) in said for h, arm in enumerate(plan.slate, 1)) for plan in plans}
    most = max(matches.values())
    likely = sorted(plan for plan, count in matches.items() if count == most)
    if len({plan.context for plan in likely}) > 1:
        return likely[0], []  # two different users under one key: nobody can tell who saw what
    common: set[Display] | None = None
    for plan in likely:
        shown, clicked = answered(plan.slate, reports, whole_slate=whole_slate)
        displays = {(h, plan.slate[h - 1], clicked and h == shown) for h in range(1, shown + 1)}
        common = displays if common is None else common & displays
    return likely[0], sorted(common or ())
