"""The figures that demo and traffic report in the same way, in their JSON and as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.console import table
from worker.simulation.worth import Worth

#: A name, a value and an explanation.
TableRow = tuple[str, str, str]


def by_tenth(name: str, first: object, last: object, whole: object) -> dict[str, float]:
    """Return a figure of the first and of the last tenth of a run, and of the whole run."""
    return {"first_tenth": getattr(first, name), "last_tenth": getattr(last, name), "overall": getattr(whole, name)}


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
        "revenue_share": by_tenth("share", first, last, whole),
    }


def worth_rows(numbers: Mapping[str, Any], *, earned: str) -> list[TableRow]:
    """Return the rows of clicks, revenue and regret; `earned` explains the revenue earned."""
    regret, share = numbers["pseudo_regret"], numbers["revenue_share"]
    oracle = f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}"
    tenths = f"pseudo-regret, last tenth; {regret['first_tenth']:.5f} in the first"
    return [
        ("clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"),
        ("revenue served", f"{numbers['served_reward']:,.1f}", oracle),
        ("  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"),
        ("  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"),
        ("revenue earned", f"{numbers['reward']:,.1f}", earned),
        ("regret/session", f"{regret['last_tenth']:.5f}", tenths),
    ]


def laid_out(rows: Sequence[TableRow]) -> str:
    """Lay out rows as a table for people."""
    return table(["", "", ""], rows).lstrip("\n")


def flag(name: str, value: object) -> str:
    """Return a setting as an option of the command line.

    >>> flag("random_share", 0.1), flag("repeats", False)
    ('--random-share 0.1', '--no-repeats')
    """
    option = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}"
