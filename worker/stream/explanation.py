"""The reasons for a slate: every number behind it, in float64, next to the choice that serving makes.

With a session id the slate is the one that serving plans for it, drawn by lot or not. Without an id it is that of the
policy, greedy where that draws. The choice comes from the kernel that serves, in float32. The numbers are computed
again in float64, so of two arms whose scores agree in the first seven digits the choice may seem to be the second best.

The contest of the arms for each position is in `contest.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies import Fixed, Greedy, Random, policy_named
from worker.errors import InputError
from worker.stream.contest import GREEDY, SCORES, Contest, Position, has_spread, out_of
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.parameters import Parameters, confidence_radius
from worker.stream.slates import Slate, SlatePlanner
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
    parameters: Parameters,
    context: Floats,
    excluded: Ints,
    *,
    session: str | None = None,
    names: tuple[str, ...] | None = None,
    served: Slate | None = None,
) -> Explanation:
    """Plan one session with this context, (d,), as it came, without the arms at the indices `excluded`.

    `session` is its id: it decides all that is left to chance. `names` are those of the numbers of the context, if they
    are not those of the version. `served` is the slate of the session if that is known.
    """
    given, context = context, parameters.prepared(context[None, :])[0]
    if parameters.settings.beta == "theory" and parameters.radius <= 0:  # a file written by hand may have none
        parameters = replace(
            parameters,
            radius=confidence_radius(
                parameters.settings,
                parameters.arms,
                largest_square=float(context @ context),
                displays=parameters.observations,
            ),
        )
    planner = parameters.planner()
    eligible = np.array([], dtype=np.intp) if planner is None else np.setdiff1d(planner.shown, excluded)
    if planner is None or not len(eligible):
        out = out_of(parameters, eligible, [], ())
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=(), out=out)
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    with np.errstate(all="ignore"):
        if session is not None and served is None:
            served = _served(parameters, arrival_of(parameters, given, excluded, session))
        if served is None:
            slate, modes = _policys(parameters, planner, context, planner.masked([excluded.tolist()]))
        else:
            slate, modes = [parameters.indices[arm] for arm in served.arms], served.modes
        way = way_of(parameters, modes[0] if served is not None and modes else "exploit", by_id=served is not None)
        if way == GREEDY:
            parameters = replace(parameters, settings=replace(parameters.settings, policy=Greedy.name))
        try:
            contest = Contest(parameters, planner, context, eligible, session, explores="explore" in modes)
        except InputError as error:
            if way != "fallback" or served is None:
                raise
            return Explanation(slate=served.arms, positions=(), notes=(f"fallback: {error}",))
        reasons = {
            index: contributions(parameters, index, given, context, names or context_columns(parameters))
            for index in eligible.tolist()
        }
        positions = contest.positions(slate, modes, reasons, way)
        if served is None and (mode := _whole_slate(parameters)) is not None:
            positions = [replace(position, mode=mode) for position in positions]
    return Explanation(
        slate=tuple(position.choice for position in positions if position.choice is not None),
        positions=tuple(positions),
        notes=_notes(parameters, session),
    )


def way_of(parameters: Parameters, mode: str, *, by_id: bool = True) -> str:
    """Return how a slate of this mode is chosen: by scores, greedily by them, by a lot, in an order, or as fallback.

    Under epsilon-greedy a lot decides at each position whether another arm takes the place of the best one; without the
    id of a session, none does.
    """
    policy = policy_named(parameters.settings.policy)
    how = parameters.settings.control if mode == "control" else mode
    if how in ("explore", "exploit"):
        return "order" if policy is Fixed else "epsilon" if policy.draws and by_id else SCORES
    return _WAYS.get(how, SCORES)


_WAYS: Final = {
    **dict.fromkeys(("warmup", "random"), "lot"),
    **dict.fromkeys(("fixed", "popular"), "order"),
    **dict.fromkeys(("greedy", "guarded"), GREEDY),
    "fallback": "fallback",
}


def planned_again(parameters: Parameters, arrival: Arrival, *, by_id: bool, mode: str) -> tuple[str, ...]:
    """Return the arms that serving shows: by the id of the session, in its group by its mode; or else by the policy."""
    if mode == "fallback":
        return SlatePlanner(parameters).fallback(arrival).arms
    if by_id:
        return _served(parameters, arrival, control_share=float(mode == "control")).arms
    planner = parameters.planner()
    excluded = [parameters.indices[arm] for arm in arrival.exclude if arm in parameters.indices]
    if planner is None or len(set(excluded) & set(planner.shown.tolist())) == len(planner.shown):
        return ()
    with np.errstate(all="ignore"):
        context = parameters.prepared(np.array([arrival.context]))[0]
        arms, _ = _policys(parameters, planner, context, planner.masked([excluded]))
    return tuple(parameters.arms[arm].arm for arm in arms)


def _served(parameters: Parameters, arrival: Arrival, control_share: float | None = None) -> Slate:
    return SlatePlanner(parameters).plan([arrival], [pack_context(arrival.context)], control_share=control_share)[0]


def arrival_of(parameters: Parameters, context: Floats, excluded: Ints, session: str) -> Arrival:
    """Return the arrival of a session with this context, as it came, and these arms excluded."""
    exclude = tuple(parameters.arms[index].arm for index in excluded.tolist())
    return Arrival(session_id=session, occurred_at=0, context=tuple(context.tolist()), exclude=exclude)


def _policys(
    parameters: Parameters, planner: Planner, context: Floats, masked: Masked | None
) -> tuple[list[int], tuple[str, ...]]:
    """Return the slate of the policy and its modes: greedy if it draws, and a tie with a threshold explores."""
    parameters = replace(parameters, ties=())
    policy = Greedy() if policy_named(parameters.settings.policy).draws else parameters.policy()
    slates = policy.slates(planner, context[None, :], masked)
    arms = slates.arms[0].tolist()
    length = arms.index(NO_ARM) if NO_ARM in arms else len(arms)
    modes = ("explore" if explored else "exploit" for explored in slates.explored[0, :length].tolist())
    return arms[:length], tuple(modes)


def _whole_slate(parameters: Parameters) -> str | None:
    """Return the mode in which a version draws whole slates, None if it plans them."""
    if parameters.is_warming_up:
        return "warmup"
    return "random" if policy_named(parameters.settings.policy) is Random else None


def _notes(parameters: Parameters, session: str | None) -> tuple[str, ...]:
    settings = parameters.settings
    policy = policy_named(settings.policy)
    notes = []
    if session is None and parameters.is_warming_up:
        notes.append(
            f"warm-up, {parameters.folds} of {settings.warmup} folds: serving draws any eligible arm at random; "
            f"this is the slate of {settings.policy}"
        )
    elif session is None and policy is Random:
        notes.append("random policy: serving draws any eligible arm; this is the slate of greedy")
    elif policy is Fixed:
        notes.append("fixed order: the first eligible ads of it, whatever they are expected to earn")
    elif session is None and policy.draws:
        notes.append(f"epsilon-greedy: with probability {settings.epsilon:g} a position shows any eligible arm instead")
    if session is None and settings.random_share > 0:
        notes.append(f"{settings.random_share:.1%} of sessions have a random slate instead (random_share)")
    if policy.is_selective and not parameters.thresholds:
        notes.append("no exploration thresholds for this horizon: every position explores")
    if session is None and has_spread(parameters):
        notes.append(
            f"no session id: without the spread of {settings.spread:g}, by which sessions differ in their bonuses"
        )
    if session is None and policy.is_selective and parameters.policy().needs_chance:
        notes.append(
            "ties: of the sessions with exactly the score of a threshold, serving lets a share explore, by their ids; "
            "here all of them explore"
        )
    return tuple(notes)
