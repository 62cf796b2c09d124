"""An explanation as one page of HTML: everything is in the file, every text is escaped, and it prints on A4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from worker.cli.explanation_text import outside, reason, rows_of
from worker.stream.explanation import Explanation, Position
from worker.stream.parameters import Parameters

MOST_BARS = 10
MOST_PARTS = 8

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1d1d1f; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; }
.loud { border: 3px solid #b00020; color: #b00020; font-weight: bold; padding: .5rem .75rem; }
.good { color: #1b6e3c; }
.dim { color: #5f5f66; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-top: 1px solid #e4e4e2; padding: .15rem .9rem .15rem 0; text-align: left; overflow-wrap: anywhere; }
th { color: #5f5f66; font-weight: normal; vertical-align: top; }
svg { display: block; width: 100%; max-width: 46rem; margin: .5rem 0; }
svg text { font: 12px system-ui, sans-serif; fill: #1d1d1f; }
section { break-inside: avoid; }
@media print { body { font-size: 11px; } main { max-width: none; padding: 0; } @page { size: A4; margin: 15mm; } }
"""
WIDTH, LABEL, NUMBER, LINE = 720, 190, 70, 20  # of a picture, in its units


class Bar(NamedTuple):
    """A bar: its label, where it begins and ends, and a paler part from there on; `strong` for the choice."""

    label: str
    begin: float
    end: float
    more: float = 0.0
    strong: bool = False


def bars(title: str, rows: Sequence[Bar], *, number: str = "{:.4g}") -> str:
    """Return a picture of bars, as inline SVG."""
    low = min([0.0, *(min(row.begin, row.end) for row in rows)])
    high = max([0.0, *(max(row.begin, row.end + row.more) for row in rows)])
    scale = (WIDTH - LABEL - NUMBER) / ((high - low) or 1.0)

    def at(value: float) -> float:
        return LABEL + (value - low) * scale

    parts = [f'<line x1="{at(0):.1f}" x2="{at(0):.1f}" y1="0" y2="{LINE * len(rows)}" stroke="#9a9aa0"/>']
    for number_of_row, row in enumerate(rows):
        y, colour = LINE * number_of_row, "#0072b2" if row.strong else "#8fa9bd"
        left, right = sorted((at(row.begin), at(row.end)))
        label = row.label if len(row.label) <= 26 else row.label[:25] + "…"
        parts.append(f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect x="{left:.1f}" y="{y + 3}" width="{right - left:.1f}" height="14" fill="{colour}"/>')
        if row.more:
            parts.append(
                f'<rect x="{at(row.end):.1f}" y="{y + 3}" width="{row.more * scale:.1f}" height="14" fill="#e69f00"/>'
            )
        tip = max(right, at(row.end + row.more))
        value = row.end - row.begin + row.more
        parts.append(f'<text x="{tip + 5:.1f}" y="{y + 14}">{escape(number.format(value))}</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {LINE * len(rows)}"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def page(
    title: str,
    head: Mapping[str, str],
    verdict: Sequence[str],
    parameters: Parameters,
    reasons: Explanation,
    why: Mapping[str, Sequence[str]],
) -> str:
    """Return the page: facts, the verdict on planning again, every position, and answers to --why-not by arm."""
    loud = any(line.startswith("!!!") for line in verdict)
    parts = [f"<h1>{escape(title)}</h1>"]
    if verdict:
        parts.append(f'<p class="{"loud" if loud else "good"}">{"<br>".join(map(escape, verdict))}</p>')
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in head.items())
    parts.append(f"<table>{rows}</table>")
    parts += [f"<p class=dim>{escape(text)}</p>" for text in reasons.notes]
    for arm, lines in why.items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f"<section><h2>Why not {escape(arm)}?</h2><ul>{items}</ul></section>")
    parts += [_position(parameters, position) for position in reasons.positions]
    charset = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f"<!doctype html><html lang=en>{charset}<title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<main>{''.join(parts)}</main></html>\n"
    )


def _position(parameters: Parameters, position: Position) -> str:
    out = "".join(f"<p class=dim>{escape(line)}</p>" for line in outside(position))
    if position.choice is None:
        return f"<section><h2>No arm was eligible</h2>{out}</section>"
    columns, rows = rows_of(parameters, position)
    scores = [
        Bar(row["arm"], 0.0, row["q"], row["score"] - row["q"], row["arm"] == position.choice)
        for row in rows[:MOST_BARS]
    ]
    parts = next(one for one in position.arms if one.arm == position.choice).contributions
    steps, at = [], 0.0
    for part in parts[:MOST_PARTS]:
        steps.append(Bar(part.feature, at, at + part.contribution))
        at += part.contribution
    if rest := parts[MOST_PARTS:]:
        steps.append(Bar(f"{len(rest)} more", at, at + sum(part.contribution for part in rest)))
    heads = "".join(f"<th>{escape(name)}</th>" for name in columns)
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(form.format(**row))}</td>' for form in columns.values())}</tr>" for row in rows
    )
    return (
        f"<section><h2>Position {position.position}: {escape(position.choice)} ({escape(position.mode)})</h2>"
        f"<p>{escape(reason(position))}.</p>"
        f"<p class=dim>Expected revenue from here on (blue), and the bonus of exploration (orange):</p>"
        f"{bars(f'scores at position {position.position}', scores)}"
        f"<p class=dim>Log-odds of a click on {escape(position.choice)}, part by part:</p>"
        f"{bars(f'log-odds of {position.choice}', steps, number='{:+.2f}')}"
        f"</section><table><tr>{heads}</tr>{cells}</table>{out}"
    )
