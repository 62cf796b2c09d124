"""A closed window: its sessions, and the displays that count.

The rules are those of `session.answered`, which the tests compare this with: feedback counts iff the slate has its arm
at its position and its time is from the arrival to the timeout; the lowest click counts, else the highest pass. The
join is done in arrays. Only sessions with the same id are joined one by one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import fsum
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.stream.events import FeedbackFact
from worker.stream.session import answered

Bools: TypeAlias = NDArray[np.bool_]


class AnswerColumns:
    """Feedback records, one entry per record in each column; 90 bytes a record instead of 200 as events.

    Repeated records stay in the columns until `drop_repeated`: they change no join.
    """

    __slots__ = ("arms", "clicked", "positions", "sessions", "times")

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.times = array("q")
        self.positions = array("q")
        self.arms: list[str] = []
        self.clicked = bytearray()

    def __len__(self) -> int:
        return len(self.sessions)

    def __iter__(self) -> Iterator[tuple[str, int, int, str, int]]:
        return zip(self.sessions, self.times, self.positions, self.arms, self.clicked, strict=True)

    def append(self, session: str, time: int, position: int, arm: str, clicked: int) -> None:
        """Add a record."""
        self.sessions.append(session)
        self.times.append(time)
        self.positions.append(position)
        self.arms.append(arm)
        self.clicked.append(clicked)

    def add(self, other: AnswerColumns) -> None:
        """Add the records of other columns."""
        for record in other:
            self.append(*record)

    def drop_repeated(self) -> None:
        """Keep one of each record."""
        kept = AnswerColumns()
        for record in dict.fromkeys(self):
            kept.append(*record)
        self.sessions, self.times, self.positions = kept.sessions, kept.times, kept.positions
        self.arms, self.clicked = kept.arms, kept.clicked

    def split(self, length: int) -> dict[int, AnswerColumns]:
        """Return the records by window, for windows of this length."""
        parts: dict[int, AnswerColumns] = {}
        for record in self:
            parts.setdefault(record[1] // length, AnswerColumns()).append(*record)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlateColumns:
    """The slates of n sessions, one after the other, as codes of arms.

    Not as a table: one slate may be as long as a record allows.

    Parameters
    ----------
    codes : the codes of all slates
    begins, lengths : (n,), where each slate begins in `codes`, and its length
    names : the code of each arm
    """

    codes: Ints
    begins: Ints
    lengths: Ints
    names: Mapping[str, int]

    @classmethod
    def of(cls, slates: Sequence[tuple[str, ...]]) -> SlateColumns:
        """Return slates in columns."""
        names = _Codes()
        lengths = np.fromiter(map(len, slates), np.intp, len(slates))
        codes = np.fromiter(map(names.__getitem__, chain.from_iterable(slates)), np.intp, int(lengths.sum()))
        return cls(codes=codes, begins=np.cumsum(lengths) - lengths, lengths=lengths, names=names)

    def at(self, rows: Ints, positions: Ints) -> Ints:
        """Return the codes at positions, from 1, that the slates have."""
        return np.asarray(self.codes[self.begins[rows] + positions - 1])

    def indices(self, rows: Sequence[int] | Ints, indices: Mapping[str, int]) -> Ints:
        """Return some slates as indices of arms, NO_ARM for others and after their end: (n, longest)."""
        lengths, begins = self.lengths[rows], self.begins[rows]
        table = np.full((len(lengths), max(1, lengths.max(initial=0))), NO_ARM, dtype=np.intp)
        shown, positions = first_displays(lengths)
        found = np.array([indices.get(name, NO_ARM) for name in self.names], dtype=np.intp)
        table[shown, positions - 1] = found[self.codes[begins[shown] + positions - 1]]
        return table


class _Codes(dict[str, int]):
    """Numbers the arms in the order in which they are first asked for."""

    def __missing__(self, arm: str) -> int:
        code = self[arm] = len(self)
        return code


def join(
    answers: Iterable[AnswerColumns], row_of: Mapping[str, int], slates: SlateColumns, first: Ints, last: Ints
) -> tuple[Ints, Ints]:
    """Return the lowest clicked and the highest passed position of each slate, 0 for none: (n,) each.

    `row_of` gives the slate of a session; `first` and `last`, (n,), the times between which feedback counts.

    >>> answers = AnswerColumns()
    >>> for record in (("s", 5, 1, "a", False), ("s", 6, 2, "b", True), ("t", 7, 1, "b", False)):
    ...     answers.append(*record)
    >>> slates = SlateColumns.of([("a", "b"), ("a",)])
    >>> clicked, passed = join([answers], {"s": 0, "t": 1}, slates, np.array([0, 0]), np.array([9, 9]))
    >>> clicked.tolist(), passed.tolist()
    ([2, 0], [1, 0])
    """
    none = np.iinfo(np.intp).max
    clicked, passed = np.full(len(first), none, dtype=np.intp), np.zeros(len(first), dtype=np.intp)
    for columns in answers:
        rows, positions, clicks = _counting(columns, row_of, slates, first, last)
        np.minimum.at(clicked, rows[clicks], positions[clicks])
        np.maximum.at(passed, rows[~clicks], positions[~clicks])
    clicked[clicked == none] = 0
    return clicked, passed


def _counting(
    answers: AnswerColumns, row_of: Mapping[str, int], slates: SlateColumns, first: Ints, last: Ints
) -> tuple[Ints, Ints, Bools]:
    """Return slate, position and whether it is a click, of the feedback that counts."""
    found = np.fromiter(map(row_of.get, answers.sessions, repeat(-1)), np.intp, len(answers))
    here = np.flatnonzero(found >= 0)
    rows, times = found[here], np.frombuffer(answers.times, np.int64)[here]
    positions = np.frombuffer(answers.positions, np.int64)[here]
    counts = (positions <= slates.lengths[rows]) & (times >= first[rows]) & (times <= last[rows])
    here, rows, positions = here[counts], rows[counts], positions[counts]
    shown, arms = slates.at(rows, positions), answers.arms
    codes = np.fromiter([slates.names.get(arms[row], -1) for row in here.tolist()], np.intp, len(here))
    same = codes == shown
    return rows[same], positions[same], np.frombuffer(answers.clicked, np.bool_)[here[same]]


def first_displays(shown: Ints) -> tuple[Ints, Ints]:
    """Return session and position of the first so many displays of each session.

    >>> [one.tolist() for one in first_displays(np.array([2, 0, 1]))]
    [[0, 0, 2], [1, 2, 1]]
    """
    rows = np.repeat(np.arange(len(shown)), shown)
    begins = np.repeat(np.cumsum(shown) - shown, shown)
    return rows, np.arange(len(rows)) - begins + 1


class SessionPlan(Struct, frozen=True, gc=False):
    """The plan of a session, in little memory.

    `context` and `exclude` are packed; `explored` counts the positions of the slate that explored, `exploring` says
    whether it counts as exploring for the budget of learning; `share` is that of such sessions in the journal, None
    means all.
    """

    parameters_version: int
    slate: tuple[str, ...]
    context: bytes
    exclude: bytes
    explored: int
    exploring: bool = False
    share: float | None = None


#: Plans by session id and arrival; None for a session that is uncertain.
OpenSessions: TypeAlias = dict[tuple[str, int], SessionPlan | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedWindow:
    """The sessions of a window that are learned from, sorted by key, and their displays that count.

    Arms are codes here; `slates.names` has them.

    Parameters
    ----------
    plans, slates : plan and slate of each of the n sessions
    rows, positions, codes, clicked : per display that was answered, its session (an index into `plans`), its position
        from 1, its arm, and whether it was clicked
    unanswered_positions, unanswered_codes : position and arm of each display that was shown and not answered: the one
        after the last answer
    shares : per session, the share of such sessions that is journaled; empty if all are
    uncertain : the number of sessions that are not learned from, because the user may have seen another slate
    opened : the number of sessions that serving has counted; 0 where all are journaled
    """

    start: int
    end: int
    plans: list[SessionPlan]
    slates: SlateColumns
    rows: Ints
    positions: Ints
    codes: Ints
    clicked: Bools
    unanswered_positions: Ints
    unanswered_codes: Ints
    shares: tuple[float, ...] = ()
    uncertain: int = 0
    opened: int = 0

    @property
    def sessions(self) -> int:
        """The number of all sessions, whether or not they are journaled and learned from."""
        return max(len(self.plans) + self.uncertain, self.opened)

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

    @property
    def arms(self) -> list[str]:
        """The arms of the displays that were answered."""
        return self._names(self.codes)

    @property
    def unanswered(self) -> list[tuple[int, str]]:
        """Position and arm of each display that was shown and not answered."""
        return list(zip(self.unanswered_positions.tolist(), self._names(self.unanswered_codes), strict=True))

    def indices(self, codes: Ints, indices: Mapping[str, int]) -> Ints:
        """Return the indices of arms that are given as codes, NO_ARM for those that have none."""
        return np.array([indices.get(name, NO_ARM) for name in self.slates.names], dtype=np.intp)[codes]

    def _names(self, codes: Ints) -> list[str]:
        names = list(self.slates.names)
        return [names[code] for code in codes.tolist()]


# ── the join ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def closed_window(
    sessions: OpenSessions,
    answers: Sequence[AnswerColumns],
    *,
    start: int,
    end: int,
    session_timeout: int,
    whole_slates: bool,
    opened: int,
) -> ClosedWindow:
    """Join the sessions of a window with feedback.

    With `whole_slates`, a session without a click counts as having passed over its whole slate. `opened` is the number
    of all sessions, if not all are journaled.
    """
    certain = {key: plan for key, plan in sessions.items() if plan is not None}
    keys = sorted(certain)
    plans = [certain[key] for key in keys]
    row_of = dict(zip([key[0] for key in keys], range(len(keys)), strict=True))
    slates = SlateColumns.of([plan.slate for plan in plans])
    arrivals = np.array([key[1] for key in keys], dtype=np.int64)
    clicked, passed = join(answers, row_of, slates, arrivals, arrivals + session_timeout)
    if len(row_of) < len(keys):
        _join_repeated(keys, plans, answers, session_timeout, clicked, passed)
    shown = np.where(clicked > 0, clicked, slates.lengths if whole_slates else passed)
    unanswered = np.flatnonzero((clicked == 0) & (shown < slates.lengths))
    rows, positions = first_displays(shown)
    sampled = any(plan.share is not None for plan in plans)
    return ClosedWindow(
        start=start,
        end=end,
        plans=plans,
        slates=slates,
        rows=rows,
        positions=positions,
        codes=slates.at(rows, positions),
        clicked=positions == clicked[rows],
        unanswered_positions=shown[unanswered] + 1,
        unanswered_codes=slates.at(unanswered, shown[unanswered] + 1),
        shares=tuple([1.0 if plan.share is None else plan.share for plan in plans]) if sampled else (),
        uncertain=len(sessions) - len(plans),
        opened=opened,
    )


def _join_repeated(
    keys: Sequence[tuple[str, int]],
    plans: Sequence[SessionPlan],
    answers: Sequence[AnswerColumns],
    session_timeout: int,
    clicked: Ints,
    passed: Ints,
) -> None:
    """Join the sessions whose id another session of the window has too; `join` knows one session of an id."""
    times = Counter(session for session, _ in keys)
    reactions: dict[str, list[FeedbackFact]] = {session: [] for session, count in times.items() if count > 1}
    for session, time, position, arm, click in chain.from_iterable(answers):
        if session in reactions:
            reactions[session].append(
                FeedbackFact(session_id=session, occurred_at=time, position=position, arm=arm, clicked=bool(click))
            )
    for row, ((session, first), plan) in enumerate(zip(keys, plans, strict=True)):
        if session in reactions:
            shown, was_clicked = answered(
                plan.slate, reactions[session], whole_slate=False, first=first, last=first + session_timeout
            )
            clicked[row], passed[row] = (shown, 0) if was_clicked else (0, shown)
