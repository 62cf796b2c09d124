"""The numbers of a demo: for the live view, for the table at its end, for `--json` and for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from worker import __version__
from worker.bandit.arrays import Floats
from worker.bandit.policies import policy_named
from worker.console import table
from worker.metrics import imbalances
from worker.simulation.demo.beside import Beside
from worker.simulation.demo.ledger import Totals, totals
from worker.simulation.demo.run import TICK, Demo
from worker.simulation.live import Trend, compared_trends, panel, revenue_trends
from worker.simulation.users import BEGINNING
from worker.simulation.worth import tenths, worth_numbers, worth_rows
from worker.stream.parameters import Parameters

if TYPE_CHECKING:
    from rich.console import RenderableType

RECENT = 10  # episodes that "lately" stands for
QUARTERS = 4


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
    additive : the shares of the run beside this one, None if there is none
    """
    rows = demo.rows
    first, last = (totals(part) for part in tenths(rows))
    whole = totals(rows)
    counts = demo.counts
    tables = demo.embedded.tasks
    off = imbalances(demo.embedded.tally, demo.open_sessions, sum(task.parked for task in tables))
    return {
        "sessions": whole.sessions,
        "decisions": counts["decisions"],
        "clicks": whole.clicks,
        "reward": whole.earned,
        **worth_numbers(first, last, whole),
        "earned_share": {
            "first_tenth": first.earned_share,
            "last_tenth": last.earned_share,
            "overall": whole.earned_share,
        },
        "best_ads": _best_ads(first, last, whole),
        "additive": None if beside is None else _beside(beside),
        "explored": {
            "sessions": whole.explored,
            "allowed": whole.allowed if has_budget(demo) else None,
            "ratio": whole.explored_ratio if has_budget(demo) else None,
        },
        "episodes": len(rows),
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


def _best_ads(first: Totals, last: Totals, whole: Totals) -> dict[str, float]:
    return {"first_tenth": first.right_share, "last_tenth": last.right_share, "overall": whole.right_share}


def _beside(beside: Beside) -> dict[str, Any]:
    first, last = (totals(part) for part in tenths(beside.rows))
    whole = totals(beside.rows)
    return {
        "episodes": len(beside.rows),
        **{
            name: worth_numbers(first, last, whole)[name]
            for name in ("served_reward", "pseudo_regret", "revenue_share")
        },
        "best_ads": _best_ads(first, last, whole),
        "sha256": beside.sha256,
    }


def heads(parameters: Parameters) -> tuple[Floats, Floats]:
    """Return the estimated coefficients of [1; x] of each arm and their deviations, (K, d+1) each.

    They refer to the numbers of the arrivals, before these are standardised.
    """
    size, known = parameters.settings.dim + 1, parameters.standardisation
    units = np.eye(size)  # takes [1; x] to the input of the model
    if known is not None:
        units[1:, 1:] /= known.scale[:, None]
        units[1:, 0] = -known.centre / known.scale
    found, deviations = np.zeros((len(parameters.arms), size)), np.zeros((len(parameters.arms), size))
    for arm in range(len(parameters.arms)):
        head, covariance = parameters.model.head(arm)
        found[arm] = head @ units
        deviations[arm] = np.sqrt(np.einsum("ij,ik,kj->j", units, covariance, units))
    return found, deviations


def log_odds_error(demo: Demo) -> float:
    """Return the root mean square error of the estimated log-odds over arms, at context x = 0."""
    truth = demo.world.truth.biases
    return float(np.sqrt(((heads(demo.parameters)[0][: len(truth), 0] - truth) ** 2).mean()))


def summary_table(numbers: Mapping[str, Any], seconds: float) -> str:
    """Lay out a summary for people."""
    earned = f"{numbers['earned_share']['overall']:.1%} of the oracle's; some users never answer"
    rows = [
        ["sessions", f"{numbers['sessions']:,}", f"in {numbers['episodes']} episodes, {seconds:.1f} s"],
        ["decisions", f"{numbers['decisions']:,}", f"{numbers['decisions'] / max(seconds, 1e-9):,.0f} per second"],
        *worth_rows(numbers, earned=earned),
        *_comparison(numbers),
        ["explored", f"{numbers['explored']['sessions']:,.0f}", _budget(numbers["explored"])],
        ["dead letters", f"{sum(numbers['dead_letters'].values()):,}", _most(numbers["dead_letters"])],
        ["parameters", f"v{numbers['parameters_version']}", f"sha256 {numbers['sha256'][:16]}…"],
    ]
    if numbers["imbalances"]:
        rows.append(["ACCOUNTS", "–", f"do not balance: {numbers['imbalances']}"])
    return table(["", "", ""], rows).lstrip("\n")


def _comparison(numbers: Mapping[str, Any]) -> list[list[str]]:
    best = numbers["best_ads"]
    of_users = f"of each user's best ads, last tenth; {best['first_tenth']:.1%} in the first"
    rows = [["best ads", f"{best['last_tenth']:.1%}", of_users]]
    if (additive := numbers["additive"]) is not None:
        share, ads = additive["revenue_share"]["last_tenth"], additive["best_ads"]["last_tenth"]
        rows.append(["additive model", f"{share:.1%}", f"of the oracle's in the last tenth; best ads {ads:.1%}"])
    return rows


def _budget(explored: Mapping[str, Any]) -> str:
    if explored["ratio"] is None:
        return "sessions; the policy has no budget"
    return f"sessions, {explored['ratio']:.1%} of the budget of {explored['allowed']:,.0f}"


def _most(dead: Mapping[str, int]) -> str:
    shown = [f"{reason} {count}" for reason, count in dead.items()]
    return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")


# ── the live view ────────────────────────────────────────────────────────────────────────────────────────────────────


class DemoView:
    """The source of a demo's live view; `url` is the address of its web server, `beside` the run to compare with."""

    def __init__(self, demo: Demo, url: str, beside: Beside | None = None) -> None:
        self._demo, self._url, self._beside = demo, url, beside
        self._quarter = 0
        self._decisions = demo.counts["decisions"]  # of earlier processes

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
        # Sorted by name: an order by growing numbers would jump.
        letters = "  ".join(f"{reason} {count}" for reason, count in sorted(demo.dead_letters.items()))
        return panel(
            title=f"[bold]adcascade demo[/]  {settings.environment} · {settings.model} · {settings.policy} · "
            f"seed {settings.seed}",
            address=f"{self._url}/ · /metrics",
            colour="cyan",
            done=demo.done,
            status=f"[dim]episode[/] {len(demo.rows)}/{settings.episodes}  "
            f"[dim]event time[/] {minutes // 60}:{minutes % 60:02}:{rest:02}  [dim]in[/] {seconds:.0f} s",
            figures=self._figures(seconds),
            trends=self._trends(),
            footer=f"dead letters  {letters or 'none'}",
        )

    def _trends(self) -> tuple[Trend, ...]:
        demo, beside = self._demo, self._beside
        if beside is None:
            return revenue_trends([row.score for row in demo.rows])
        return compared_trends([(run.settings.model, [row.score for row in run.rows]) for run in (demo, beside)])

    def _figures(self, seconds: float) -> list[tuple[str, str]]:
        demo = self._demo
        whole, lately = totals(demo.rows), totals(demo.rows[-RECENT:])
        sessions = max(1, lately.sessions)
        displays = max(1, sum(row.episode.displays for row in demo.rows[-RECENT:]))
        budget = f" (of {lately.allowed / sessions:.1%})" if has_budget(demo) else ""
        decisions = demo.counts["decisions"]
        return [
            ("sessions", f"{whole.sessions:,}"),
            ("revenue earned", f"{whole.earned:,.1f}"),
            ("exploring", f"{lately.explored / sessions:.1%}{budget}"),
            ("decisions", f"{decisions:,} ({(decisions - self._decisions) / max(seconds, 1e-9):,.0f}/s)"),
            ("slates served", f"{whole.served:,.1f}"),
            ("parameters", f"version {demo.parameters.version}"),
            ("click rate", f"{lately.clicks / displays:.1%} of displays"),
            ("oracle", f"{whole.oracle:,.1f}"),
            ("open sessions", f"{demo.open_sessions:,}"),
            ("best ads", f"{lately.right_share:.0%} served"),
            ("lately", f"{lately.share:.1%} of oracle"),
        ]
