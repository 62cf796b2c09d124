"""What would have had to be different for an ad to be shown: found by planning the session again with that difference.

Rules that hold in this file:

- Nothing is estimated: each answer is an input under which the planner that serves shows the ad, and a shade less of it
  under which it does not. Inputs are tried from the present one upwards, in steps of 15 % of the revenue or 0.25 of the
  log-odds; the step is then halved. An interval smaller than a step, in which the ad would be shown, may be missed.
- What is in the way of the ad in any case, because it is retired or excluded, is taken away first.
- All else stays as it was: the version, the user, the other ads, the numbers that a lot drew, the width of the ad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from math import inf
from typing import Any, Final

import msgspec
import numpy as np

from worker.bandit.arrays import sigmoid
from worker.bandit.policies import POLICIES, Ucbbp
from worker.stream.catalogue import under
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.explanation import chosen_by, for_arrival
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.tastes import Contribution, context_columns, contributions

STEP: Final = 1.15  # factor of the revenue
ODDS_STEP: Final = 0.25
MOST_ODDS: Final = 20.0
MOST_REVENUE: Final = 1000.0  # times the highest revenue of any ad
CLOSE: Final = 1e-6
#: Why the control group gets no ad that its version does not know.
UNKNOWN: Final = "the tagged version that chooses for the control group does not know it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A number as it is, and the least at which the ad would be first, or anywhere in the slate; None: no such number.

    The present number where the ad is there already.
    """

    now: float
    first: float | None
    anywhere: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """What keeps an ad from being shown.

    position : where it is in the slate; 0 if it is not
    obstacle : retired, or excluded by the arrival; unknown to a tagged version, and then nothing else counts
    without_obstacle : where it would be without that
    drawn : its chance to be drawn for the first position without the obstacle, if a lot chose the slate
    revenue, probability : what it would need, per click and of a click at the first position; None if none counts
    if_explored : where it would be if the session explored, and bonuses counted; None if they do, or never do
    parts : the parts of its log-odds for this user, the largest first
    """

    arm: str
    position: int = 0
    obstacle: str | None
    without_obstacle: int = 0
    drawn: float | None = None
    revenue: Needed | None = None
    probability: Needed | None = None
    if_explored: int | None = None
    parts: tuple[Contribution, ...] = ()


def why_not(
    parameters: Parameters, arrival: Arrival, arm: str, *, mode: str, names: tuple[str, ...] | None = None
) -> WhyNot:
    """Return what keeps an arm from being shown in the slate of an arrival, whose first position has this mode.

    `names` are those of the columns of its context.
    """
    parameters, way = chosen_by(for_arrival(parameters, arrival), mode, arrival)
    if arm not in parameters.indices:
        return WhyNot(arm=arm, obstacle=UNKNOWN)
    index, settings, policy = parameters.indices[arm], parameters.settings, POLICIES[parameters.settings.policy]

    def place(version: Parameters, who: Arrival = arrival) -> int:
        slate = _planned(version, who, mode)
        return slate.index(arm) + 1 if arm in slate else 0

    obstacle = "it is retired" if not parameters.arms[index].active else None
    if arm in arrival.exclude:
        obstacle = f"{obstacle}, and the arrival excluded it" if obstacle else "the arrival excluded it"
    rest = tuple(one for one in arrival.exclude if one != arm)
    free = msgspec.structs.replace(arrival, exclude=rest)
    open_to_it = _with_arm(parameters, index, active=True)

    @cache
    def by_revenue(revenue: float) -> int:
        return place(_with_arm(open_to_it, index, reward=revenue), free)

    @cache
    def by_shift(shift: float) -> int:
        return place(replace(open_to_it, model=parameters.model.shifted(index, shift)), free)

    context = np.array(arrival.context)
    prepared = parameters.prepared(context[None, :])
    now = float(parameters.model.log_odds_of(prepared, np.array([[index]]))[0, 0])
    reward = parameters.arms[index].reward
    revenue = probability = None
    if way not in ("lot", "order"):
        most = MOST_REVENUE * float(parameters.rewards.max())
        revenue = _needed(by_revenue, takewhile(lambda value: value < most, (reward * STEP**n for n in range(10_000))))
    if way not in ("lot", "order", "fallback"):
        shifts = _needed(by_shift, np.arange(0.0, MOST_ODDS, ODDS_STEP).tolist())
        first, anywhere = (None if one is None else _chance(now + one) for one in (shifts.first, shifts.anywhere))
        probability = Needed(now=_chance(now), first=first, anywhere=anywhere)
    explorable = mode == "exploit" and policy.is_selective
    eligible = sum((one.active or one.arm == arm) and one.arm not in rest for one in parameters.arms)
    return WhyNot(
        arm=arm,
        position=place(parameters),
        obstacle=obstacle,
        without_obstacle=by_revenue(reward),
        drawn=1 / max(1, eligible) if way == "lot" else None,
        revenue=revenue,
        probability=probability,
        if_explored=place(under(replace(settings, policy=Ucbbp.name), open_to_it), free) if explorable else None,
        parts=contributions(parameters, index, context, prepared[0], names or context_columns(parameters)),
    )


def _planned(parameters: Parameters, arrival: Arrival, mode: str) -> tuple[str, ...]:
    """Return the arms that serving shows, to a session of the group of this mode."""
    planner = SlatePlanner(parameters)
    if mode == "fallback":
        return planner.fallback(arrival).arms
    return planner.plan([arrival], [pack_context(arrival.context)], control_share=float(mode == "control"))[0].arms


def _with_arm(parameters: Parameters, index: int, **changes: Any) -> Parameters:
    arms = list(parameters.arms)
    arms[index] = replace(arms[index], **changes)
    return replace(parameters, arms=tuple(arms))


def _chance(log_odds: float) -> float:
    return float(sigmoid(np.array([log_odds]))[0])


# ── searching ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _needed(place: Callable[[float], int], values: Iterable[float]) -> Needed:
    """Return the least values, of rising ones from the present one on, by which the place is the first, or any."""
    tried = list(values)
    return Needed(
        now=tried[0],
        first=_least(lambda value: place(value) == 1, tried),
        anywhere=_least(lambda value: place(value) > 0, tried),
    )


def _least(holds: Callable[[float], bool], values: Iterable[float]) -> float | None:
    """Return the least value by which something holds, up to a relative 1e-6.

    >>> round(_least(lambda value: value >= 2.5, [1.0, 2.0, 4.0]), 5)
    2.5
    """
    below = -inf
    for found in values:
        if holds(found):
            break
        below = found
    else:
        return None
    while below > -inf and found - below > CLOSE * max(abs(found), CLOSE):
        middle = (below + found) / 2
        below, found = (below, middle) if holds(middle) else (middle, found)
    return found
