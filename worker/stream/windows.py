"""Event time in the learner: the watermark, and windows of open sessions until they are closed.

Rules that hold in this file (docs/design.md §4):

- **Watermark** = lowest progress over all partitions. A partition that has not reported is at 0, which closes nothing.
- The number of partitions is the highest in any progress record: if topics grow, the watermark waits for the new
  partitions. It falls to a lower number when, since the newest version, all partitions of that number have named it
  for window + session_timeout + lateness and nobody has named more: then the higher number was an error.
- A session is (session_id, arrived_at). Its window is that of `arrived_at`: [k·window, (k+1)·window).
- Feedback belongs to a session if the id is the same and arrived_at ≤ occurred_at ≤ arrived_at + session_timeout. The
  join in `session.py` decides which displays it answers. Other feedback is no error: it does not count.
- A session is uncertain if any of its facts says so, or if two of them differ: the user may have seen another slate (a
  crash while a version was late). It is counted, and not learned from.
- Feedback is kept until the window of its own time is closed: sessions that could use it are closed by then.
- Neither the order nor the repetition of records matters.
- All that can wait is done when a window is closed (`joining.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from worker.stream.contexts import pack_context
from worker.stream.events import FeedbackFact, Mode, Opened, Progress
from worker.stream.joining import AnswerColumns, ClosedWindow, OpenSessions, SessionPlan, closed_window
from worker.stream.session import pack_exclusions


class Watermark:
    """The highest progress of each partition.

    >>> watermark = Watermark({})
    >>> for partition in (0, 1):
    ...     watermark.advance(Progress(partition=partition, partitions=2, time=1_000 + partition), span=60_000)
    >>> watermark.time, watermark.slowest, watermark.reached
    (1000, 0, 1001)
    """

    def __init__(self, progress: Mapping[int, int]) -> None:
        self._progress = dict(progress)
        self.forget_lower_count()

    @property
    def time(self) -> int:
        """How far every partition has come; 0 until all have reported."""
        return min(self._progress.values(), default=0)

    @property
    def slowest(self) -> int:
        """The partition that holds the watermark back; -1 before any progress."""
        return min(self._progress, key=lambda partition: self._progress[partition], default=-1)

    @property
    def reached(self) -> int:
        """How far any partition has come; 0 before any progress."""
        return max(self._progress.values(), default=0)

    def by_partition(self) -> dict[int, int]:
        """Return the highest progress of each partition."""
        return dict(self._progress)

    def advance(self, event: Progress, *, span: int) -> None:
        """Apply a progress record; `span` is how long a lower number of partitions is to be named."""
        for partition in range(len(self._progress), event.partitions):
            self._progress[partition] = 0
        if event.partitions == len(self._progress):
            self.forget_lower_count()
        elif self._is_confirmed(event, span):
            self._progress = {partition: self._progress[partition] for partition in range(event.partitions)}
            self.forget_lower_count()
        self._progress[event.partition] = max(self._progress[event.partition], event.time)

    def forget_lower_count(self) -> None:
        """Count anew who names a lower number of partitions, as after a restart from a version made now."""
        self._lower_count = 0
        self._named_since: dict[int, int] = {}  # when each partition first named it

    def _is_confirmed(self, event: Progress, span: int) -> bool:
        """Count a record that names a lower number of partitions; return whether all have named it for that long."""
        if event.partitions != self._lower_count:
            self._lower_count, self._named_since = event.partitions, {}
        since = self._named_since
        since.setdefault(event.partition, event.time)
        return len(since) == event.partitions and event.time - max(since.values()) >= span


#: Modes of a session whose whole slate is drawn uniformly.
_DRAWN: Final[frozenset[Mode]] = frozenset(("warmup", "random"))

#: Feedback records of a window, per open session and in all, above which repeated ones are dropped. With fewer,
#: repetition costs little memory.
REPEATED_PER_SESSION: Final = 16
LEAST_REPEATED: Final = 65_536


class _Window:
    __slots__ = ("answers", "first_offset", "sessions", "unrepeated")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.sessions: OpenSessions = {}
        self.answers = AnswerColumns()  # feedback of this window's time
        self.unrepeated = 0  # feedback records when repeated ones were last dropped


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
    >>> list(zip(closed.positions.tolist(), closed.clicked.tolist()))
    [(1, False), (2, True)]
    """

    def __init__(self, *, window: int, closed_until: int = 0) -> None:
        self._window = window
        self.closed_until = closed_until  # a record from before it is late
        self._windows: dict[int, _Window] = {}
        self._names: dict[str, str] = {}  # one string object per arm, not one per record

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
        """Add a session; return False if it is late. An error leaves everything as it was."""
        if event.arrived_at < self.closed_until:
            return False
        plan = None if event.uncertain else self._plan(event)
        sessions = self._at(event.arrived_at // self._window, offset).sessions
        key = event.session_id, event.arrived_at
        known = sessions.setdefault(key, plan)
        if known is not plan and known != plan:
            sessions[key] = None
        return True

    def _plan(self, event: Opened) -> SessionPlan:
        name = self._names.setdefault
        return SessionPlan(
            event.parameters_version,
            tuple([name(arm, arm) for arm in event.slate]),
            pack_context(event.context),
            pack_exclusions(event.exclude),
            bytes([mode == "explore" for mode in event.modes]) if "explore" in event.modes else b"",
            not _DRAWN.isdisjoint(event.modes),
            "control" in event.modes,
        )

    def answer(self, offset: int, event: FeedbackFact) -> bool:
        """Add feedback; return False if it is late."""
        time, arm = event.occurred_at, event.arm
        if time < self.closed_until:
            return False
        window = self._at(time // self._window, offset)
        window.answers.append(event.session_id, time, event.position, self._names.setdefault(arm, arm), event.clicked)
        self._drop_repeated(window)
        return True

    def _at(self, number: int, offset: int) -> _Window:
        """Return a window, begun if need be, that needs the journal from this offset on."""
        window = self._windows.get(number)
        if window is None:
            window = self._windows[number] = _Window(offset)
        window.first_offset = min(window.first_offset, offset)
        return window

    def _drop_repeated(self, window: _Window) -> None:
        kept = len(window.answers)
        if kept > LEAST_REPEATED and kept > max(2 * window.unrepeated, REPEATED_PER_SESSION * self.sessions):
            window.answers.drop_repeated()
            window.unrepeated = len(window.answers)

    def resize(self, window: int) -> None:
        """Change the length of the windows; closed time stays closed."""
        if window == self._window:
            return
        before, self._window, self._windows = self._windows, window, {}
        for old in before.values():
            for key, plan in old.sessions.items():
                self._at(key[1] // window, old.first_offset).sessions[key] = plan
            for record in old.answers:
                self._at(record[1] // window, old.first_offset).answers.append(*record)

    def plans(self, until: int) -> list[SessionPlan]:
        """Return the plans of the open sessions up to a time that are learned from, in the order of their keys."""
        certain = {
            key: plan
            for window in self._windows.values()
            for key, plan in window.sessions.items()
            if plan and key[1] <= until
        }
        return [certain[key] for key in sorted(certain)]

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, until: int) -> list[int]:
        """Return the ends, rising, of the windows with something in them that end by `until`."""
        return sorted(end for end in ((k + 1) * self._window for k in self._windows) if end <= until)

    def close(self, end: int, *, session_timeout: int, whole_slates: bool) -> ClosedWindow:
        """Close the window that ends at `end`: everything before is late from now on.

        With `whole_slates`, a session without a click counts as having passed over its whole slate.
        """
        number = end // self._window - 1
        window = self._windows.pop(number)
        last = (end - 1 + session_timeout) // self._window
        later = [other.answers for at, other in self._windows.items() if number < at <= last]
        try:
            return closed_window(
                window.sessions,
                [window.answers, *later],
                start=end - self._window,
                end=end,
                session_timeout=session_timeout,
                whole_slates=whole_slates,
            )
        finally:  # also after an error: the window is closed
            self._names.clear()
            self.skip(end)

    def skip(self, until: int) -> None:
        """Close the time before `until`, in which there is nothing."""
        self.closed_until = max(self.closed_until, until)
