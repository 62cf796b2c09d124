"""A closed window: its sessions, and the displays that count.

The join is done in arrays (`columns.py`). Only sessions with the same id are joined one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.stream.columns import AnswerColumns, Bools, Slates, first_displays, join
from worker.stream.session import answered


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


class Answer(Struct, frozen=True, gc=False):
    """A feedback record without its session."""

    occurred_at: int
    position: int
    arm: str
    clicked: bool


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
    slates: Slates
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
    slates = Slates.of([plan.slate for plan in plans])
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
    reactions: dict[str, list[Answer]] = {session: [] for session, count in times.items() if count > 1}
    for session, time, position, arm, click in chain.from_iterable(answers):
        if session in reactions:
            reactions[session].append(Answer(time, position, arm, bool(click)))
    for row, ((session, first), plan) in enumerate(zip(keys, plans, strict=True)):
        if session in reactions:
            shown, was_clicked = answered(
                plan.slate, reactions[session], whole_slate=False, first=first, last=first + session_timeout
            )
            clicked[row], passed[row] = (shown, 0) if was_clicked else (0, shown)
