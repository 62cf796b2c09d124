"""The report of a demo: one self-contained page, and its plots as files next to it."""

from __future__ import annotations

import importlib.util
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from worker.console import write_file
from worker.errors import FailedError, InputError
from worker.simulation.demo.beside import Beside
from worker.simulation.demo.run import Demo
from worker.simulation.demo.summary import summary

PAGE = "report.html"

#: The plots in their order: the function of `worker.simulation.demo.plots`, a heading and an explanation.
PLOTS = (
    (
        "tastes",
        "Who gets which ad",
        "Users are grouped by their strongest feature, or by their digit. A row shows how many of them get an ad in "
        "their slate, in percent. In the first tenth slates are drawn at random or still a guess. In the last tenth "
        "the rows look like those of the truth: each group gets the ads that it likes. The additive model, which has "
        "no tastes, shows everybody the same ads.",
    ),
    (
        "revenue",
        "Revenue against the oracle",
        "The oracle uses the true click model. Lines are expectations for the users who came, without luck; dots are "
        "the revenue of the clicks. On average dots lie below the line of their model, because some users never "
        "answer. The additive model serves the same users in a separate run.",
    ),
    (
        "regret",
        "Regret",
        "The mean loss of a session up to each episode. The solid lines are the true regret, known here because the "
        "users are simulated. The others are the figures of a real deployment: an upper bound, and an estimate "
        "that tends to be too high.",
    ),
    (
        "clicks",
        "Click rate by position",
        "High-paying, unlikely ads come first and likely ones last, so the click rate of a good slate rises towards "
        "its end. Error bars are 95 % intervals.",
    ),
    (
        "exploration",
        "Exploration",
        "The share of sessions that served learning rather than revenue. Under AUCBBP the learner sets a budget; each "
        "version has thresholds that about this many sessions pass.",
    ),
    (
        "estimates",
        "Estimates against the truth",
        "The estimates of the last version, with the uncertainty that guides exploration. On the left the log-odds of "
        "each ad for the average user, on the right the effect of each feature on each ad: on the line, it is the "
        "truth. Ads that no good slate needs remain uncertain: better estimates would cost revenue and change no "
        "slate.",
    ),
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --dim: #6b6b70; --paper: #fbfbfa; --card: #fff; --line: #e4e4e2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececee; --dim: #a0a0a6; --paper: #17181a; --card: #202124; --line: #34353a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; color: var(--dim); max-width: 46rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .75rem 1rem; }
.figure b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.figure span { color: var(--dim); font-size: .85rem; }
img { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: .6rem; }
img { padding: .5rem; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td { border-top: 1px solid var(--line); padding: .3rem 0; font-variant-numeric: tabular-nums; }
td:last-child { text-align: right; overflow-wrap: anywhere; padding-left: 1rem; }
"""


def check_report(path: Path) -> None:
    """Make the folder before any work; refuse one that cannot be written."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--report {path}: is a file, not a folder")
    if not path.exists() and not path.absolute().parent.is_dir():
        raise InputError(f"--report {path}: the folder {path.absolute().parent} does not exist")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--report {path}: this folder cannot be created: {error.strerror or error}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"--report {path}: this folder may not be written")


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(demo: Demo, folder: Path, *, seconds: float, beside: Beside | None = None) -> Path:
    """Write the plots and the page; return the path of the page. Without matplotlib it has no plots."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"cannot create the folder {folder}: {error.strerror or error}") from None
    images = draw(demo, beside) if can_draw() and demo.rows else {}
    for name, png in images.items():
        write_file(folder / f"{name}.png", png)
    page = folder / PAGE
    write_file(page, html(demo, images, seconds=seconds, beside=beside).encode())
    return page


def draw(demo: Demo, beside: Beside | None = None) -> dict[str, bytes]:
    """Return all plots by name, as PNG."""
    from worker.simulation.demo import plots

    return {name: getattr(plots, name)(demo, beside) for name, _, _ in PLOTS}


def html(demo: Demo, images: Mapping[str, bytes], *, seconds: float, beside: Beside | None = None) -> str:
    """Return the page, plots included."""
    numbers = summary(demo, beside)
    settings = numbers["settings"]
    unfinished = "" if numbers["finished"] else " Ended early."
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>adcascade demo: {escape(settings['environment'])}, {escape(settings['policy'])}</title>",
        f"<style>{_STYLE}</style><main>",
        "<h1>adcascade demo</h1>",
        f"<p>{numbers['sessions']:,} simulated sessions in {numbers['episodes']} episodes of a minute, run in "
        f"{seconds:.0f} seconds. Environment “{escape(settings['environment'])}”, {escape(settings['model'])} model, "
        f"policy {escape(settings['policy'])}, seed {settings['seed']}.{unfinished}</p>",
        _figures(numbers),
    ]
    for name, heading, text in PLOTS:
        if name in images:
            data = b64encode(images[name]).decode("ascii")
            parts.append(
                f'<h2>{escape(heading)}</h2><p>{escape(text)}</p><img src="data:image/png;base64,{data}" '
                f'alt="{escape(heading)}">'
            )
    if not can_draw():
        parts.append("<p>Plots need matplotlib (pip install 'adcascade[lab]').</p>")
    parts += ['<h2>In numbers</h2><div class="tables">', *_tables(numbers), "</div></main></html>"]
    return "\n".join(parts)


def _figures(numbers: Mapping[str, Any]) -> str:
    share, regret, explored = numbers["revenue_share"], numbers["pseudo_regret"], numbers["explored"]
    figures = [
        (f"{share['last_tenth']:.1%}", "of the oracle’s revenue, last tenth of the episodes"),
        (f"{share['first_tenth']:.1%}", "in the first tenth"),
        (f"{numbers['best_ads']['last_tenth']:.0%}", "of each user’s best ads were served, last tenth"),
        (f"{regret['last_tenth']:.5f}", "pseudo-regret per session, last tenth"),
        (f"{numbers['earned_share']['overall']:.1%}", "of the oracle’s revenue earned, overall"),
    ]
    if (additive := numbers["additive"]) is not None:
        share_beside = f"{additive['revenue_share']['last_tenth']:.1%}"
        figures.insert(1, (share_beside, "with the additive model, which knows no tastes"))
    if explored["ratio"] is not None:
        figures.append((f"{explored['ratio']:.1%}", "of the exploration budget used"))
    figures.append((f"v{numbers['parameters_version']}", f"parameters, sha256 {numbers['sha256'][:12]}…"))
    cells = "".join(f'<div class="figure"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in figures)
    return f'<div class="figures">{cells}</div>'


def _tables(numbers: Mapping[str, Any]) -> Iterable[str]:
    records = numbers["records"]
    balance = "balance" if not numbers["imbalances"] else f"do not balance: {numbers['imbalances']}"
    yield _table(
        "Traffic",
        [
            ("arrivals", f"{records['arrivals']:,}"),
            ("… repeated", f"{records['repeated']:,}"),
            ("feedback", f"{records['feedback']:,}"),
            ("… redundant", f"{records['redundant']:,}"),
            ("decisions", f"{numbers['decisions']:,}"),
            ("clicks", f"{numbers['clicks']:,}"),
            ("accounts", balance),
        ],
    )
    yield _table("Dead letters", [(name, f"{count:,}") for name, count in numbers["dead_letters"].items()])
    yield _table(
        "Revenue",
        [
            ("oracle (expected)", f"{numbers['oracle_reward']:,.2f}"),
            ("served (expected)", f"{numbers['served_reward']:,.2f}"),
            ("earned", f"{numbers['reward']:,.2f}"),
            ("pseudo-regret", f"{numbers['pseudo_regret']['total']:,.2f}"),
        ],
    )
    yield _table("Settings", [(name, str(value)) for name, value in numbers["settings"].items()])


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in rows)
    return f"<div><b>{escape(title)}</b><table>{lines or '<tr><td>none<td>'}</table></div>"
