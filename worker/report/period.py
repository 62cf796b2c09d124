"""The period of a report, and the one before it, which it is compared with. Days are days of UTC."""

from __future__ import annotations

from typing import Final, NamedTuple

from worker.console import moment
from worker.stream.accounts import DAY

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
