"""Counts per ad from the raw records of a log. Shares no code with the worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counted:
    """Sessions, and by ad the displays, clicks, revenue and answered displays."""

    sessions: int = 0
    ads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0.0, 0]))


def count_ads(
    arrivals: Iterable[dict[str, Any]],
    decisions: Iterable[dict[str, Any]],
    clicks: Iterable[dict[str, Any]],
    versions: Iterable[dict[str, Any]],
    *,
    timeout: int,
    start: int = 0,
    until: int,
) -> Counted:
    """Count the sessions that arrived from `start` and before `until`."""
    prices = {one["version"]: {arm["arm"]: arm["reward"] for arm in one["arms"]} for one in versions}
    known = {(one["session_id"], one["occurred_at"]) for one in arrivals}
    slates = {}
    for one in decisions:
        key = one["session_id"], one["arrived_at"]
        if key in known and one["position"] == 1 and start <= one["arrived_at"] < until:
            slates[key] = one["slate"], one["parameters_version"]
    reports = defaultdict(list)
    for one in clicks:
        reports[one["session_id"]].append(one)
    counted = Counted(sessions=len(slates))
    for (name, arrived_at), (slate, version) in slates.items():
        clicked, passed = [], [0]
        for one in reports[name]:
            at, arm = one["position"], one["arm"]
            if arrived_at <= one["occurred_at"] <= arrived_at + timeout and slate[at - 1 : at] == [arm]:
                (clicked if one["clicked"] else passed).append(at)
        answered = min(clicked) if clicked else max(passed)
        for position, arm in enumerate(slate[: answered if clicked else answered + 1], 1):
            click = bool(clicked) and position == answered
            for place, value in enumerate((1, click, click * prices[version][arm], position <= answered)):
                counted.ads[arm][place] += value
    return counted
