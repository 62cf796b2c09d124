"""An explanation as a page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from worker.cli.explanation_text import ranked
from worker.stream.contest import Position
from worker.web.printed import page

MOST_BARS = 10
WIDTH, LABEL, NUMBER, LINE = 720, 190, 70, 20  # of a picture, in its units
LONGEST = 26  # characters of a label


def explanation(
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
        f'<table class="facts">{rows}</table>',
        f"<p>{'<br>'.join(map(escape, notes))}</p>",
        *(
            f"<section><h2>{escape(heading)}</h2>{picture}<pre>{escape(numbers)}</pre></section>"
            for heading, picture, numbers in sections
        ),
    ]
    return page(title, parts)


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
