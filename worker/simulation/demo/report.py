"""What a demo shows of itself: its numbers, the live view, the table at its end, and the report with its plots."""

from __future__ import annotations

import importlib.util
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from worker import __version__
from worker.bandit.arrays import Floats
from worker.bandit.policies import policy_named
from worker.console import write_file
from worker.errors import InputError
from worker.metrics import imbalances
from worker.simulation.demo.ledger import Row, Totals, totals
from worker.simulation.demo.run import TICK, Beside, Demo
from worker.simulation.reporting import TableRow, by_tenth, panel, trends, worth_numbers, worth_rows
from worker.simulation.users import BEGINNING
from worker.simulation.worth import tenths
from worker.stream.parameters import Parameters

if TYPE_CHECKING:
    from rich.console import RenderableType

PAGE = "report.html"
RECENT = 10  # episodes that "lately" stands for
QUARTERS = 4

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
        "users are simulated. The others are the figures of a real deployment, which hold if the model is right: "
        "an upper bound, and an estimate that tends to be too high.",
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
:root { color-scheme: light dark; --ink: #1d1d1f; --dim: #6b6b70; --paper: #fbfbfa; --line: #e4e4e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececee; --dim: #a0a0a6; --paper: #17181a; --line: #34353a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; color: var(--dim); max-width: 46rem; }
img { width: 100%; padding: .5rem; background: #fff; border: 1px solid var(--line); border-radius: .6rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td { border-top: 1px solid var(--line); padding: .3rem 1.5rem .3rem 0; vertical-align: top; white-space: pre-wrap; }
td:nth-child(2) { font-weight: bold; font-variant-numeric: tabular-nums; }
td:last-child { color: var(--dim); padding-right: 0; overflow-wrap: anywhere; }
"""


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(demo: Demo, beside: Beside | None = None) -> dict[str, Any]:
    """Return the numbers of a run over its closed episodes; the settings decide them.

    `beside` is the same run with the additive model.

    reward : revenue of the clicks
    oracle_reward, served_reward : expected revenue of the best slates and of those served, for the same arrivals
    pseudo_regret : their difference per session in the first and the last tenth of the episodes and overall; `total` is
        the sum
    revenue_share, earned_share : served / oracle, reward / oracle
    best_ads : share of the ads in the oracle's slates that were in the slates served
    explored : sessions that explored, and the budget of a policy that has one
    additive : the shares of the run with the additive model, None if there is none
    """
    parts = _parts(demo.rows)
    whole, counts, budget = parts[2], demo.counts, has_budget(demo)
    parked = sum(task.parked for task in demo.embedded.tasks)
    off = imbalances(demo.embedded.tally, demo.open_sessions, parked)
    return {
        "sessions": whole.sessions,
        "decisions": counts["decisions"],
        "clicks": whole.clicks,
        "reward": whole.earned,
        **worth_numbers(*parts),
        "earned_share": by_tenth("earned_share", *parts),
        "best_ads": by_tenth("right_share", *parts),
        "additive": None if beside is None else _additive(beside),
        "explored": {
            "sessions": whole.explored,
            "allowed": whole.allowed if budget else None,
            "ratio": whole.explored_ratio if budget else None,
        },
        "episodes": len(demo.rows),
        "finished": demo.finished,
        "parameters_version": demo.parameters.version,
        "sha256": demo.parameters.sha256,
        "observations": demo.parameters.observations,
        "log_odds_error": log_odds_error(demo),
        "records": {name: counts[name] for name in ("arrivals", "repeated", "feedback", "redundant")},
        "dead_letters": demo.dead_letters,
        "imbalances": {name: value for name, value in off.items() if value},
        "settings": msgspec.to_builtins(demo.settings),
        "version": __version__,
    }


def has_budget(demo: Demo) -> bool:
    """Return whether the policy has a budget for exploration."""
    return policy_named(demo.settings.policy).is_selective


def _parts(rows: Sequence[Row]) -> tuple[Totals, Totals, Totals]:
    """Return the totals of the first and of the last tenth, and of all rows."""
    first, last = tenths(rows)
    return totals(first), totals(last), totals(rows)


def _additive(beside: Beside) -> dict[str, Any]:
    parts = _parts(beside.rows)
    worth = worth_numbers(*parts)
    return {
        "episodes": len(beside.rows),
        **{name: worth[name] for name in ("served_reward", "pseudo_regret", "revenue_share")},
        "best_ads": by_tenth("right_share", *parts),
        "sha256": beside.sha256,
    }


def heads(parameters: Parameters) -> tuple[Floats, Floats]:
    """Return the estimated coefficients of [1; x] of each arm and their deviations, (K, d+1) each.

    They refer to the numbers of the arrivals, before these are standardised.
    """
    size = parameters.settings.dim + 1
    units = np.eye(size)  # from [1; x] to the input of the model
    if parameters.standardisation is not None:
        centre, scale = parameters.standardisation.typical
        units[1:, 1:] /= scale[:, None]
        units[1:, 0] = -centre / scale
    coefficients, deviations = np.zeros((len(parameters.arms), size)), np.zeros((len(parameters.arms), size))
    for arm in range(len(parameters.arms)):
        head, covariance = parameters.model.head(arm)
        coefficients[arm] = head @ units
        deviations[arm] = np.sqrt(np.einsum("ij,ik,kj->j", units, covariance, units))
    return coefficients, deviations


def log_odds_error(demo: Demo) -> float:
    """Return the root mean square error of the estimated log-odds over arms, at context x = 0."""
    truth = demo.world.biases
    return float(np.sqrt(((heads(demo.parameters)[0][: len(truth), 0] - truth) ** 2).mean()))


def summary_rows(numbers: Mapping[str, Any], seconds: float) -> list[TableRow]:
    """Return the rows of a summary; `seconds` is the time that the run has taken."""
    earned = f"{numbers['earned_share']['overall']:.1%} of the oracle's; some users never answer"
    best, explored, dead = numbers["best_ads"], numbers["explored"], numbers["dead_letters"]
    budget = "sessions; the policy has no budget"
    if explored["ratio"] is not None:
        budget = f"sessions, {explored['ratio']:.1%} of the budget of {explored['allowed']:,.0f}"
    of_users = f"of each user's, last tenth; {best['first_tenth']:.1%} in the first"
    most = ", ".join(f"{reason} {count}" for reason, count in list(dead.items())[:3]) + (", …" if len(dead) > 3 else "")
    rows = [
        ("sessions", f"{numbers['sessions']:,}", f"in {numbers['episodes']} episodes, {seconds:.1f} s"),
        ("decisions", f"{numbers['decisions']:,}", f"{numbers['decisions'] / max(seconds, 1e-9):,.0f} per second"),
        *worth_rows(numbers, earned=earned),
        ("best ads", f"{best['last_tenth']:.1%}", of_users),
    ]
    if (additive := numbers["additive"]) is not None:
        share, ads = additive["revenue_share"]["last_tenth"], additive["best_ads"]["last_tenth"]
        rows.append(("additive model", f"{share:.1%}", f"of the oracle's, last tenth; best ads {ads:.1%}"))
    rows += [
        ("explored", f"{explored['sessions']:,.0f}", budget),
        ("dead letters", f"{sum(dead.values()):,}", most),
        ("parameters", f"v{numbers['parameters_version']}", f"sha256 {numbers['sha256'][:16]}…"),
    ]
    if numbers["imbalances"]:
        rows.append(("BALANCES", "–", f"are off: {numbers['imbalances']}"))
    return rows


# ── the live view ────────────────────────────────────────────────────────────────────────────────────────────────────


class DemoView:
    """The source of a demo's live view; `url` is the address of its web server, `beside` the run to compare with."""

    def __init__(self, demo: Demo, url: str, beside: Beside | None = None) -> None:
        self._demo, self._url, self._beside = demo, url, beside
        self._quarter = 0

    @property
    def opening(self) -> tuple[str, ...]:
        """The addresses of metrics and status page."""
        return f"metrics: {self._url}/metrics", f"status page: {self._url}/"

    def line(self, seconds: float) -> str | None:
        """Return a line after each quarter of the run but the last."""
        demo = self._demo
        quarter = int(demo.done * QUARTERS)
        if quarter <= self._quarter or demo.finished:
            return None
        self._quarter = quarter
        return (
            f"{demo.done:4.0%}  episode {len(demo.rows)} of {demo.settings.episodes}, {totals(demo.rows).sessions:,} "
            f"sessions, lately {totals(demo.rows[-RECENT:]).share:.1%} of the oracle's revenue"
        )

    def panel(self, seconds: float) -> RenderableType:
        """Return the state of the demo for a terminal."""
        demo, settings = self._demo, self._demo.settings
        minutes, rest = divmod((demo.time - BEGINNING) // TICK, 60)
        runs = [(settings.model, demo.rows)]
        if self._beside is not None:
            runs.append((self._beside.settings.model, self._beside.rows))
        return panel(
            title=f"[bold]adcascade demo[/]  {settings.environment} · {settings.model} · {settings.policy} · "
            f"seed {settings.seed}",
            address=f"{self._url}/ · /metrics",
            colour="cyan",
            done=demo.done,
            status=f"[dim]episode[/] {len(demo.rows)}/{settings.episodes}  "
            f"[dim]event time[/] {minutes // 60}:{minutes % 60:02}:{rest:02}  [dim]in[/] {seconds:.0f} s",
            rows=summary_rows(summary(demo, self._beside), seconds),
            trends=trends(*((f"{name}: served/oracle", [row.score for row in rows]) for name, rows in runs)),
        )


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    check_report(folder)
    images = draw(demo, beside) if can_draw() and demo.rows else {}
    for name, png in images.items():
        write_file(folder / f"{name}.png", png)
    page = folder / PAGE
    write_file(page, html(summary(demo, beside), images, seconds).encode())
    return page


def draw(demo: Demo, beside: Beside | None = None) -> dict[str, bytes]:
    """Return all plots by name, as PNG."""
    from worker.simulation.demo import plots

    return {name: getattr(plots, name)(demo, beside) for name, _, _ in PLOTS}


def html(numbers: Mapping[str, Any], images: Mapping[str, bytes], seconds: float) -> str:
    """Return the page, plots included."""
    settings, records = numbers["settings"], numbers["records"]
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
        _table(summary_rows(numbers, seconds)),
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
    counted = {
        "Records": [
            ("arrivals", f"{records['arrivals']:,}", f"{records['repeated']:,} repeated"),
            ("feedback", f"{records['feedback']:,}", f"{records['redundant']:,} redundant"),
        ],
        "Dead letters": [(reason, f"{count:,}", "") for reason, count in numbers["dead_letters"].items()],
        "Settings": [(name, str(value), "") for name, value in settings.items()],
    }
    parts += [f"<h2>{heading}</h2>{_table(rows)}" for heading, rows in counted.items()]
    return "\n".join([*parts, "</main></html>"])


def _table(rows: Sequence[TableRow]) -> str:
    lines = ("".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}' for line in lines) or '<tr><td>none'}</table>"
