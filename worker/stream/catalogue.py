"""Arms and commands: what they do to a version.

Rules that hold in this file (design.md §4):

- They change the parameters where they stand in the journal and leave the statistics as they are: a new arm starts at
  the prior, a retired one keeps what is known of it, a price changes the reward and nothing else.
- Arms keep the order of their first appearance, so an older version's arms are the first ones of a newer version.
- What changes nothing makes no version: the same record twice is the same as once.
- What cannot be done is refused with a reason; the journal goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker.errors import InputError
from worker.stream.events import ArmChange, Command
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.versions import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An order that was not carried out, and why."""

    order: ArmChange | Command
    reason: str


def change_arm(current: Parameters, change: ArmChange) -> Parameters | Refusal | None:
    """Add, price, retire or bring back an arm; None if it is so already.

    >>> settings = LearningSettings(dim=1)
    >>> first = Parameters.first(settings, (Arm(arm="a", reward=1.0),))
    >>> [arm.arm for arm in change_arm(first, ArmChange(arm="b", reward=2.0, active=True)).arms]
    ['a', 'b']
    >>> change_arm(first, ArmChange(arm="a", reward=1.0, active=True)) is None
    True
    """
    try:
        arm = Arm(arm=change.arm, reward=change.reward, active=change.active)
    except InputError as error:
        return Refusal(order=change, reason=str(error))
    places = {known.arm: place for place, known in enumerate(current.arms)}
    place = places.get(arm.arm)
    if place is None:
        if not arm.active:
            return Refusal(order=change, reason=f"arm {arm.arm!r} cannot be retired: it is not known")
        model = current.model.with_arms(1, ridge=current.settings.ridge)
        return replace(current, arms=(*current.arms, arm), model=model)
    if current.arms[place] == arm:
        return None
    return replace(current, arms=(*current.arms[:place], arm, *current.arms[place + 1 :]))


def obey(current: Parameters, command: Command, history: Mapping[int, Parameters]) -> Parameters | Refusal | None:
    """Freeze, unfreeze, or go back to the estimate of an earlier version in `history`; None if it is so already."""
    if command.action == "rollback":
        return _roll_back(current, command, history)
    frozen = command.action == "freeze"
    return None if current.frozen == frozen else replace(current, frozen=frozen)


def _roll_back(current: Parameters, command: Command, history: Mapping[int, Parameters]) -> Parameters | Refusal | None:
    number = command.version
    target = None if number is None else history.get(number)
    if target is None or not current.version - KEPT < target.version <= current.version:
        oldest = min(history)
        return Refusal(
            order=command,
            reason=f"version {number} is not among the last {KEPT} ({oldest} to {current.version})",
        )
    missing = len(current.arms) - len(target.arms)
    rolled = replace(
        current,
        model=target.model.with_arms(missing, ridge=current.settings.ridge) if missing else target.model,
        folds=target.folds,
        observations=target.observations,
        expected_sessions=target.expected_sessions,
        explore_budget=target.explore_budget,
        thresholds=fitted_thresholds(target.thresholds, current.settings.horizon),
        radius=target.radius,
    )
    return None if rolled == current else rolled


def under(settings: LearningSettings, parameters: Parameters) -> Parameters:
    """Return the same estimate under the settings of now, which may have changed since the version was made."""
    if settings == parameters.settings:
        return parameters
    thresholds = fitted_thresholds(parameters.thresholds, settings.horizon)
    return replace(parameters, settings=settings, thresholds=thresholds)


def fitted_thresholds(thresholds: tuple[float, ...], horizon: int) -> tuple[float, ...]:
    """Cut thresholds to the horizon, or let the last one stand for the steps that are new.

    >>> fitted_thresholds((3.0, 2.0), 4)
    (3.0, 2.0, 2.0, 2.0)
    """
    last = thresholds[-1:] or (0.0,)
    return (*thresholds, *last * horizon)[:horizon]
