"""The numbers of a demo, and the rows of the table at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from worker import __version__
from worker.bandit.arrays import Floats
from worker.bandit.policies import POLICIES
from worker.simulation.demo.ledger import Row, Totals, totals
from worker.simulation.demo.run import Demo, FinishedRun
from worker.simulation.worth import TableRow, by_tenth, tenths, worth_numbers, worth_rows
from worker.stream.parameters import Parameters


def summary(demo: Demo, other: FinishedRun | None = None) -> dict[str, Any]:
    """Return the numbers of a run over its closed episodes; the settings decide them.

    `other` is the same run with the additive model.

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
    whole, tally, budget = parts[2], demo.embedded.tally, has_budget(demo)
    off = tally.imbalances(demo.embedded.tasks)
    return {
        "sessions": whole.worth.sessions,
        "decisions": tally.decisions.total(),
        "clicks": whole.clicks,
        "reward": whole.earned,
        **worth_numbers(*(part.worth for part in parts)),
        "earned_share": by_tenth("earned_share", *parts),
        "best_ads": by_tenth("right_share", *parts),
        "additive": None if other is None else _additive(other),
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
        "records": {name: getattr(tally, name) for name in ("arrivals", "repeated", "feedback", "redundant")},
        "dead_letters": dict(sorted(tally.dead.items(), key=lambda item: (-item[1], item[0]))),
        "imbalances": {name: value for name, value in off.items() if value},
        "settings": asdict(demo.settings),
        "version": __version__,
    }


def has_budget(demo: Demo) -> bool:
    """Return whether the policy has a budget for exploration."""
    return POLICIES[demo.settings.policy].is_selective


def _parts(rows: Sequence[Row]) -> tuple[Totals, Totals, Totals]:
    """Return the totals of the first and of the last tenth, and of all rows."""
    first, last = tenths(rows)
    return totals(first), totals(last), totals(rows)


def _additive(other: FinishedRun) -> dict[str, Any]:
    parts = _parts(other.rows)
    worth = worth_numbers(*(part.worth for part in parts))
    return {
        **{name: worth[name] for name in ("served_reward", "pseudo_regret", "revenue_share")},
        "best_ads": by_tenth("right_share", *parts),
        "sha256": other.sha256,
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
