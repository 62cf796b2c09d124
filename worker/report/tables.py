"""The tables of a report as texts, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

Document = Mapping[str, Any]

#: What the columns mean, for readers who have never seen them.
WORDS: Final = (
    ("shown", "how often the ad was shown; a session may see several ads, one after another"),
    ("clicked", "share of the times it was shown that brought a click"),
    ("answered", "share of the times it was shown after which the user clicked or went on; the others left"),
    ("tried out", "share of the times it was shown to learn about it, not because it was expected to earn most"),
    ("per 1,000", "revenue per thousand sessions of all users"),
)


class Table(NamedTuple):
    """Headings, rows of cells, and the length of each row's bar, from 0 to 1."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] = ()


def amount(number: float | None) -> str:
    """Return an amount of money or a count of hundreds.

    >>> amount(1234.5), amount(0.03127), amount(None), amount(0)
    ('1,234.50', '0.0313', '–', '0')
    """
    if number is None:
        return "–"
    return f"{number:,.2f}" if abs(number) >= 1 else f"{number:.3g}"


def share(number: float | None) -> str:
    """Return a share in percent.

    >>> share(0.0123), share(0.5), share(None)
    ('1.2%', '50.0%', '–')
    """
    return "–" if number is None else f"{number:.1%}"


def change(now: float | None, before: float | None) -> str:
    """Return by how much a number has changed.

    >>> change(3, 2), change(2, 2), change(3, 0), change(3, None)
    ('+50.0%', '+0.0%', 'new', '–')
    """
    if now is None or before is None:
        return "–"
    return f"{now / before - 1:+.1%}" if before else "new" if now else "–"


def headline(document: Document) -> str:
    """Return what was earned, in one line."""
    total, before = document["total"], document["before"]
    than = ""
    if before is not None and before["revenue_per_session"]:
        each = before["revenue_per_session"]
        than = f", {change(total['revenue_per_session'], each)} on the {document['period']} before ({amount(each)})"
    return f"revenue per session: {amount(total['revenue_per_session'])}{than}"


def subline(document: Document) -> str:
    """Return where the revenue came from, in one line."""
    total = document["total"]
    clicks = f"{total['clicks']:,.0f} clicks in {total['sessions']:,.0f} sessions"
    return f"{document['title']}: {amount(total['revenue'])} earned by {clicks}"


def totals(document: Document) -> Table:
    """Return the figures of the period and of the one before."""
    now, before = document["total"], document["before"]
    rows = [
        (name, form(now[field]), *(() if before is None else (form(before[field]), change(now[field], before[field]))))
        for name, field, form in (
            ("sessions", "sessions", _count),
            ("revenue", "revenue", amount),
            ("revenue per session", "revenue_per_session", amount),
            ("ads shown", "displays", _count),
            ("clicks", "clicks", _count),
            ("clicked", "click_rate", share),
            ("answered", "answer_rate", share),
            ("tried out", "explored_share", share),
        )
    ]
    period = document["period"]
    return Table(("", f"this {period}", *(() if before is None else (f"the {period} before", "change"))), rows)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def ads(document: Document) -> Table:
    """Return the figures of the ads."""
    compared = document["before"] is not None
    rows = [
        (
            ad["arm"] + ("" if ad["active"] else " (retired)"),
            f"{ad['reward']:g}",
            _count(ad["displays"]),
            _count(ad["clicks"]),
            share(ad["click_rate"]),
            amount(ad["revenue"]),
            amount(ad["revenue_per_thousand"]),
            *((change(ad["revenue"], ad["before"]["revenue"]),) if compared else ()),
            share(ad["answer_rate"]),
            share(ad["explored_share"]),
        )
        for ad in document["ads"]
    ]
    header = ("ad", "pays", "shown", "clicks", "clicked", "revenue", "per 1,000", *(("change",) if compared else ()))
    return Table((*header, "answered", "tried out"), rows, _bars([ad["revenue"] for ad in document["ads"]]))


def groups(document: Document, feature: Document) -> Table:
    """Return the figures of the groups of users by a feature."""
    compared, per = document["before"] is not None, [_per_session(group) for group in feature["groups"]]
    rows = [
        (
            group["group"],
            _count(group["sessions"]),
            amount(group["revenue"]),
            amount(earned),
            *((change(earned, _per_session(group["before"])),) if compared else ()),
            _count(group["clicks"]),
            share(group["click_rate"]),
            share(group["answer_rate"]),
            share(group["explored_share"]),
        )
        for group, earned in zip(feature["groups"], per, strict=True)
    ]
    header = (feature["feature"], "sessions", "revenue", "per session", *(("change",) if compared else ()), "clicks")
    return Table((*header, "clicked", "answered", "tried out"), rows, _bars([one or 0.0 for one in per]))


def _per_session(figures: Document) -> float | None:
    return figures["revenue"] / figures["sessions"] if figures["sessions"] else None


def _bars(numbers: Sequence[float]) -> list[float]:
    most = max(numbers, default=0.0)
    return [number / most if most else 0.0 for number in numbers]
