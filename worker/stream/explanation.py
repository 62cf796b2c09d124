"""The reasons for a slate: every number behind it, in float64, next to the choice that serving makes.

The slate is the one that serving plans for the session, drawn by lot or not. An arrival without the id of a session is
planned as if nothing was left to chance. The choice comes from the kernel that serves, in float32. The numbers are
computed again in float64, so of two arms whose scores agree in the first seven digits the choice may seem to be the
second best.

The contest of the arms for each position is in `contest.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from worker.bandit.policies import Fixed, Greedy, Random, policy_named
from worker.errors import InputError
from worker.stream.contest import GREEDY, SCORES, Contest, Position, has_spread, out_of
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.parameters import Parameters
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.tagged import by_tag
from worker.stream.tastes import context_columns, contributions


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A slate with its reasons; `notes` name what serving leaves to chance."""

    slate: tuple[str, ...]
    positions: tuple[Position, ...]
    notes: tuple[str, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """The mode of each position."""
        return tuple(position.mode for position in self.positions)


def explain(
    parameters: Parameters, arrival: Arrival, *, names: tuple[str, ...] | None = None, served: Slate | None = None
) -> Explanation:
    """Explain the slate of an arrival, whose context is as it came.

    `names` are those of the numbers of the context, if they are not those of the version. `served` is the slate of the
    session if that is known.
    """
    notes = _notes(parameters, arrival)
    parameters = for_arrival(parameters, arrival)
    given = np.array(arrival.context)
    slate = served or SlatePlanner(parameters).plan([arrival], [pack_context(arrival.context)])[0]
    chooser, way = chosen_by(parameters, slate.modes[0] if slate.modes else "none", arrival)
    tagged = parameters.settings.tagged if chooser is not parameters else None
    if tagged is not None:
        notes += (f"the control group gets what version {tagged.version}, tagged {tagged.name}, chooses of its ads",)
    parameters = chooser
    eligible = [index for index, arm in enumerate(parameters.arms) if arm.active and arm.arm not in arrival.exclude]
    arms = np.array(eligible, dtype=np.intp)
    if not slate.arms:
        out = out_of(parameters, arms, [], ())
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=(), out=out)
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    if way == GREEDY:
        parameters = replace(parameters, settings=replace(parameters.settings, policy=Greedy.name))
    with np.errstate(all="ignore"):
        context = parameters.prepared(given[None, :])[0]
        try:
            contest = Contest(parameters, context, arms, arrival.session_id)
        except InputError as error:
            if way != "fallback" or served is None:
                raise
            return Explanation(slate=served.arms, positions=(), notes=(f"fallback: {error}",))
        columns = names or context_columns(parameters)
        reasons = {index: contributions(parameters, index, given, context, columns) for index in eligible}
        positions = contest.positions([parameters.indices[arm] for arm in slate.arms], slate.modes, reasons, way)
    if tagged is not None:
        positions = [replace(one, arms=tuple(replace(arm, width=None) for arm in one.arms)) for one in positions]
    return Explanation(slate=slate.arms, positions=tuple(positions), notes=notes)


def for_arrival(parameters: Parameters, arrival: Arrival) -> Parameters:
    """Return the version that serves an arrival; for one without a session, it leaves nothing to chance."""
    if arrival.session_id:
        return parameters
    drawn = policy_named(parameters.settings.policy).draws
    settings = replace(
        parameters.settings,
        policy=Greedy.name if drawn else parameters.settings.policy,
        warmup=0,
        spread=0.0,
        random_share=0.0,
        control_share=0.0,
    )
    return replace(parameters, settings=settings, ties=())


def chosen_by(parameters: Parameters, mode: str, arrival: Arrival) -> tuple[Parameters, str]:
    """Return the version that chooses a slate of this mode, and how: that of the tagged version, for a control group.

    If that one has no eligible arm, the slate is a fallback.
    """
    if mode != "control" or parameters.settings.tagged is None:
        return parameters, way_of(parameters, mode)
    tagged = by_tag(parameters)
    if any(arm.active and arm.arm not in arrival.exclude for arm in tagged.arms):
        return tagged, GREEDY
    return parameters, "fallback"


def way_of(parameters: Parameters, mode: str) -> str:
    """Return how a slate of this mode is chosen: by scores, greedily by them, by a lot, in an order, or as fallback.

    Under epsilon-greedy a lot decides at each position whether another arm takes the place of the best one.
    """
    policy = policy_named(parameters.settings.policy)
    how = parameters.settings.control if mode == "control" else mode
    if how in ("explore", "exploit"):
        return "order" if policy is Fixed else "epsilon" if policy.draws else SCORES
    return _WAYS.get(how, SCORES)


_WAYS: Final = {
    **dict.fromkeys(("warmup", "random"), "lot"),
    **dict.fromkeys(("fixed", "popular"), "order"),
    **dict.fromkeys(("greedy", "guarded"), GREEDY),
    "fallback": "fallback",
}


def _notes(parameters: Parameters, arrival: Arrival) -> tuple[str, ...]:
    settings = parameters.settings
    policy = policy_named(settings.policy)
    notes = []
    if policy is Fixed:
        notes.append("fixed order: the first eligible ads of it, whatever they are expected to earn")
    if policy.is_selective and not parameters.thresholds:
        notes.append("no exploration thresholds for this horizon: every position explores")
    if arrival.session_id:
        return tuple(notes)
    if parameters.is_warming_up:
        notes.append(
            f"warm-up, {parameters.folds} of {settings.warmup} folds: serving draws any eligible arm at random; "
            f"this is the slate of {Greedy.name if policy.draws else settings.policy}"
        )
    elif policy is Random:
        notes.append("random policy: serving draws any eligible arm; this is the slate of greedy")
    elif policy.draws:
        notes.append(f"epsilon-greedy: with probability {settings.epsilon:g} a position shows any eligible arm instead")
    if settings.random_share > 0:
        notes.append(f"{settings.random_share:.1%} of sessions have a random slate instead (random_share)")
    if has_spread(parameters):
        notes.append(
            f"no session id: without the spread of {settings.spread:g}, by which sessions differ in their bonuses"
        )
    if policy.is_selective and parameters.policy().needs_chance:
        notes.append(
            "ties: of the sessions with exactly the score of a threshold, serving lets a share explore, by their ids; "
            "here all of them explore"
        )
    return tuple(notes)
