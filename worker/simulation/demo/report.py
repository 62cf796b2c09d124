"""The report of a demo: one page of HTML with its numbers and plots."""

from __future__ import annotations

import importlib.util
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from worker.console import write_file
from worker.report.page import page
from worker.simulation.demo import plots
from worker.simulation.demo.run import Demo, FinishedRun
from worker.simulation.demo.summary import summary, summary_rows
from worker.simulation.worth import TableRow

#: The plots in their order, each with a heading and an explanation.
PLOTS = (
    (
        plots.tastes,
        "Who gets which ad",
        "Users are grouped by their strongest feature, or by their digit. A row shows how many of them get an ad in "
        "their slate, in percent. In the first tenth slates are drawn at random or still a guess. In the last tenth "
        "the rows look like those of the truth: each group gets the ads that it likes. The additive model, which has "
        "no tastes, shows everybody the same ads.",
    ),
    (
        plots.revenue,
        "Revenue against the oracle",
        "The oracle uses the true click model. Lines are expectations for the users who came, without luck; dots are "
        "the revenue of the clicks. On average dots lie below the line of their model, because some users never "
        "answer. The additive model serves the same users in a separate run.",
    ),
    (
        plots.exploration,
        "Exploration",
        "The share of sessions that served learning rather than revenue. Under AUCBBP the learner sets a budget; each "
        "version has thresholds that about this many sessions pass.",
    ),
    (
        plots.estimates,
        "Estimates against the truth",
        "The estimates of the last version, with the uncertainty that guides exploration. On the left the log-odds of "
        "each ad for the average user, on the right the effect of each feature on each ad: on the line, it is the "
        "truth. Ads that no good slate needs remain uncertain: better estimates would cost revenue and change no "
        "slate.",
    ),
)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(demo: Demo, path: Path, *, seconds: float, other: FinishedRun | None = None) -> None:
    """Write the page with the plots; without matplotlib it has none."""
    images = [draw(demo, other) for draw, _, _ in PLOTS] if can_draw() and demo.rows else []
    write_file(path, html(summary(demo, other), images, seconds).encode())


def html(numbers: Mapping[str, Any], images: Sequence[bytes], seconds: float) -> str:
    """Return the page; `images` are its plots, or empty."""
    settings = numbers["settings"]
    unfinished = "" if numbers["finished"] else " Ended early."
    parts = [
        "<h1>adcascade demo</h1>",
        f"<p>{numbers['sessions']:,} simulated sessions in {numbers['episodes']} episodes of a minute, run in "
        f"{seconds:.0f} seconds. Environment “{escape(settings['environment'])}”, {escape(settings['model'])} model, "
        f"policy {escape(settings['policy'])}, seed {settings['seed']}.{unfinished}</p>",
        _table(summary_rows(numbers, seconds)),
    ]
    for (_, heading, text), image in zip(PLOTS, images, strict=False):
        source = f"data:image/png;base64,{b64encode(image).decode('ascii')}"
        parts.append(f'<h2>{escape(heading)}</h2><p>{escape(text)}</p><img src="{source}" alt="{escape(heading)}">')
    if not can_draw():
        parts.append("<p>Plots need matplotlib (pip install 'adcascade[lab]').</p>")
    parts += ["<h2>Settings</h2>", _table([(name, str(value), "") for name, value in settings.items()])]
    return page(f"adcascade demo: {settings['environment']}, {settings['policy']}", parts)


def _table(rows: Sequence[TableRow]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    return f'<table class="facts">{lines}</table>'
