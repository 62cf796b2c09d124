"""Counts per ad from the raw records of a log. Shares no code with the worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counted:
    """The displays of each session, and displays, clicks, revenue and answered displays of each ad."""

    sessions: Counter[str] = field(default_factory=Counter)
    ads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0.0, 0]))


def count_ads(log: Mapping[str, Sequence[dict[str, Any]]], *, timeout: int, start: int = 0, until: int) -> Counted:
    """Count the sessions of a log, its records by topic, that arrived from `start` and before `until`."""
    prices = {one["version"]: {arm["arm"]: arm["reward"] for arm in one["arms"]} for one in log["ads.parameters"]}
    arrived = {(one["session_id"], one["occurred_at"]) for one in log["ads.arrivals"]}
    slates = {}
    for one in log["ads.decisions"]:
        key = one["session_id"], one["arrived_at"]
        if key in arrived and one["position"] == 1 and start <= one["arrived_at"] < until:
            slates[key] = one["slate"], one["parameters_version"]
    reports = defaultdict(list)
    for one in log["ads.clicks"]:
        reports[one["session_id"]].append(one)
    counted = Counted()
    for (name, arrived_at), (slate, version) in slates.items():
        clicked, passed = [], [0]
        for one in reports[name]:
            at, arm = one["position"], one["arm"]
            if arrived_at <= one["occurred_at"] <= arrived_at + timeout and slate[at - 1 : at] == [arm]:
                (clicked if one["clicked"] else passed).append(at)
        last = min(clicked) if clicked else max(passed)
        shown = slate[: last if clicked else last + 1]
        counted.sessions[name] = len(shown)
        for position, arm in enumerate(shown, 1):
            click = bool(clicked) and position == last
            for place, value in enumerate((1, click, click * prices[version][arm], position <= last)):
                counted.ads[arm][place] += value
    return counted
