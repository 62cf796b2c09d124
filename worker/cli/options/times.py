"""Times on the command line: durations with a unit, ranges of them, points in time."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime

from worker.cli.options.parser import Option, bounded
from worker.console import moment

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_TIME = "a time with a unit, such as 60s, 500ms, 2h or 7d, of whole milliseconds"


def duration_text(milliseconds: int) -> str:
    """Return a duration as it is typed.

    >>> duration_text(60_000), duration_text(500), duration_text(90_000)
    ('60s', '500ms', '90s')
    """
    for unit in ("d", "h", "s"):
        if milliseconds and milliseconds % _UNITS[unit] == 0:
            return f"{milliseconds // _UNITS[unit]}{unit}"
    return f"{milliseconds}ms"


def duration(text: str) -> int:
    """Read a duration with its unit, in milliseconds.

    >>> duration("1.5s"), duration("2 h"), duration("0")
    (1500, 7200000, 0)
    """
    if text.strip() == "0":
        return 0
    found = _DURATION.fullmatch(text.strip().lower())
    milliseconds = float(found[1]) * _UNITS.get(found[2], math.nan) if found else math.nan
    if not milliseconds.is_integer():
        raise ValueError(f"must be {_TIME}, not {text!r}")
    return int(milliseconds)


def time_option(
    name: str, help: str, default: int | None = None, *, least: int | None = None, most: int | None = None
) -> Option:
    """Return an option for a duration; its default and its bounds are in milliseconds."""
    parse = bounded(duration, _TIME, duration_text, least=least, most=most)
    return Option(name, help, parse=parse, default=default, metavar="TIME", show=duration_text)


def seconds_option(
    name: str, help: str, default: float | None = None, *, least: int | None = None, most: int | None = None
) -> Option:
    """Return an option for a duration in seconds; its bounds are in milliseconds."""
    option = time_option(name, help, least=least, most=most)
    return replace(
        option,
        parse=lambda text: option.parse(text) / 1000,
        default=default,
        show=lambda seconds: duration_text(round(1000 * seconds)),
    )


def duration_range(text: str) -> tuple[int, int]:
    """Read a shortest and a longest duration, in milliseconds; a single one is both.

    >>> duration_range("1.5s-6.5s"), duration_range("0")
    ((1500, 6500), (0, 0))
    """
    shortest, _, longest = text.partition("-")
    bounds = duration(shortest), duration(longest or shortest)
    if bounds[0] > bounds[1]:
        raise ValueError(f"must go from a shorter to a longer time, not {text!r}")
    return bounds


def time_span(first: int | None, last: int | None) -> str:
    """Return a span as the end of a sentence; nothing without records."""
    return "" if last is None else f", {moment(first)} to {moment(last)} UTC"


def timestamp(text: str, now: int) -> int:
    """Read a time, in milliseconds since the epoch: a date and time (UTC by default), or a duration before `now`.

    >>> timestamp("2026-01-01T00:00:01Z", now=0), timestamp("10m", now=1_000_000)
    (1767225601000, 400000)
    """
    text = text.strip()
    try:
        return now - duration(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"must be a time such as 2026-01-31T12:00:00Z, or how long ago (10m), not {text!r}") from None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
