"""The report as one page of HTML, with everything in it, for a browser and for paper."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from worker import __version__
from worker.report.tables import WORDS, Document, Table, ads, amount, groups, headline, subline, totals
from worker.stream.accounts import DAY

_STYLE: Final = """
:root { --ink: #171b24; --quiet: #5a6272; --line: #d9dde5; --a: #2f62d9; --warn: #8a4500; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.5rem; background: #fff; color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; break-after: avoid; }
p, ul, dl { margin: .3rem 0; }
.quiet, th, figcaption, dd, footer { color: var(--quiet); }
ul { padding-left: 1.2rem; }
.warn { border-left: 4px solid #d97706; background: #fdf3e4; padding: .6rem 1rem .6rem 2rem; color: var(--warn); }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; font-variant-numeric: tabular-nums; }
thead { display: table-header-group; }
tr { break-inside: avoid; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); font-weight: 400; }
th { vertical-align: bottom; font-size: .85rem; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; padding-left: 0; }
td.bar { width: 14%; padding-right: 0; }
td.bar svg { display: block; width: 100%; height: .8rem; }
figure { margin: .6rem 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; }
svg rect { fill: var(--a); }
svg .grid { stroke: var(--line); }
svg .before { stroke: #b45309; stroke-width: 2.5; }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
dt { float: left; clear: left; width: 6rem; font-weight: 600; }
dd { margin-left: 6.5rem; }
footer { margin-top: 2rem; font-size: .85rem; }
@page { size: A4; margin: 14mm; }
@media print {
  body { padding: 0; max-width: none; font-size: 9.5pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  section { break-inside: auto; }
}
"""


def page(document: Document) -> str:
    """Return the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(document['title'])}: revenue of the ads</title><style>{_STYLE}</style>",
        f"<h1>{escape(_sentence(headline(document)))}</h1>",
        f'<p class="quiet">{escape(subline(document))}</p>',
    ]
    if document["warnings"]:
        parts.append(_list([warning["text"] for warning in document["warnings"]], "warn"))
    parts += [_table(totals(document)), _chart(document)]
    parts += ["<h2>Ads</h2>", _table(ads(document))]
    parts += ["<h2>Users</h2>"] if document["features"] else []
    parts += [_table(groups(document, feature)) for feature in document["features"]]
    parts += [
        "<h2>What changed</h2>",
        _list(changes(document) or ["Nothing in the catalogue, and no order was given."]),
    ]
    parts += ["<h2>Words</h2><dl>", *(f"<dt>{escape(word)}<dd>{escape(text)}" for word, text in WORDS), "</dl>"]
    notes = "".join(f"<p>{escape(_sentence(note))}.</p>" for note in document["notes"])
    versions = document["versions"]
    served = f"Versions {versions['first']} to {versions['last']} of the parameters served."
    return "\n".join([*parts, f"<footer>{notes}<p>{served} adcascade {__version__}</p></footer>", "</html>"])


def changes(document: Document) -> list[str]:
    """Return what changed, a line each, with its time where it has one."""
    return [
        f"{datetime.fromtimestamp(one['at'] / 1000, UTC):%Y-%m-%d %H:%M}: {one['text']}" if one["at"] else one["text"]
        for one in document["changes"]
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list(lines: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(_sentence(line))}" for line in lines)
    return f'<ul class="{kind}">{items}</ul>'


def _table(table: Table) -> str:
    bars = [_BAR.format(100 * length) for length in table.bars] or [""] * len(table.rows)
    head = "".join(f"<th>{escape(name)}" for name in table.header) + ("<th>" if table.bars else "")
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) + bar for row, bar in zip(table.rows, bars, strict=True)
    ]
    return f"<table><thead><tr>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


_BAR: Final = (
    '<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none"><rect width="{:.1f}" height="10"/></svg>'
)

# ── the chart ────────────────────────────────────────────────────────────────────────────────────────────────────────

_WIDE, _HIGH, _LEFT, _TOP, _FOOT = 720, 170, 46, 8, 22


def _chart(document: Document) -> str:
    """Return revenue per session along the period as bars, and that of the period before as marks."""
    course: list[dict[str, Any]] = document["course"]
    most = max((value for one in course for value in (one["revenue_per_session"], one["before"]) if value), default=0.0)
    if not most:
        return ""
    step, ground = (_WIDE - _LEFT) / len(course), _HIGH - _FOOT
    scale = (ground - _TOP) / most
    drawn = []
    for value in (most, most / 2, 0.0):
        y = ground - value * scale
        drawn.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDE}"/><text y="{y + 4:.1f}">{amount(value)}</text>')
    for place, one in enumerate(course):
        x, size = _LEFT + place * step, (one["revenue_per_session"] or 0.0) * scale
        drawn.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{ground - size:.1f}" width="{step * 0.8:.1f}" height="{size:.1f}"/>'
        )
        if one["before"]:
            drawn.append(f'<path class="before" d="M{x:.1f} {ground - one["before"] * scale:.1f}h{step:.1f}"/>')
        if place % max(1, len(course) // 8) == 0:
            drawn.append(f'<text x="{x + step * 0.1:.1f}" y="{_HIGH - 6}">{_label(one["since"], document)}</text>')
    compared = "" if document["before"] is None else f"; the line is the {document['period']} before"
    caption = f"<figcaption>Revenue per session along the {document['period']}{compared}.</figcaption>"
    return f'<figure><svg viewBox="0 0 {_WIDE} {_HIGH}" role="img">{"".join(drawn)}</svg>{caption}</figure>'


def _label(time: int, document: Document) -> str:
    at = datetime.fromtimestamp(time / 1000, UTC)
    return f"{at:%a %d %b}" if document["until"] - document["since"] > 2 * DAY else f"{at:%H:%M}"
