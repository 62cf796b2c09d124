"""The figures of the status page, computed from a snapshot of the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from worker.bandit.model import sigmoid
from worker.errors import AdcascadeError
from worker.metrics import Snapshot, Window
from worker.metrics.histogram import DELAY_BOUNDS, DURATION_BOUNDS, quantile
from worker.metrics.history import exploration_share
from worker.stream.parameters import Parameters
from worker.stream.topology import Tally

MOST_ARMS: Final = 12
CONFIDENCE: Final = 1.96  # standard deviations on each side of an estimate: 95 %


def top_arms(parameters: Parameters) -> list[dict[str, Any]]:
    """Return the arms with the highest expected revenue per display at x = 0, with 95 % intervals.

    Retired arms come last.
    """
    belief, rewards = parameters.posterior, parameters.rewards
    if not len(rewards):
        return []
    try:
        widths = belief.precision.widths(np.zeros((1, belief.dim)))[0]
    except AdcascadeError:
        return []
    odds = belief.theta_arms
    chance, low, high = (sigmoid(odds + side * CONFIDENCE * widths) for side in (0, -1, 1))
    active = np.array([arm.active for arm in parameters.arms])
    order = np.lexsort((-chance * rewards, ~active))[:MOST_ARMS]
    return [
        {
            "arm": parameters.arms[index].arm,
            "reward": _short(rewards[index]),
            "active": parameters.arms[index].active,
            "probability": _short(chance[index]),
            "low": _short(low[index]),
            "high": _short(high[index]),
            "value": _short(chance[index] * rewards[index]),
        }
        for index in order.tolist()
    ]


def version(snapshot: Snapshot, time: int) -> dict[str, Any] | None:
    """Return the newest parameters in brief; `age` is None for the prior."""
    parameters = snapshot.parameters
    if parameters is None:
        return None
    return {
        "version": parameters.version,
        "age": max(0, time - parameters.made_at) if parameters.made_at else None,
        "policy": parameters.settings.policy,
        "beta": _short(parameters.beta),
        "window": parameters.settings.window,
        "dim": parameters.settings.dim,
        "horizon": parameters.settings.horizon,
        "arms": len(parameters.arms),
        "active": sum(arm.active for arm in parameters.arms),
        "observations": parameters.observations,
        "budget": None if exploration_share(parameters) is None else parameters.explore_budget,
        "frozen": parameters.frozen,
        "norm": _short(snapshot.numbers.get("parameter_norm")),
        "smallest_eigenvalue": _short(snapshot.numbers.get("smallest_eigenvalue")),
    }


def columns(windows: Sequence[Window]) -> dict[str, list[Any]]:
    """Return the windows by column, a third of the size of rows; regrets are per session."""
    shown = {
        "reward": "reward",
        "expected": "expected_reward",
        **{name: name for name in ("explored", "allowed", "bound", "posterior", "oracle", "served")},
    }
    return {
        **{name: [getattr(window, name) for window in windows] for name in ("end", "sessions", "displays", "clicks")},
        **{name: [_short(getattr(window, field)) for window in windows] for name, field in shown.items()},
        "pseudo": [_short(_pseudo_regret([window])) for window in windows],
    }


def recent(windows: Sequence[Window]) -> dict[str, Any]:
    """Return sums and means over some windows; None where nothing is known."""
    truths = [window for window in windows if window.oracle is not None]
    allowed = [window.allowed for window in windows if window.allowed is not None]
    return {
        "windows": len(windows),
        "sessions": sum(window.sessions for window in windows),
        "displays": sum(window.displays for window in windows),
        "clicks": sum(window.clicks for window in windows),
        "reward": math.fsum(window.reward for window in windows),
        "expected": math.fsum(window.expected_reward for window in windows),
        "explored": math.fsum(window.explored for window in windows),
        "allowed": math.fsum(allowed) if windows and len(allowed) == len(windows) else None,
        "bound": _per_session([(window.bound, window.sessions) for window in windows]),
        "posterior": _per_session([(window.posterior, window.sessions) for window in windows]),
        "pseudo": _pseudo_regret(truths),
        "served_share": _ratio(
            math.fsum(window.served or 0.0 for window in truths), math.fsum(window.oracle or 0.0 for window in truths)
        ),
    }


def _per_session(regrets: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(regret, sessions) for regret, sessions in regrets if regret is not None]
    return _ratio(math.fsum(regret * sessions for regret, sessions in known), sum(sessions for _, sessions in known))


def _pseudo_regret(windows: Sequence[Window]) -> float | None:
    truths = [window for window in windows if window.oracle is not None]
    loss = math.fsum((window.oracle or 0.0) - (window.served or 0.0) for window in truths)
    return _ratio(loss, sum(window.sessions for window in truths))


def lately(snapshot: Snapshot) -> dict[str, Any]:
    """Return counts and quantiles since the oldest mark; `span` is the time since then in milliseconds."""
    since, now = snapshot.since, snapshot.now
    before = since.tally if since else Tally()
    modes: Counter[str] = Counter()
    for (mode, _), count in (now.tally.decisions - before.decisions).items():
        modes[mode] += count
    spent = _difference(now.durations, since.durations if since else None)
    waited = _difference(now.delays, since.delays if since else None)
    return {
        "span": now.time - since.time if since else None,
        "read": now.tally.arrivals + now.tally.feedback - before.arrivals - before.feedback,
        "dead": now.tally.dead.total() - before.dead.total(),
        "modes": modes,
        "duration_p50": quantile(DURATION_BOUNDS, spent, 0.5),
        "duration_p99": quantile(DURATION_BOUNDS, spent, 0.99),
        "delay_p50": quantile(DELAY_BOUNDS, waited, 0.5),
        "delay_p99": quantile(DELAY_BOUNDS, waited, 0.99),
    }


def positions(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return recent clicks by position, among the sessions without a click at an earlier one.

    Sessions without any feedback are included.
    """
    tally, since = snapshot.now.tally, snapshot.since
    before = since.tally if since and tally.opened > since.tally.opened else Tally()
    sessions, clicks = tally.opened - before.opened, tally.clicks - before.clicks
    horizon = snapshot.parameters.settings.horizon if snapshot.parameters else 0
    rows = []
    for position in range(1, max([horizon, *tally.clicks]) + 1):
        rows.append({"position": position, "sessions": max(sessions, clicks[position]), "clicks": clicks[position]})
        sessions -= clicks[position]
    return rows


def _difference(counts: Sequence[int], before: Sequence[int] | None) -> Sequence[int]:
    """Return the counts since `before`; all of them if nothing has happened since."""
    since = [now - then for now, then in zip(counts, before or counts, strict=True)]
    return since if any(since) else counts


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _short(number: float | None) -> float | None:
    """Return a number with the digits that a chart can show."""
    return None if number is None else float(f"{number:.5g}")
