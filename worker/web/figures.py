"""The figures of the status page, computed from a snapshot of the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec import to_builtins

from worker.bandit.arrays import sigmoid
from worker.errors import AdcascadeError
from worker.metrics.history import Snapshot, Window, exploration_share
from worker.stream.calibration import SESSIONS
from worker.stream.contexts import stack_packed
from worker.stream.events import PredictedClicks
from worker.stream.lift import in_words
from worker.stream.misfit import advice, pairs_under
from worker.stream.parameters import Parameters
from worker.stream.tastes import strengths
from worker.stream.topology import Tally

MOST_ARMS: Final = 12
#: Features that are named as those that matter most.
MOST_STRENGTHS: Final = 5
CONFIDENCE: Final = 1.96  # standard deviations on each side of an estimate: 95 %


def top_arms(parameters: Parameters, contexts: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the arms with the highest expected revenue per display, with 95 % intervals; retired arms come last.

    Everything is of the first position and averaged over the packed contexts, or taken at x = 0 if there are none: an
    average user with features that exclude each other, such as countries, is nobody.
    """
    if not parameters.arms:
        return []
    model, rewards, dim = parameters.model, parameters.rewards, parameters.settings.dim
    users = parameters.prepared(stack_packed(contexts, dim)) if contexts else np.zeros((1, model.dim))
    try:
        chance = sigmoid(model.log_odds(users)).mean(axis=0)
        active = np.array([arm.active for arm in parameters.arms])
        order = np.lexsort((-chance * rewards, ~active))[:MOST_ARMS]
        shown = np.tile(order, (len(users), 1))
        log_odds, deviations = model.log_odds_of(users, shown), np.sqrt(model.squared_widths_of(users, shown))
    except AdcascadeError:
        return []
    low, high = (sigmoid(log_odds + side * CONFIDENCE * deviations).mean(axis=0) for side in (-1, 1))
    return [
        {
            "arm": parameters.arms[index].arm,
            "reward": rewards[index],
            "active": parameters.arms[index].active,
            "probability": chance[index],
            "low": low[place],
            "high": high[place],
            "value": chance[index] * rewards[index],
        }
        for place, index in enumerate(order.tolist())
    ]


def calibration(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return predicted and observed clicks of the kept windows, the ads that differ most, and what is missed.

    None before anything was predicted.
    """
    parameters, windows = snapshot.parameters, [one.episode.calibration for one in snapshot.windows]
    if parameters is None or (ratio := parameters.calibration.ratio) is None:
        return None
    known, seen = parameters.calibration, [one for one in windows if one is not None]
    pairs = pairs_under(parameters.settings, len(parameters.arms))
    sessions = zip(SESSIONS, _summed([one.sessions for one in seen]), strict=False)
    return {
        "ratio": ratio._asdict(),
        "loss": known.loss,
        "windows": len(seen),
        "tenths": _summed([one.tenths for one in seen]),
        "positions": _summed([one.positions for one in seen]),
        "sessions": [{"sessions": name, **row} for name, row in sessions if row["displays"]],
        "ads": [to_builtins(one) for one in known.worst([arm.arm for arm in parameters.arms])],
        "missed": advice(parameters),
        "tested": len(pairs.names),
        "left_out": pairs.left_out,
    }


def _summed(parts: Sequence[PredictedClicks]) -> list[dict[str, Any]]:
    """Return the sums of several windows, a row for each part of their displays."""
    rows = max((len(one.displays) for one in parts), default=0)
    sums = np.zeros((3, rows))
    for one in parts:
        sums[:, : len(one.displays)] += one.displays, one.predicted, one.clicks
    names = PredictedClicks.__struct_fields__
    return [dict(zip(names, column, strict=True)) for column in sums.T.tolist()]


def strongest_features(parameters: Parameters) -> list[dict[str, Any]]:
    """Return the features that matter most, of contexts and of ads; none before the first fold and without tastes."""
    found = sorted(strengths(parameters), key=lambda one: -one.strength)[:MOST_STRENGTHS]
    return [{"feature": one.feature, "of": one.of, "strength": one.strength, "word": one.word} for one in found]


def forgetting(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the setting, and under "auto" when a change was last noticed, in which ads, and what is kept."""
    if snapshot.parameters is None:
        return None
    setting = snapshot.parameters.settings.forgetting
    noticed = snapshot.forgotten if isinstance(setting, str) else None
    time, kept, ads = noticed or (None, None, ())
    return {"setting": setting, "time": time, "kept": kept, "ads": list(ads)}


def lift(parameters: Parameters | None) -> dict[str, Any] | None:
    """Return the comparison with the control group; None if there is none."""
    known = None if parameters is None else parameters.lift
    if known is None:
        return None
    found = known.compare("revenue")
    return {"gained": None if found is None else in_words(found)[0], "note": f"{known.sentence}, {known.size}"}


def version(snapshot: Snapshot, time: int) -> dict[str, Any] | None:
    """Return the newest parameters in brief; `age` is None for the prior."""
    parameters = snapshot.parameters
    if parameters is None:
        return None
    return {
        "version": parameters.version,
        "age": max(0, time - parameters.made_at) if parameters.made_at else None,
        "model": parameters.settings.model,
        "policy": parameters.settings.policy,
        "budget": exploration_share(parameters),
        "strongest": strongest_features(parameters),
        "forgetting": forgetting(snapshot),
        "active": sum(arm.active for arm in parameters.arms),
        "observations": parameters.observations,
    }


def columns(windows: Sequence[Window]) -> dict[str, list[Any]]:
    """Return the windows by column, a third of the size of rows; regrets are per session."""
    episodes = [window.episode for window in windows]
    return {
        "end": [episode.window_end for episode in episodes],
        "sessions": [episode.sessions for episode in episodes],
        "reward": [episode.reward for episode in episodes],
        "expected": [episode.expected_reward for episode in episodes],
        "explored": [episode.explored for episode in episodes],
        "bound": [episode.regret_bound for episode in episodes],
        "posterior": [episode.regret_posterior for episode in episodes],
        "pseudo": [_pseudo_regret(window) for window in windows],
        "oracle": [window.oracle for window in windows],
    }


def recent(windows: Sequence[Window]) -> dict[str, Any]:
    """Return sums and means over some windows; None where nothing is known."""
    episodes = [window.episode for window in windows]
    served = math.fsum(window.served or 0.0 for window in windows)
    return {
        "windows": len(episodes),
        "sessions": sum(episode.sessions for episode in episodes),
        "displays": sum(episode.displays for episode in episodes),
        "clicks": sum(episode.clicks for episode in episodes),
        "reward": math.fsum(episode.reward for episode in episodes),
        "expected": math.fsum(episode.expected_reward for episode in episodes),
        "explored": math.fsum(episode.explored for episode in episodes),
        "bound": _per_session([(episode.regret_bound, episode.sessions) for episode in episodes]),
        "posterior": _per_session([(episode.regret_posterior, episode.sessions) for episode in episodes]),
        "pseudo": _per_session([(_pseudo_regret(window), window.episode.sessions) for window in windows]),
        "served_share": _ratio(served, math.fsum(window.oracle or 0.0 for window in windows)),
    }


def _per_session(regrets: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(regret, sessions) for regret, sessions in regrets if regret is not None]
    return _ratio(math.fsum(regret * sessions for regret, sessions in known), sum(sessions for _, sessions in known))


def _pseudo_regret(window: Window) -> float | None:
    if window.oracle is None or window.served is None:
        return None
    return _ratio(window.oracle - window.served, window.episode.sessions)


def lately(snapshot: Snapshot) -> dict[str, Any]:
    """Return counts and quantiles since the oldest mark; `span` is the time since then in milliseconds."""
    since, now = snapshot.since, snapshot.now
    before = since.tally if since else Tally()
    modes = Counter(now.tally.decisions)
    modes.subtract(before.decisions)
    spent = _quantiles(snapshot, "decision_duration_seconds", ())
    waited = _quantiles(snapshot, "arrival_to_decision_seconds", ())
    return {
        "span": now.time - since.time if since else None,
        "read": now.tally.arrivals + now.tally.feedback - before.arrivals - before.feedback,
        "dead": now.tally.dead.total() - before.dead.total(),
        "modes": modes,
        **{f"duration_{name}": value for name, value in spent.items()},
        **{f"delay_{name}": value for name, value in waited.items()},
        # Empty where nothing is measured, as in the embedded runner.
        "stages": {
            labels[0]: _quantiles(snapshot, "stage_seconds", labels)
            for labels, histogram in now.histograms["stage_seconds"].items()
            if any(histogram.counts)
        },
    }


def _quantiles(snapshot: Snapshot, name: str, labels: tuple[str, ...]) -> dict[str, float | None]:
    """Return quantiles of a histogram since the oldest mark; of all that it has if nothing has happened since."""
    before = snapshot.since.histograms[name][labels] if snapshot.since else None
    histogram = snapshot.now.histograms[name][labels]
    return {f"p{percent}": histogram.quantile(percent / 100, before) for percent in (50, 99)}


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


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
