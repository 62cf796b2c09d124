"""The period of a report, and the one before it, which it is compared with. Days are days of UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, NamedTuple

from worker.errors import InputError
from worker.stream.accounts import DAY

WEEK: Final = 7 * DAY


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

    def __str__(self) -> str:
        since, until = (datetime.fromtimestamp(time / 1000, UTC) for time in self)
        if self.since % DAY or self.until % DAY:
            return f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"
        last = datetime.fromtimestamp((self.until - DAY) / 1000, UTC)
        return f"{since:%Y-%m-%d} (UTC)" if self.length == DAY else f"{since:%Y-%m-%d} to {last:%Y-%m-%d} (UTC)"

    @property
    def name(self) -> str:
        """The length as a noun.

        >>> Period(0, DAY).name, Period(DAY, 8 * DAY).name, Period(0, 5).name
        ('day', 'week', 'period')
        """
        return {DAY: "day", WEEK: "week"}.get(self.length, "period")

    def begins_in(self, first: int) -> bool:
        """Return whether a log whose first session is at `first` has (nearly) all of the period."""
        return first <= self.since + self.length // 24


def whole_days(length: int, end: int) -> Period:
    """Return the last whole days before a time."""
    return Period(end - end % DAY - length, end - end % DAY)


def chosen_period(first: int, last: int, length: int | None, until: int | None) -> Period:
    """Return the period to report on, of a log with sessions from `first` to `last`; `length` 0 is all of it.

    Days and weeks are whole ones, and end at the last midnight. Without a length it is a day, or all of a log that does
    not have a whole day.

    >>> chosen_period(5, 2 * DAY + 7, None, None) == Period(DAY, 2 * DAY)
    True
    >>> chosen_period(5, 7, None, None), chosen_period(5, 70, 20, None), chosen_period(5, 70, 20, 50)
    (Period(since=5, until=8), Period(since=51, until=71), Period(since=30, until=50))
    """
    everything = Period(first, last + 1)
    if length == 0:
        return everything if until is None else Period(first, max(first + 1, until))
    if until is not None:
        return Period(until - (length or DAY), until)
    if length is None:
        day = whole_days(DAY, last + 1)
        return day if day.begins_in(first) else everything
    return whole_days(length, last + 1) if length % DAY == 0 else Period(last + 1 - length, last + 1)


def check_not_empty(sessions: int, period: Period, first: int, last: int) -> None:
    """Raise `InputError` for a period without sessions."""
    if not sessions:
        has = f"there are some from {Period(first, last + 1)}: give --until TIME, or --period all" if last else ""
        raise InputError(f"there are no sessions in {period}; {has or 'the source has none at all'}")
