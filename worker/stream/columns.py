"""Feedback and slates in columns, and their join in arrays.

The rules are those of `session.answered`, which the tests compare this with: feedback counts iff the slate has its arm
at its position and its time is from the arrival to the timeout; the lowest click counts, else the highest pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np
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

    def extend(
        self,
        sessions: Sequence[str],
        times: Iterable[int],
        positions: Iterable[int],
        arms: Iterable[str],
        clicked: Iterable[int],
    ) -> None:
        """Add records."""
        self.sessions.extend(sessions)
        self.times.extend(times)
        self.positions.extend(positions)
        self.arms.extend(arms)
        self.clicked.extend(clicked)

    def add(self, other: AnswerColumns) -> None:
        """Add the records of other columns."""
        self.extend(other.sessions, other.times, other.positions, other.arms, other.clicked)

    def drop_repeated(self) -> None:
        """Keep one of each record."""
        kept = AnswerColumns()
        for session, time, position, arm, clicked in dict.fromkeys(self):
            kept.extend([session], [time], [position], [arm], [clicked])
        self.sessions, self.times, self.positions = kept.sessions, kept.times, kept.positions
        self.arms, self.clicked = kept.arms, kept.clicked

    def split(self, length: int) -> dict[int, AnswerColumns]:
        """Return the records by window, for windows of this length."""
        parts: dict[int, AnswerColumns] = {}
        for session, time, position, arm, clicked in self:
            parts.setdefault(time // length, AnswerColumns()).extend([session], [time], [position], [arm], [clicked])
        return parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slates:
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
    def of(cls, slates: Sequence[tuple[str, ...]]) -> Slates:
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
    answers: Iterable[AnswerColumns], row_of: Mapping[str, int], slates: Slates, first: Ints, last: Ints
) -> tuple[Ints, Ints]:
    """Return the lowest clicked and the highest passed position of each slate, 0 for none: (n,) each.

    `row_of` gives the slate of a session; `first` and `last`, (n,), the times between which feedback counts.

    >>> answers = AnswerColumns()
    >>> answers.extend(["s", "s", "t"], [5, 6, 7], [1, 2, 1], ["a", "b", "b"], [False, True, False])
    >>> slates = Slates.of([("a", "b"), ("a",)])
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
    answers: AnswerColumns, row_of: Mapping[str, int], slates: Slates, first: Ints, last: Ints
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
