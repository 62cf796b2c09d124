"""The report as a page of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from worker import __version__
from worker.report.tables import WORDS, Table, changes, heads, tables
from worker.web.printed import page


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
    meanings = "".join(f"<dt>{escape(word)}<dd>{escape(text)}" for word, text in WORDS.items())
    found.append(("What the words mean", f"<dl>{meanings}</dl>"))
    parts += [f"<h2>{escape(title)}</h2>{content}" for title, content in found]
    versions = " to ".join(map(str, document["versions"]))
    notes = [*document["notes"], f"versions {versions} of the parameters; adcascade {__version__}"]
    return page(f"{document['title']}: what the ads earned", [*parts, f"<footer>{_list(notes)}</footer>"])


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
