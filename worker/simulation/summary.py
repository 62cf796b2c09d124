"""The numbers and table rows that the summaries of demo and traffic share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.simulation.worth import Worth


def worth_numbers(first: Worth, last: Worth, whole: Worth) -> dict[str, Any]:
    """Return expected revenue, pseudo-regret and share of the oracle, in the tenths and overall."""
    return {
        "oracle_reward": whole.oracle,
        "served_reward": whole.served,
        "pseudo_regret": {
            "first_tenth": first.regret_per_session,
            "last_tenth": last.regret_per_session,
            "per_session": whole.regret_per_session,
            "total": whole.regret,
        },
        "revenue_share": {"first_tenth": first.share, "last_tenth": last.share, "overall": whole.share},
    }


def worth_rows(numbers: Mapping[str, Any], *, earned: str) -> list[list[str]]:
    """Return the rows of clicks, revenue and regret; `earned` explains the revenue earned."""
    regret, share = numbers["pseudo_regret"], numbers["revenue_share"]
    oracle = f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}"
    tenths = f"pseudo-regret in the last tenth; {regret['first_tenth']:.5f} in the first"
    return [
        ["clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"],
        ["revenue served", f"{numbers['served_reward']:,.1f}", oracle],
        ["  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"],
        ["  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"],
        ["revenue earned", f"{numbers['reward']:,.1f}", earned],
        ["regret/session", f"{regret['last_tenth']:.5f}", tenths],
    ]
