"""Arrivals that another worker may have answered already, with a slate that is nowhere but on the user's screen.

Decisions are written together with their facts. So a worker can end when a decision is written and its fact and its
table value are not, and the next owner of the partition plans the arrival again. Rules that hold in this file
(docs/design.md §3):

- Only arrivals before the end of the partition at the time of the takeover can have been answered before.
- The second plan differs from the first only under another version. That can be if a version came so late that the
  earlier owner may have missed it (`Versions.candidates`).
- Then the journal gets the plan under each of these versions, if one of them calls for the journal (`budget.py`). The
  slate that the user saw is among them, and the learner counts only displays on which the plans agree that match the
  answers (`stream/windows.py`).
- The table holds one slate. Feedback that fits only another one is lost to serving: it is a dead letter, and the
  session is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from worker.stream.budget import journaled
from worker.stream.contexts import pack_context
from worker.stream.encoding import opened_document
from worker.stream.events import Arrival, Feedback
from worker.stream.session import objection
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.topology import Record
from worker.stream.versions import Versions

#: Arrivals of a partition that can have been answered and not be committed: more than a worker takes between two
#: commits, and few compared with a backlog of hours.
MOST_REPEATED = 65_536


class Plan(NamedTuple):
    """The version and the slate of a session, and its share in the journal.

    A session that is in the table has its share already, by all plans, as it `remembers` it (`budget.py`).
    """

    version: int
    slate: tuple[str, ...]
    share: float | None
    remembers: bool


class OtherPlans(NamedTuple):
    """The facts of other plans, and by session what it remembers of its share, given all plans."""

    facts: list[dict[str, Any]]
    shares: dict[str, float | None]


class Replans:
    """The other plans of arrivals that an earlier owner of the partition may have answered."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._until = 0
        self._others: dict[str, list[tuple[str, ...]]] = {}

    def begin(self, start: int, end: int) -> None:
        """Take the partition over: reading starts at an offset of the arrivals that end at `end` now."""
        self._until = min(end, start + MOST_REPEATED)

    def concerns(self, record: Record) -> bool:
        """Whether an arrival may have been answered before."""
        return record.offset < self._until

    def others(self, arrivals: Iterable[tuple[Record, Arrival]], plans: Mapping[str, Plan]) -> OtherPlans:
        """Return all other plans of arrivals, whose own plans are given by session.

        If any plan calls for the journal, all plans of the session are journaled.
        """
        groups: dict[SlatePlanner, list[Arrival]] = {}
        for record, arrival in arrivals:
            plan = plans.get(arrival.session_id)
            candidates = self._versions.candidates(arrival.occurred_at, abs(record.timestamp))
            if plan is None or len(candidates) == 1:
                continue
            for planner in candidates:
                if planner.parameters.version != plan.version:
                    groups.setdefault(planner, []).append(arrival)
        found: list[tuple[int, Arrival, Slate]] = []
        highest = {session_id: plan.share for session_id, plan in plans.items()}
        for planner, group in groups.items():
            slates = planner.plan(group, [pack_context(arrival.context) for arrival in group])
            for arrival, slate in zip(group, slates, strict=True):
                session_id = arrival.session_id
                if not plans[session_id].remembers:
                    share = planner.parameters.shares.of_slate(slate.modes)
                    highest[session_id] = max(highest[session_id] or 0.0, share)
                if slate.arms != plans[session_id].slate:
                    self._others.setdefault(session_id, []).append(slate.arms)
                    found.append((planner.parameters.version, arrival, slate))
        salt = self._versions.newest.settings.salt
        shares = {
            session_id: share if plans[session_id].remembers else journaled(salt, session_id, share or 0.0)
            for session_id, share in highest.items()
        }
        kept = [one for one in found if shares[one[1].session_id] != 0]
        return OtherPlans([_fact(*one, shares[one[1].session_id]) for one in kept], shares)

    def explain(self, feedback: Feedback) -> bool:
        """Whether feedback that does not fit the slate in the table fits another plan; true once for a session."""
        slates = self._others.get(feedback.session_id, ())
        time = feedback.occurred_at
        if any(objection(slate, time, time, feedback) is None for slate in slates):
            del self._others[feedback.session_id]
            return True
        return False

    def forget(self, session_id: str) -> None:
        """Drop a session that is over."""
        self._others.pop(session_id, None)


def _fact(version: int, arrival: Arrival, slate: Slate, share: float | None) -> dict[str, Any]:
    return opened_document(
        arrival.session_id,
        arrival.occurred_at,
        arrival.context,
        slate.arms,
        slate.modes,
        arrival.exclude,
        version,
        share,
    )
