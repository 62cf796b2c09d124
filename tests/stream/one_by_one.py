"""Windows that keep every record and join one session at a time, in plain Python. The slow reference."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from worker.stream.contexts import pack_context
from worker.stream.events import FeedbackFact, Opened
from worker.stream.joining import ClosedWindow, SessionPlan
from worker.stream.session import answered, pack_exclusions


@dataclass(slots=True, kw_only=True)
class Closed:
    """A closed window as lists, which can be compared."""

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
        """Return the lists of a window."""
        names = list(window.slates.names)
        return cls(
            start=window.start,
            end=window.end,
            plans=window.plans,
            rows=window.rows.tolist(),
            positions=window.positions.tolist(),
            arms=window.arms,
            clicked=window.clicked.tolist(),
            unanswered=[
                (position, names[code])
                for position, code in zip(window.unanswered_positions, window.unanswered_codes, strict=True)
            ],
            uncertain=window.uncertain,
        )

    def add(self, plan: SessionPlan, shown: int, clicked: bool) -> None:
        """Add a session: of its slate so many displays count, all passed over but possibly the last."""
        self.rows += [len(self.plans)] * shown
        self.positions += range(1, 1 + shown)
        self.arms += plan.slate[:shown]
        self.clicked += [clicked and position == shown for position in range(1, 1 + shown)]
        self.plans.append(plan)
        if not clicked and shown < len(plan.slate):
            self.unanswered.append((shown + 1, plan.slate[shown]))


def time_of(event: Opened | FeedbackFact) -> int:
    return event.arrived_at if isinstance(event, Opened) else event.occurred_at


def plan_of(event: Opened) -> SessionPlan:
    context, exclusions = pack_context(event.context), pack_exclusions(event.exclude)
    return SessionPlan(event.parameters_version, event.slate, context, exclusions, event.modes.count("explore"))


class WindowsOneByOne:
    """All records of the time that is not closed."""

    def __init__(self, *, window: int) -> None:
        self.window = window
        self.closed_until = 0
        self.records: list[tuple[int, Opened | FeedbackFact]] = []

    def add(self, offset: int, event: Opened | FeedbackFact) -> bool:
        """Add a record; return False if it is late."""
        is_late = time_of(event) < self.closed_until
        if not is_late:
            self.records.append((offset, event))
        return not is_late

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len({(event.session_id, event.arrived_at) for _, event in self.records if isinstance(event, Opened)})

    @property
    def oldest(self) -> int | None:
        """The offset of the oldest record."""
        return min((offset for offset, _ in self.records), default=None)

    def due(self, until: int) -> list[int]:
        """Return the ends, rising, of the windows with something in them that end by `until`."""
        ends = {(time_of(event) // self.window + 1) * self.window for _, event in self.records}
        return sorted(end for end in ends if end <= until)

    def close(self, end: int, *, session_timeout: int, whole_slates: bool) -> Closed:
        """Close the window that ends at `end`: everything before is late from now on."""
        closed = Closed(start=end - self.window, end=end)
        facts = defaultdict[tuple[str, int], list[Opened]](list)
        for _, event in self.records:
            if isinstance(event, Opened) and event.arrived_at < end:
                facts[event.session_id, event.arrived_at].append(event)
        for (session_id, arrived_at), several in sorted(facts.items(), key=lambda item: item[0]):
            plan, *others = {plan_of(fact) for fact in several}
            if others or any(fact.uncertain for fact in several):
                closed.uncertain += 1
                continue
            reports = [
                event
                for _, event in self.records
                if isinstance(event, FeedbackFact)
                and event.session_id == session_id
                and arrived_at <= event.occurred_at <= arrived_at + session_timeout
            ]
            closed.add(plan, *answered(plan.slate, reports, whole_slate=whole_slates))
        self.closed_until = end
        self.records = [(offset, event) for offset, event in self.records if time_of(event) >= end]
        return closed
