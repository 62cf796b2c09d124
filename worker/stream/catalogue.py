"""Changes of arms, and commands: their effect on a version.

Rules that hold in this file (docs/design.md §4):

- They take effect at their position in the journal and leave the statistics unchanged: a new arm starts at the prior, a
  retired one keeps its statistics, a price changes the reward and nothing else.
- Arms keep the order of their first appearance, so an older version's arms are the first ones of a newer version.
- A record that changes nothing makes no version: the same record twice is the same as once.
- An order that cannot be carried out is refused with a reason; the journal is read on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker.errors import InputError
from worker.stream.events import ArmChange, Command
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.versions import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An order that was not carried out, with the reason."""

    order: ArmChange | Command
    reason: str


def change_arm(current: Parameters, change: ArmChange) -> Parameters | Refusal | None:
    """Add, price, retire or reactivate an arm; return None if nothing changes.

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
    index = current.indices.get(arm.arm)
    if index is None:
        if not arm.active:
            return Refusal(order=change, reason=f"arm {arm.arm!r} cannot be retired: it is not known")
        model = current.model.with_arms(1, ridge=current.settings.ridge)
        return replace(current, arms=(*current.arms, arm), model=model)
    if current.arms[index] == arm:
        return None
    return replace(current, arms=(*current.arms[:index], arm, *current.arms[index + 1 :]))


def obey(current: Parameters, command: Command, history: Mapping[int, Parameters]) -> Parameters | Refusal | None:
    """Freeze, unfreeze, or roll back to a version in `history`; return None if nothing changes."""
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
    """Return the same estimate under other settings."""
    if settings == parameters.settings:
        return parameters
    thresholds = fitted_thresholds(parameters.thresholds, settings.horizon)
    return replace(parameters, settings=settings, thresholds=thresholds)


def fitted_thresholds(thresholds: tuple[float, ...], horizon: int) -> tuple[float, ...]:
    """Cut thresholds to the horizon, or repeat the last one for new steps.

    >>> fitted_thresholds((3.0, 2.0), 4)
    (3.0, 2.0, 2.0, 2.0)
    """
    last = thresholds[-1:] or (0.0,)
    return (*thresholds, *last * horizon)[:horizon]
