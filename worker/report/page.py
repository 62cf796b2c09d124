"""The report as a page of HTML, for a browser and for paper: everything is in the file, and it prints on A4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from worker import __version__
from worker.report.tables import WORDS, Table, changes, heads, tables


def report_page(document: Mapping[str, Any]) -> str:
    """Return the page."""
    first, *others = heads(document)
    parts = [
        f"<h1>{_sentence(first)}</h1>" + "".join(f'<p class="quiet">{_sentence(line)}' for line in others),
        _list((warning["text"] for warning in document["warnings"]), "warn"),
    ]
    found = [(title, _table(table)) for title, table in tables(document)]
    found.append(
        ("What changed", _list(changes(document)) or "<p>Neither the ads nor their prices; no order was given.")
    )
    parts += [f"<h2>{escape(title)}</h2>{content}" for title, content in found]
    parts.append(glossary(WORDS))
    versions = " to ".join(map(str, document["versions"]))
    notes = [*document["notes"], f"versions {versions} of the parameters; adcascade {__version__}"]
    return page(f"{document['title']}: what the ads earned", [*parts, f"<footer>{_list(notes)}</footer>"])


def glossary(words: Mapping[str, str]) -> str:
    """Return what the words of a page mean."""
    meanings = "".join(f"<dt>{escape(word)}<dd>{escape(text)}" for word, text in words.items())
    return f"<h2>What the words mean</h2><dl>{meanings}</dl>"


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:])


def _list(lines: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{_sentence(line)}" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


_BAR: Final = (
    '<td class="bar"><svg viewBox="0 0 100 9" preserveAspectRatio="none"><rect width="{:.1f}" height="9"/></svg>'
)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}" for name in (*table.header, table.bar))
    rows = [
        f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}{_BAR.format(100 * length)}"
        for row, length in zip(table.rows, table.bars, strict=True)
    ]
    return f"<table><thead><tr>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


# ── the frame of all printed pages ───────────────────────────────────────────────────────────────────────────────────

_STYLE: Final = """
:root { color-scheme: light; --ink: #171b24; --quiet: #5a6272; --line: #d9dde5; --a: #2f62d9; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.5rem; color: var(--ink); background: #fff;
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .2rem; break-after: avoid; }
section p { margin: .25rem 0; break-after: avoid; }
.quiet, th, dd, footer { color: var(--quiet); }
.warn { border-left: 4px solid #d97706; background: #fdf3e4; padding: .6rem 1rem .6rem 2rem; }
.loud { border: 3px solid #b00020; color: #b00020; font-weight: bold; padding: .5rem .75rem; }
.good { color: #1b6e3c; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
tr, pre, svg, img { break-inside: avoid; }
th, td { text-align: right; padding: .22rem .4rem; border-bottom: 1px solid var(--line); font-weight: 400; }
th { font-size: .85rem; vertical-align: top; }
th:first-child, td:first-child, .facts td { text-align: left; overflow-wrap: anywhere; }
th:first-child, td:first-child { padding-left: 0; width: 17%; }
th:last-child { text-align: left; }
.bar { width: 13%; padding-right: 0; }
.bar svg { height: .8rem; fill: var(--a); }
svg, img { display: block; width: 100%; }
section svg { max-width: 46rem; margin: .5rem 0; font: 12px system-ui, sans-serif; fill: var(--ink); }
pre { font-size: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dt { float: left; clear: left; font-weight: 600; }
dd { margin-left: 6.5rem; }
@page { size: A4; margin: 14mm; }
@media print { body { padding: 0; max-width: none; font-size: 9pt; print-color-adjust: exact; }
  th { font-size: 8pt; } th, td { padding: .15rem .25rem; } section svg { max-width: 34rem; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return the page; its parts are HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return "\n".join(["<!doctype html>", f'<html lang="en">{head}', *parts, "</html>\n"])
