"""A closed window: its sessions, and the displays that count.

The rules are those of `session.answered`, which the tests compare this with: feedback counts iff the slate has its arm
at its position and its time is from the arrival to the timeout; the lowest click counts, else the highest pass. The
join is done in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Ints

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

    def drop_repeated(self) -> None:
        """Keep one of each record."""
        kept = AnswerColumns()
        for record in dict.fromkeys(self):
            kept.append(*record)
        self.sessions, self.times, self.positions = kept.sessions, kept.times, kept.positions
        self.arms, self.clicked = kept.arms, kept.clicked


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
        rows = np.asarray(rows, dtype=np.intp)
        lengths = self.lengths[rows]
        table = np.full((len(lengths), max(1, lengths.max(initial=0))), NO_ARM, dtype=np.intp)
        shown, positions = first_displays(lengths)
        table[shown, positions - 1] = self.arms(self.at(rows[shown], positions), indices)
        return table

    def arms(self, codes: Ints, indices: Mapping[str, int]) -> Ints:
        """Return the indices of arms that are given as codes, NO_ARM for those that have none."""
        return np.array([indices.get(name, NO_ARM) for name in self.names], dtype=np.intp)[codes]


class _Codes(dict[str, int]):
    """Numbers the arms in the order in which they are first asked for."""

    def __missing__(self, arm: str) -> int:
        code = self[arm] = len(self)
        return code


def join(
    keys: Sequence[tuple[str, int]], slates: SlateColumns, answers: Sequence[AnswerColumns], session_timeout: int
) -> tuple[Ints, Ints]:
    """Return the lowest clicked and the highest passed position of each session, 0 for none: (n,) each.

    `keys` are the ids and arrivals of the sessions, sorted.

    >>> answers = AnswerColumns()
    >>> for record in (("s", 5, 1, "a", False), ("s", 6, 2, "b", True), ("t", 7, 1, "b", False)):
    ...     answers.append(*record)
    >>> clicked, passed = join([("s", 0), ("t", 0)], SlateColumns.of([("a", "b"), ("a",)]), [answers], 60)
    >>> clicked.tolist(), passed.tolist()
    ([2, 0], [1, 0])
    """
    none = np.iinfo(np.intp).max
    clicked, passed = np.full(len(keys), none, dtype=np.intp), np.zeros(len(keys), dtype=np.intp)
    first = np.array([arrived_at for _, arrived_at in keys], dtype=np.int64)
    last_row = {session: row for row, (session, _) in enumerate(keys)}
    # Whether the row before is an earlier session with the same id.
    repeats = np.array([False, *(one[0] == other[0] for one, other in pairwise(keys))])
    for columns in answers:
        found = np.fromiter(map(last_row.get, columns.sessions, repeat(-1)), np.intp, len(columns))
        here = np.flatnonzero(found >= 0)
        rows = found[here]
        while len(here):
            counting, positions, clicks = _counting(columns, here, rows, slates, first, first + session_timeout)
            np.minimum.at(clicked, counting[clicks], positions[clicks])
            np.maximum.at(passed, counting[~clicks], positions[~clicks])
            earlier = repeats[rows]
            here, rows = here[earlier], rows[earlier] - 1
    clicked[clicked == none] = 0
    return clicked, passed


def _counting(
    answers: AnswerColumns, here: Ints, rows: Ints, slates: SlateColumns, first: Ints, last: Ints
) -> tuple[Ints, Ints, Bools]:
    """Return session, position and whether it is a click, of the feedback `here` that counts for the sessions `rows`.

    `first` and `last`, (n,), are the times between which feedback counts.
    """
    times, positions = np.frombuffer(answers.times, np.int64)[here], np.frombuffer(answers.positions, np.int64)[here]
    counts = (positions <= slates.lengths[rows]) & (times >= first[rows]) & (times <= last[rows])
    here, rows, positions = here[counts], rows[counts], positions[counts]
    arms = answers.arms
    codes = np.fromiter([slates.names.get(arms[row], -1) for row in here.tolist()], np.intp, len(here))
    same = codes == slates.at(rows, positions)
    return rows[same], positions[same], np.frombuffer(answers.clicked, np.bool_)[here[same]]


def first_displays(shown: Ints) -> tuple[Ints, Ints]:
    """Return session and position of the first `shown` displays of each session.

    >>> [one.tolist() for one in first_displays(np.array([2, 0, 1]))]
    [[0, 0, 2], [1, 2, 1]]
    """
    rows = np.repeat(np.arange(len(shown)), shown)
    begins = np.repeat(np.cumsum(shown) - shown, shown)
    return rows, np.arange(len(rows)) - begins + 1


class SessionPlan(Struct, frozen=True, gc=False):
    """The plan of a session, in little memory.

    `context` and `exclude` are packed; `explored` has a byte per position of the slate, 1 if it explored, and is empty
    if none did; `random` says whether the whole slate was drawn uniformly, `control` whether the session is in the
    control group.
    """

    parameters_version: int
    slate: tuple[str, ...]
    context: bytes
    exclude: bytes
    explored: bytes
    random: bool = False
    control: bool = False


#: Plans by session id and arrival; None for a session that is uncertain.
OpenSessions: TypeAlias = dict[tuple[str, int], SessionPlan | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedWindow:
    """The sessions of a window that are learned from, sorted by key, and their displays that count.

    Arms are codes here; `slates.names` has them.

    Parameters
    ----------
    keys, plans, slates : id and arrival, plan and slate of each of the n sessions
    rows, positions, codes, clicked, answered : per display, session by session, its session (an index into `plans`),
        its position from 1, its arm, whether it was clicked, and whether it was answered: the last one of a session
        without a click may be the one after the last answer
    uncertain : the number of sessions that are not learned from, because the user may have seen another slate
    """

    start: int
    end: int
    keys: list[tuple[str, int]]
    plans: list[SessionPlan]
    slates: SlateColumns
    rows: Ints
    positions: Ints
    codes: Ints
    clicked: Bools
    answered: Bools
    uncertain: int

    @property
    def sessions(self) -> int:
        """The number of all sessions, whether or not they are learned from."""
        return len(self.plans) + self.uncertain


# ── the join ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def closed_window(
    sessions: OpenSessions,
    answers: Sequence[AnswerColumns],
    *,
    start: int,
    end: int,
    session_timeout: int,
    whole_slates: bool,
) -> ClosedWindow:
    """Join the sessions of a window with feedback.

    With `whole_slates`, a session without a click counts as having passed over its whole slate.
    """
    certain = {key: plan for key, plan in sessions.items() if plan is not None}
    keys = sorted(certain)
    plans = [certain[key] for key in keys]
    slates = SlateColumns.of([plan.slate for plan in plans])
    clicked, passed = join(keys, slates, answers, session_timeout)
    answered = np.where(clicked > 0, clicked, slates.lengths if whole_slates else passed)
    rows, positions = first_displays(np.where(clicked > 0, clicked, np.minimum(answered + 1, slates.lengths)))
    return ClosedWindow(
        start=start,
        end=end,
        keys=keys,
        plans=plans,
        slates=slates,
        rows=rows,
        positions=positions,
        codes=slates.at(rows, positions),
        clicked=positions == clicked[rows],
        answered=positions <= answered[rows],
        uncertain=len(sessions) - len(plans),
    )
