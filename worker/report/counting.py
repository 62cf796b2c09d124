"""Sums of the sessions of a log over a period: in all, per ad, per group of users, and along the period.

Rules that hold in this file:

- A session is opened by the journal, and its feedback is that of the journal. In a log without a journal, the first
  decision opens it and clicks answer it. So does the fallback because the table is full, which leaves no fact.
- What counts as displayed, answered, explored and earned is the same as in the accounts of a version
  (`worker.stream.accounts`).
- For a version that the log lacks, because the history is thinned, the newest one before it stands in.
- Groups of users are the values of a declared category, and parts of a number by the quartiles of a sample. Numbers of
  plain contexts are counted from 1. A hashed category has no groups: its values are not kept.
- Days are days of UTC. A period is compared with the one of the same length before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Final, NamedTuple

import numpy as np

from worker.bandit.arrays import Floats
from worker.console import moment
from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.stream.accounts import DAY, EXPLORED, ROWS
from worker.stream.crosses import spans_of
from worker.stream.events import Opened
from worker.stream.settings import LearningSettings

# ── periods ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WEEK: Final = 7 * DAY
MINUTE: Final = "%Y-%m-%d %H:%M"


class Period(NamedTuple):
    """From `since` up to, but not including, `until`."""

    since: int
    until: int

    @property
    def length(self) -> int:
        """The length in milliseconds."""
        return self.until - self.since

    @property
    def before(self) -> Period:
        """The period of the same length before it."""
        return Period(self.since - self.length, self.since)

    @property
    def name(self) -> str:
        """The length as a noun."""
        return {DAY: "day", WEEK: "week"}.get(self.length, "period")

    def __str__(self) -> str:
        if self.since % DAY or self.until % DAY:
            return f"{moment(self.since, MINUTE)} to {moment(self.until, MINUTE)} UTC"
        days = dict.fromkeys(moment(time, "%Y-%m-%d") for time in (self.since, self.until - DAY))
        return f"{' to '.join(days)} (UTC)"

    def part(self, at: int, slots: int) -> str:
        """Return when one of some equal parts begins.

        >>> Period(0, 80_000).part(1, 8)
        '01 Jan 00:00:10'
        """
        time = "%d %b %H:%M" if self.length >= slots * 60_000 else "%d %b %H:%M:%S"
        return moment(self.since + at * self.length // slots, "%a %d %b" if self.length == WEEK else time)

    def begins_in(self, first: int) -> bool:
        """Return whether a log whose first session is at `first` has all of the period, nearly."""
        return first <= self.since + self.length // 24


def chosen_period(first: int, last: int, length: int | None, until: int | None) -> Period:
    """Return the period to report on, of a log with sessions from `first` to `last`; `length` 0 is all of it.

    Days end at the last midnight. Without a length it is a day, or all of a log that does not have a whole day.

    >>> chosen_period(5, 2 * DAY + 7, None, None) == Period(DAY, 2 * DAY) == chosen_period(5, 7, DAY, 2 * DAY)
    True
    >>> chosen_period(5, 7, None, None), chosen_period(5, 70, 20, None), chosen_period(5, 70, 0, 50)
    (Period(since=5, until=8), Period(since=51, until=71), Period(since=5, until=50))
    """
    end = last + 1 if until is None else until
    everything = Period(first, max(end, first + 1))
    if length == 0:
        return everything
    days = length or DAY
    if until is None and days % DAY == 0:
        end -= end % DAY
    found = Period(end - days, end)
    return everything if length is None and until is None and not found.begins_in(first) else found


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

#: The parts of a sum: sessions, and the rows of the accounts.
PARTS: Final = ("sessions", *ROWS)
#: Sessions whose numbers are sorted for the quartiles.
SAMPLED: Final = 4096


class Group(NamedTuple):
    """What sessions or displays are summed by: a feature, its place in the table (ties by size), and its name."""

    feature: str
    place: int
    name: str


#: Groups that are no features of users, whose names are printable: all sessions, and those without a plan.
ALL, UNPLANNED = Group("\n", 0, "all"), Group("\n", 1, "fallback")
#: The same of ads, and of parts of the period: all sessions, with the name "", and each ad.
ADS, COURSE = "\nads", "\ncourse"

#: Where the parts of a number begin, all but the first, and their names.
Parts = tuple[list[float], list[str]]
Grouping = Callable[[Sequence[float]], Group]
Counts = defaultdict[Group, Floats]


class SessionCounter:
    """Counts the sessions of a log by period; numbers are grouped by their quartiles in the span."""

    def __init__(self, log: OrderedLog, span: Period) -> None:
        self._log, self._versions, self._reader = log, log.versions, TraceReader(log)
        self._settings = lru_cache(4096)(lambda version: self._versions.known[self._versions.nearest(version)].settings)
        self._parts = self._quartiles(span)
        self._groupings = lru_cache(4096)(self._groupings_of)

    def count(self, period: Period, slots: int) -> Counts:
        """Return the sums of a period, which is divided into `slots` equal parts."""
        counts: Counts = defaultdict(lambda: np.zeros(len(PARTS)))
        until = period.until + self._versions.longest("session_timeout")
        for trace in self._reader.read(self._log.entries("counting sessions", period.since, until)):
            if trace.arrived_at < period.until:
                self._add(trace, counts, (trace.arrived_at - period.since) * slots // period.length)
        return counts

    def _add(self, trace: SessionTrace, counts: Counts, slot: int) -> None:
        openings = self._reader.openings(trace)
        if not openings or (self._log.counts["journal"] and not trace.openings and "fallback" not in openings[0].modes):
            return
        opened, settings = openings[0], self._settings(openings[0].parameters_version)
        sums = np.zeros(len(PARTS))
        sums[0] = 1
        if not any(one.uncertain or one.slate != opened.slate for one in openings):  # else nobody knows what was shown
            for arm, row in self._displays(trace, opened, settings):
                for total in (counts[Group(ADS, 0, arm)], counts[Group(COURSE, slot, arm)], sums):
                    total += row
        groups = [ALL, Group(COURSE, slot, ""), *([UNPLANNED] if "fallback" in opened.modes else [])]
        if len(opened.context) == settings.dim:
            groups += [group(opened.context) for group in self._groupings(opened.parameters_version)]
        for group in groups:
            counts[group] += sums

    def _displays(
        self, trace: SessionTrace, opened: Opened, settings: LearningSettings
    ) -> Iterator[tuple[str, Floats]]:
        shown, clicked = trace.answered(opened.slate, settings)
        prices = self._versions.prices(self._versions.nearest(opened.parameters_version))
        for at, arm in enumerate(opened.slate[: shown if clicked else shown + 1], start=1):
            click = clicked and at == shown
            price = prices.get(arm, 0.0) if click else 0.0
            row = 0, 1, click, price, at <= shown, opened.modes[at - 1] in EXPLORED
            yield arm, np.array(row, dtype=float)

    # ── groups of users ──────────────────────────────────────────────────────────────────────────────────────────────

    def _groupings_of(self, version: int) -> list[Grouping]:
        return [
            _category(name, column, values) if values else _part(name, column, self._parts.get(name, ([], ["all"])))
            for name, column, values in columns(self._settings(version))
        ]

    def _quartiles(self, span: Period) -> dict[str, Parts]:
        """Return the parts of numbers by name."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        newest = max(self._versions.known)
        for trace in TraceReader(self._log).read(self._log.sample(SAMPLED, *span)):
            version = trace.openings[0][1].parameters_version if trace.openings else newest
            for arrival in self._reader.arrivals(trace, version)[:1]:
                for name, column, marks in columns(self._settings(version)):
                    if not marks and column < len(arrival.context) and isfinite(arrival.context[column]):
                        values[name].append(arrival.context[column])
        return {name: _parts(numbers) for name, numbers in values.items()}


def columns(settings: LearningSettings) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the features that users can be grouped by: name, first column, and the values of a category."""
    if settings.features is None or not settings.features.context:
        yield from ((f"x[{place + 1}]", place, ()) for place in range(settings.dim))
        return
    spans = spans_of(settings.features.context)
    for feature in settings.features.context:
        if feature.kind != "hashed":
            yield feature.name, spans[feature.name].start, feature.values


def _parts(numbers: list[float]) -> Parts:
    """Return the parts of a number: quartiles, or the values if they are few.

    >>> _parts([0, 1, 1, 0]), _parts([31, 31, 2000]), _parts([0] * 30 + [5, 6, 7, 8])[1]
    (([1], ['no', 'yes']), ([2000], ['31', '2,000']), ['below 5', '5 and more'])
    >>> _parts(list(range(9)))[1]
    ['below 2', '2 to 4', '4 to 6', '6 and more']
    """
    if len(few := sorted(set(numbers))) <= 4:
        return few[1:], ["no", "yes"] if few == [0, 1] else [f"{value:,.10g}" for value in few]
    quartiles = np.quantile(numbers, (0.25, 0.5, 0.75)).tolist()
    rounded = {float(f"{edge:.4g}" if abs(edge) >= 1000 else f"{edge:.3g}") for edge in quartiles}
    edges = [edge for edge in sorted(rounded) if edge > few[0]] or few[1:2]
    shown = [f"{edge:,.10g}" for edge in edges]
    return edges, [f"below {shown[0]}", *(f"{low} to {high}" for low, high in pairwise(shown)), f"{shown[-1]} and more"]


def _part(feature: str, column: int, parts: Parts) -> Grouping:
    edges, names = parts
    groups = [Group(feature, place, name) for place, name in enumerate([*names, "not known"])]
    return lambda context: groups[bisect_right(edges, number)] if isfinite(number := context[column]) else groups[-1]


def _category(feature: str, column: int, values: Sequence[str]) -> Grouping:
    marks = [(place, Group(feature, 0, value)) for place, value in enumerate(values, start=column)]
    other = Group(feature, 1, "other")  # a value that is not listed, or none
    return lambda context: next((group for place, group in marks if context[place]), other)
