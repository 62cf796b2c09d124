"""Sums of the sessions of a log: in all, per ad, per group of users, and along the period.

Rules that hold in this file:

- A session is opened by the journal, and its feedback is that of the journal. In a log without a journal, decisions
  open sessions and clicks answer them. The fallback for want of room leaves no fact and is counted by its decisions.
- What counts as displayed, answered, explored and earned is the same as in the accounts of a version
  (`worker.stream.accounts`): the display after the last answer counts, a click earns the price of the version that
  served it, a journaled session stands for 1/share sessions, an uncertain one has no known display.
- Of a version that the log does not have, because the history was thinned, the newest one before it stands in.
- Groups of users are the values of declared categories, and four parts of every number, by the quartiles of a sample.
  Of plain contexts the numbers are numbered. Hashed categories have no groups: their values are not kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader, opened_by
from worker.report.period import Period
from worker.stream.accounts import ROWS
from worker.stream.events import Mode, Opened
from worker.stream.session import answered
from worker.stream.settings import LearningSettings

#: The parts of a sum: sessions, and the rows of the accounts.
PARTS: Final = ("sessions", *ROWS)
#: Sessions whose numbers are sorted for the quartiles.
SAMPLED: Final = 4096
#: The group of the values that a category does not list, and of those without a value.
OTHER: Final = "other"
_EXPLORED: Final[frozenset[Mode]] = frozenset(("explore", "random", "warmup"))

Sums = list[float]


class Group(NamedTuple):
    """A group of users: the feature, its place among the groups, and its name. Values of a category have one place."""

    feature: str
    place: int
    name: str


Grouping = Callable[[Sequence[float]], Group]


def _nothing() -> Sums:
    return [0.0] * len(PARTS)


class Counts:
    """The sums of a period; `slots` are its equal parts, from 0 on, `modes` the sessions by the mode of their slate."""

    def __init__(self) -> None:
        self.total = _nothing()
        self.ads: defaultdict[str, Sums] = defaultdict(_nothing)
        self.groups: defaultdict[Group, Sums] = defaultdict(_nothing)
        self.slots: defaultdict[int, Sums] = defaultdict(_nothing)
        self.modes: Counter[str] = Counter()
        self.uncertain = 0

    def add(self, session: CountedSession, slot: int) -> None:
        """Add a session."""
        weight, opened, whole = session.weight, session.opened, _nothing()
        self.modes[opened.modes[0] if opened.modes else "none"] += 1
        self.uncertain += session.uncertain
        for at, arm in enumerate(opened.slate[: session.displayed], start=1):
            clicked = session.clicked and at == session.displayed
            row = (
                float(at == 1 or arm not in opened.slate[: at - 1]),
                1.0,
                float(clicked),
                session.earned if clicked else 0.0,
                float(at <= session.answered),
                float(opened.modes[at - 1] in _EXPLORED),
            )
            ad = self.ads[arm]
            for part, number in enumerate(row):
                ad[part] += weight * number
                whole[part] += weight * number
        whole[0] = weight
        for sums in (self.total, self.slots[slot], *(self.groups[group] for group in session.groups)):
            for part, number in enumerate(whole):
                sums[part] += number


class CountedSession(NamedTuple):
    """A session as it counts; `weight` is the number of sessions that it stands for."""

    opened: Opened
    weight: float
    uncertain: bool
    answered: int
    clicked: bool
    earned: float
    groups: Sequence[Group]

    @property
    def displayed(self) -> int:
        """Number of positions displayed; of an uncertain session none is known."""
        left = not self.clicked and self.answered < len(self.opened.slate)
        return 0 if self.uncertain else self.answered + left


class SessionCounter:
    """Counts the sessions of a log by period; `by` are the features that users are grouped by."""

    def __init__(self, log: OrderedLog, span: Period) -> None:
        self._log, self._versions = log, log.versions
        self._reader = TraceReader(log)
        self._prices = lru_cache(64)(self._prices_of)
        self.settings = lru_cache(4096)(self._settings_of)
        self._groupings = lru_cache(4096)(self._groupings_of)
        self._edges = self._quartiles(span)

    def count(self, periods: Sequence[Period], slots: int) -> list[Counts]:
        """Return the sums of some periods, each divided into `slots` equal parts."""
        counts = [Counts() for _ in periods]
        first, last = min(period.since for period in periods), max(period.until for period in periods)
        last += self._versions.longest("session_timeout")
        for trace in self._reader.read(self._log.entries("counting sessions", first, last)):
            for period, sums in zip(periods, counts, strict=True):
                if period.since <= trace.arrived_at < period.until and (session := self._session(trace)) is not None:
                    sums.add(session, (trace.arrived_at - period.since) * slots // period.length)
        return counts

    def _session(self, trace: SessionTrace) -> CountedSession | None:
        openings = [opened for _, opened in trace.openings] or self._openings_by_decisions(trace)
        if not openings:
            return None
        opened, version = openings[0], openings[0].parameters_version
        settings = self.settings(version)
        shown, clicked = answered(
            opened.slate,
            trace.facts if trace.openings else trace.clicks,
            whole_slate=settings.unanswered == "passed",
            first=trace.arrived_at,
            last=trace.arrived_at + settings.session_timeout,
        )
        return CountedSession(
            opened=opened,
            weight=1 / (opened.share or 1.0),
            uncertain=any(one.uncertain or one.slate != opened.slate for one in openings),
            answered=shown,
            clicked=clicked,
            earned=self._prices(version).get(opened.slate[shown - 1], 0.0) if clicked else 0.0,
            groups=[group(opened.context) for group in self._groupings(version)]
            if len(opened.context) == settings.dim
            else (),
        )

    def _openings_by_decisions(self, trace: SessionTrace) -> list[Opened]:
        by_position = {decision.position: decision for _, decision in trace.decisions}
        first = by_position.get(1)
        if first is None or (self._log.counts["journal"] and first.mode != "fallback"):
            return []
        found = [opened_by(one, first) for one in self._reader.arrivals(trace, first.parameters_version)[-1:]]
        modes = tuple(by_position.get(at, first).mode for at in range(1, len(first.slate) + 1))
        return [replace(opened, modes=modes) for opened in found]

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _settings_of(self, version: int) -> LearningSettings:
        return self._versions.known[self._versions.nearest(version)].settings

    def _prices_of(self, version: int) -> dict[str, float]:
        return {arm.arm: arm.reward for arm in self._versions.head(self._versions.nearest(version)).arms}

    # ── groups of users ──────────────────────────────────────────────────────────────────────────────────────────────

    def _groupings_of(self, version: int) -> list[Grouping]:
        found: list[Grouping] = []
        for name, column, values in columns(self.settings(version)):
            if values:
                found.append(_category(name, column, values))
            elif name in self._edges:
                found.append(_quarter(name, column, self._edges[name]))
        return found

    def _quartiles(self, span: Period) -> dict[str, list[float]]:
        """Return by the name of a number where its parts begin, all but the first."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        newest = max(self._versions.known)
        for trace in TraceReader(self._log).read(self._log.sample(SAMPLED, *span)):
            version = trace.openings[0][1].parameters_version if trace.openings else newest
            for arrival in self._reader.candidates(trace, version)[:1]:
                for name, column, marks in columns(self.settings(version)):
                    if not marks and column < len(arrival.context) and isfinite(arrival.context[column]):
                        values[name].append(arrival.context[column])
        return {name: _parts(numbers) for name, numbers in values.items()}


def columns(settings: LearningSettings) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the features that users can be grouped by: name, first column, and the values of a category."""
    if settings.features is None or not settings.features.context:
        yield from ((f"number {place + 1}", place, ()) for place in range(settings.dim))
        return
    first = 0
    for feature in settings.features.context:
        if feature.kind != "hashed":
            yield feature.name, first, feature.values
        first += feature.width


def _parts(numbers: list[float]) -> list[float]:
    """Return where the second and later parts of some numbers begin: quartiles, or the values if they are few.

    >>> _parts([0, 1, 1, 0]), _parts([one / 7 for one in range(9)])
    ([1], [0.286, 0.571, 0.857])
    """
    if len(few := sorted(set(numbers))) <= 4:
        return few[1:]
    quartiles = np.quantile(numbers, (0.25, 0.5, 0.75)).tolist()
    rounded = {float(f"{edge:.4g}" if abs(edge) >= 1000 else f"{edge:.3g}") for edge in quartiles}
    return [edge for edge in sorted(rounded) if edge > few[0]]


def group_names(edges: Sequence[float]) -> list[str]:
    """Return the names of the parts of a number.

    >>> group_names([31, 4520.25]), group_names([1])
    (['below 31', '31 to 4,520.25', '4,520.25 and more'], ['below 1', '1 and more'])
    """
    shown = [f"{edge:,.10g}" for edge in edges]
    if not shown:
        return ["all"]
    between = [f"{low} to {high}" for low, high in pairwise(shown)]
    return [f"below {shown[0]}", *between, f"{shown[-1]} and more"]


def _quarter(feature: str, column: int, edges: Sequence[float]) -> Grouping:
    parts = [Group(feature, place, name) for place, name in enumerate(group_names(edges))]
    missing = Group(feature, len(parts), "not known")
    return lambda context: parts[bisect_right(edges, number)] if isfinite(number := context[column]) else missing


def _category(feature: str, column: int, values: Sequence[str]) -> Grouping:
    marks = [(place, Group(feature, 0, value)) for place, value in enumerate(values, start=column)]
    other = Group(feature, 1, OTHER)
    return lambda context: next((group for place, group in marks if context[place]), other)
