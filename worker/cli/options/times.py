"""Times as people write them on a command line."""

from __future__ import annotations

from datetime import UTC, datetime

from worker.cli.options.learning import duration


def span(text: str) -> tuple[int, int]:
    """Return the milliseconds of a shortest and a longest duration; one alone is both.

    >>> span("1.5s-6.5s"), span("0")
    ((1500, 6500), (0, 0))
    """
    shortest, _, longest = text.partition("-")
    bounds = int(duration(shortest)), int(duration(longest or shortest))
    if bounds[0] > bounds[1]:
        raise ValueError(f"must go from a shorter to a longer time, not {text!r}")
    return bounds


def moment(text: str, now: int) -> int:
    """Return a time in milliseconds since the epoch: a date and time (UTC unless it says otherwise), or how long ago.

    >>> moment("2026-01-01T00:00:01Z", now=0), moment("10m", now=1_000_000)
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
