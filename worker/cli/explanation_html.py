"""An explanation as one page of HTML: everything is in the file, every text is escaped, and it prints on A4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from worker.cli.explanation_text import ranked
from worker.stream.contest import Position

MOST_BARS = 10
WIDTH, LABEL, NUMBER, LINE = 720, 190, 70, 20  # of a picture, in its units
LONGEST = 26  # characters of a label

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1d1d1f; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; }
.loud { border: 3px solid #b00020; color: #b00020; font-weight: bold; padding: .5rem .75rem; }
.good { color: #1b6e3c; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-top: 1px solid #e4e4e2; padding: .15rem .9rem .15rem 0; text-align: left; overflow-wrap: anywhere; }
th { color: #5f5f66; font-weight: normal; vertical-align: top; white-space: nowrap; }
pre { font-size: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
svg { display: block; width: 100%; max-width: 46rem; margin: .5rem 0; }
svg text { font: 12px system-ui, sans-serif; fill: #1d1d1f; }
h2, section p { break-after: avoid; }
pre, svg { break-inside: avoid; }
@page { size: A4; margin: 15mm; }
@media print { body { font-size: 11px; } main { max-width: none; padding: 0; } svg { max-width: 34rem; } }
"""


def page(
    title: str,
    head: Mapping[str, str],
    said: Sequence[str],
    notes: Sequence[str],
    sections: Sequence[tuple[str, str, str]],
) -> str:
    """Return the page: the verdict on planning again, facts, notes, and sections of title, picture and numbers."""
    loud = any(line.startswith("!!!") for line in said)
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in head.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{"loud" if loud else "good"}">{"<br>".join(map(escape, said))}</p>',
        f"<table>{rows}</table>",
        f"<p>{'<br>'.join(map(escape, notes))}</p>",
        *(
            f"<section><h2>{escape(heading)}</h2>{picture}<pre>{escape(numbers)}</pre></section>"
            for heading, picture, numbers in sections
        ),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<main>{''.join(parts)}</main></html>\n"
    )


def picture(position: Position) -> str:
    """Return the scores of the best arms at a position, the bonus apart."""
    best = ranked(position)[:MOST_BARS]
    scale = (WIDTH - LABEL - NUMBER) / (max((one.score for one in best), default=0.0) or 1.0)
    parts = []
    for row, one in enumerate(best):
        y, colour = LINE * row, "#0072b2" if one.arm == position.choice else "#8fa9bd"
        q, bonus = (max(0.0, value * scale) for value in (one.q, one.bonus))
        label = one.arm if len(one.arm) <= LONGEST else f"{one.arm[: LONGEST - 1]}…"
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{LABEL}" y="{y + 3}" width="{q:.1f}" height="14" fill="{colour}"/>'
            f'<rect x="{LABEL + q:.1f}" y="{y + 3}" width="{bonus:.1f}" height="14" fill="#e69f00"/>'
            f'<text x="{LABEL + q + bonus + 5:.1f}" y="{y + 14}">{one.score:.4g}</text>'
        )
    title = "Score of each ad: expected revenue from here on (blue), bonus of exploration (orange)"
    return f'<p>{title}</p><svg viewBox="0 0 {WIDTH} {LINE * len(best)}"><title>{title}</title>{"".join(parts)}</svg>'
