"""The lines and tables of a report as texts, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from worker.console import moment
from worker.report.counting import MINUTE
from worker.stream.calibration import USUAL
from worker.stream.events import ComparedOutcome
from worker.stream.lift import with_interval

#: What the columns mean, for readers who have never seen them.
WORDS: Final = {
    "per 1,000": "revenue per thousand sessions; in the table of ads, of all sessions",
    "change": "of revenue per thousand sessions, against the period before",
    "shown": "how often an ad was shown; a session may see several, one after another",
    "clicked": "share of the times it was shown that brought a click",
    "answered": "share of the times it was shown after which the user clicked or went on; the others left",
    "tried out": "share of the times it was shown to learn about it, not because it was expected to earn most",
}


#: Ads that are shown; the JSON has all.
MOST_ADS: Final = 50


class Table(NamedTuple):
    """Headings, rows of cells, and the heading and the lengths, from 0 to 1, of bars next to them."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bar: str
    bars: Sequence[float]


def amount(number: float | None) -> str:
    """Return an amount of money.

    >>> amount(1234.5), amount(0.03127), amount(None), amount(0)
    ('1,234.50', '0.0313', '–', '0')
    """
    return "–" if number is None else f"{number:,.2f}" if abs(number) >= 1 else f"{number:.3g}"


def _share(number: float | None) -> str:
    return "–" if number is None else f"{number:.1%}"


def _change(now: float | None, before: float | None) -> str:
    return "–" if now is None or before is None else f"{now / before - 1:+.1%}" if before else "new" if now else "–"


#: Columns: heading, field, form.
_COLUMNS: Final[Sequence[tuple[str, str, Callable[[Any], str]]]] = (
    ("pays", "reward", lambda price: f"{price:g}"),
    ("sessions", "sessions", lambda count: f"{count:,.0f}"),
    ("revenue", "revenue", amount),
    ("per 1,000", "revenue_per_thousand", amount),
    ("change", "change", str),
    ("shown", "displays", lambda count: f"{count:,.0f}"),
    ("clicks", "clicks", lambda count: f"{count:,.0f}"),
    ("clicked", "click_rate", _share),
    ("answered", "answer_rate", _share),
    ("tried out", "explored_share", _share),
)


def table_of(title: str, rows: Sequence[Mapping[str, Any]], bar: str = "revenue_per_thousand") -> Table:
    """Return rows of figures as a table; `bar` is the field whose size is drawn."""
    columns = [column for column in _COLUMNS if column[1] in rows[0] or (column[1] == "change" and rows[0]["before"])]
    cells = [
        (
            row["name"] + ("" if row.get("active", True) else " (retired)"),
            *(form(_of_change(row) if field == "change" else row[field]) for _, field, form in columns),
        )
        for row in rows
    ]
    most = max(row[bar] or 0.0 for row in rows)
    lengths = [most and (row[bar] or 0) / most for row in rows]
    heading = next(name for name, field, _ in columns if field == bar)
    return Table((title, *(name for name, _, _ in columns)), cells, heading, lengths)


def _of_change(row: Mapping[str, Any]) -> str:
    return _change(row["revenue_per_thousand"], row["before"]["revenue_per_thousand"])


def tables(document: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Return all tables, each with its heading."""
    total, period = document["total"], document["period"]
    both = [total, *([{**total["before"], "name": f"the {period} before", "before": total}] if total["before"] else [])]
    found = [("In all", table_of("", [{**row, "before": None} for row in both]))]
    found.append((f"Along the {period}", table_of("from", document["course"])))
    ads, more = document["ads"][:MOST_ADS], f", the first {MOST_ADS}" if len(document["ads"]) > MOST_ADS else ""
    found += [(f"Ads{more}", table_of("ad", ads, "revenue"))] if ads else []
    groups = [(one["feature"], one["groups"]) for one in document["features"] if one["groups"]]
    return found + [(f"Users by {name}", table_of(name, rows)) for name, rows in groups]


def heads(document: Mapping[str, Any]) -> list[str]:
    """Return what was earned, in a few lines, what a control group says first."""
    now, before, title = document["total"], document["total"]["before"], document["title"]
    than = ""
    if before and before["revenue"]:
        each = amount(before["revenue_per_thousand"] / 1000)
        than = f", {_of_change(now)} on the {document['period']} before ({each})"
    clicks = f"{now['clicks']:,.0f} clicks in {now['sessions']:,.0f} sessions"
    each, lift = amount(now["revenue_per_thousand"] / 1000), document["lift"]
    headline, earned = f"revenue per session: {each}{than}", f"{title}: {amount(now['revenue'])} earned by {clicks}"
    lines = [headline, earned]
    if lift is not None and "revenue" in lift:
        by = f"by {lift['sessions']:,} sessions since {moment(lift['since'], MINUTE)}, with 95 % certainty"
        found = msgspec.convert(lift["clicks"], ComparedOutcome)
        compared = f"compared with the control group {by}; clicks per session {with_interval(found)}"
        lines = [lift["sentence"], f"{earned}, {each} per session{than}", compared]
    elif lift is not None:
        lines.append(f"against the control group: {lift['sentence']}")
    if (clicks := document["predictions"]) is not None:
        verdict = "close enough" if USUAL[0] <= clicks["low"] <= clicks["high"] <= USUAL[1] else "not sure yet"
        verdict = "do not trust what is expected of ads" if clicks["bad"] else verdict
        between = f"between {clicks['low']:.2f} and {clicks['high']:.2f}"
        lines.append(f"users clicked {clicks['estimate']:.2f} times as often as predicted ({between}): {verdict}")
    return lines


def changes(document: Mapping[str, Any]) -> list[str]:
    """Return what changed, a line each, with its time where it has one."""
    return [f"{moment(one['at'], MINUTE)}: {one['text']}" if one["at"] else one["text"] for one in document["changes"]]
