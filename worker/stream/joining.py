"""A closed window: its sessions, and the displays that count.

The join is done in arrays (`columns.py`). What is rare takes a way of its own, session by session: several slates, and
several sessions with one id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.stream.columns import AnswerColumns, Bools, Slates, first_displays, join
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

#: Plans by session id and arrival; several where a session was opened with several slates.
OpenSessions: TypeAlias = dict[tuple[str, int], SessionPlan | set[SessionPlan]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedWindow:
    """The sessions of a window, sorted by key, and their displays that count.

    Arms are codes here; `slates.names` has them.

    Parameters
    ----------
    plans, slates : plan and slate of each of the n sessions
    rows, positions, codes, clicked : per display that was answered, its session (an index into `plans`), its position
        from 1, its arm, and whether it was clicked
    unanswered_positions, unanswered_codes : position and arm of each display that was shown and not answered: the one
        after the last answer
    shares : per session, the share of such sessions that is journaled; empty if all are
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
    shares: Mapping[tuple[str, int], float],
    opened: int,
) -> ClosedWindow:
    """Join the sessions of a window with feedback.

    With `whole_slates`, a session without a click counts as having passed over its whole slate. `shares` has those of
    sessions of which not all are journaled, `opened` the number of all.
    """
    keys = sorted(sessions)
    row_of = dict(zip([key[0] for key in keys], range(len(keys)), strict=True))
    plans, special = _special(keys, sessions, row_of, answers, session_timeout, whole_slate=whole_slates)
    slates = Slates.of([plan.slate for plan in plans])
    arrivals = np.array([key[1] for key in keys], dtype=np.int64)
    clicked, passed = join(answers, row_of, slates, arrivals, arrivals + session_timeout)
    shown = np.where(clicked > 0, clicked, slates.lengths if whole_slates else passed)
    unanswered = (clicked == 0) & (shown < slates.lengths)
    shown[list(special)], unanswered[list(special)] = 0, False
    rows, positions = first_displays(shown)
    clicks = positions == clicked[rows]
    asked, after = np.flatnonzero(unanswered), shown[unanswered] + 1
    if special:
        rows, positions, clicks = _with_special(rows, positions, clicks, special)
        asked, after = _with_special_asked(asked, after, special)
    return ClosedWindow(
        start=start,
        end=end,
        plans=plans,
        slates=slates,
        rows=rows,
        positions=positions,
        codes=slates.at(rows, positions),
        clicked=clicks,
        unanswered_positions=after,
        unanswered_codes=slates.at(asked, after),
        shares=tuple([shares.get(key, 1.0) for key in keys]) if shares else (),
        opened=opened,
    )


# ── sessions that are joined one by one ──────────────────────────────────────────────────────────────────────────────


class _Joined(NamedTuple):
    """The displays of a session that count, and the one that was not answered."""

    displays: list[Display]
    unanswered: int  # its position, 0 if there is none


def _special(
    keys: list[tuple[str, int]],
    sessions: OpenSessions,
    row_of: Mapping[str, int],
    answers: Sequence[AnswerColumns],
    session_timeout: int,
    *,
    whole_slate: bool,
) -> tuple[list[SessionPlan], dict[int, _Joined]]:
    """Return the plan of every session, and the displays of those with several slates or with an id of several."""
    found = list(map(sessions.__getitem__, keys))
    several = {row for row, kind in enumerate(map(type, found)) if kind is set}
    if len(row_of) < len(keys):
        repeated = Counter(key[0] for key in keys)
        several.update(row for row, key in enumerate(keys) if repeated[key[0]] > 1)
    if not several:
        return list(found), {}  # type: ignore[arg-type]
    belonging = _by_session(answers, {keys[row][0] for row in several})
    plans, joined = list(found), {}
    for row in sorted(several):
        session, first = keys[row]
        reactions = [one for one in belonging[session] if first <= one.occurred_at <= first + session_timeout]
        plan, displays = found[row], []
        if isinstance(plan, SessionPlan):
            shown, clicked = answered(plan.slate, reactions, whole_slate=whole_slate)
            displays = [(h, plan.slate[h - 1], clicked and h == shown) for h in range(1, shown + 1)]
            joined[row] = _Joined(displays, shown + 1 if not clicked and shown < len(plan.slate) else 0)
        else:
            plans[row], displays = agreed(plan, reactions, whole_slate=whole_slate)
            joined[row] = _Joined(displays, 0)
    return plans, joined  # type: ignore[return-value]


def _by_session(answers: Iterable[AnswerColumns], sessions: Collection[str]) -> dict[str, list[Answer]]:
    belonging: dict[str, list[Answer]] = {session: [] for session in sessions}
    for session, time, position, arm, clicked in chain.from_iterable(answers):
        if session in belonging:
            belonging[session].append(Answer(time, position, arm, bool(clicked)))
    return belonging


def _with_special(
    rows: Ints, positions: Ints, clicks: Bools, special: Mapping[int, _Joined]
) -> tuple[Ints, Ints, Bools]:
    """Add the displays of special sessions, in the order of the sessions."""
    added = [(row, h, clicked) for row, one in special.items() for h, _, clicked in one.displays]
    rows = np.concatenate([rows, np.array([row for row, _, _ in added], dtype=np.intp)])
    positions = np.concatenate([positions, np.array([h for _, h, _ in added], dtype=np.intp)])
    clicks = np.concatenate([clicks, np.array([clicked for _, _, clicked in added], dtype=np.bool_)])
    order = np.argsort(rows, kind="stable")
    return rows[order], positions[order], clicks[order]


def _with_special_asked(asked: Ints, after: Ints, special: Mapping[int, _Joined]) -> tuple[Ints, Ints]:
    added = [(row, one.unanswered) for row, one in special.items() if one.unanswered]
    asked = np.concatenate([asked, np.array([row for row, _ in added], dtype=np.intp)])
    after = np.concatenate([after, np.array([h for _, h in added], dtype=np.intp)])
    order = np.argsort(asked, kind="stable")
    return asked[order], after[order]


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
