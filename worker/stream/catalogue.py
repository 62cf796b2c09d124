"""Changes of arms, and commands: their effect on a version.

Rules that hold in this file (docs/design.md §4):

- They take effect at their position in the journal and leave the statistics unchanged: a new arm starts at the prior, a
  retired one keeps its statistics, a price changes the reward and nothing else. Where the revenue is declared as a
  feature, its column follows the price, and the coefficients of the ad stay as they are.
- Arms keep the order of their first appearance, so an older version's arms are the first ones of a newer version.
- A rollback or an import takes the estimate of another version, with its standardisation or the sessions that wait for
  it, and nothing else: position, prices, features and the frozen state stay. A version among the last 8 is named by its
  number, any other is in the order itself: so the journal alone determines the result.
- A record that changes nothing makes no version: the same record twice is the same as once.
- Other features (`feature_changes.py`) carry over what is known by name; nothing explores new columns before the next
  fold. A rollback to a version of other features does the same.
- An order that cannot be carried out is refused with a reason; the journal is read on. An arm that would make a version
  too large for a record is refused as well (`version_records.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.answers import AnswerCounts
from worker.bandit.bonuses import joined
from worker.bandit.click_model import ClickModel
from worker.errors import AdcascadeError, InputError, ParametersError
from worker.stream.ad_features import check_ads, scaled_ads, with_ads
from worker.stream.calibration import Calibration
from worker.stream.events import MOST, ArmChange, ArmEntry, CatalogueChange, Command, FeaturesChange, Import, Order, Tag
from worker.stream.feature_changes import (
    columns_of,
    differences,
    features_of,
    in_columns,
    new_share,
    recast,
    renamed_in,
    wanted_features,
)
from worker.stream.features import Features, FormerFeatures
from worker.stream.parameters import NEVER, Parameters, ad_columns, counts_for, first_model, parameters_of
from worker.stream.settings import KEPT_BY_MODEL, Arm, LearningSettings, check_columns
from worker.stream.version_sizes import too_large
from worker.stream.versions import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An order that was not carried out, with the reason."""

    order: Order
    reason: str
    offset: int = -1  # of its record in the journal


def carry_out(current: Parameters, order: Order, history: Mapping[int, Parameters]) -> Parameters | Refusal | None:
    """Return the version after an order; None if nothing changes. `history` holds the targets of a rollback.

    >>> first = Parameters.first(LearningSettings(dim=1), (Arm(arm="a", reward=1.0),))
    >>> [arm.arm for arm in carry_out(first, ArmChange(arm="b", reward=2.0, active=True), {}).arms]
    ['a', 'b']
    >>> carry_out(first, ArmChange(arm="a", reward=1.0, active=True), {}) is None
    True
    """
    match order:
        case ArmChange():
            return _changed(current, order, (order,))
        case CatalogueChange():
            return _changed(current, order, order.changes)
        case FeaturesChange():
            return _with_features(current, order)
        case Import():
            return _take_over(current, order)
        case Command(action="rollback"):
            return _roll_back(current, order, history)
        case Command():
            frozen = order.action == "freeze"
            return None if current.frozen == frozen else replace(current, frozen=frozen)
        case Tag():
            return None


def _changed(current: Parameters, order: Order, changes: Sequence[ArmEntry]) -> Parameters | Refusal | None:
    """Add, price, retire or reactivate arms; one wrong entry refuses the whole order."""
    arms, indices = list(current.arms), dict(current.indices)
    for change in changes:
        index = indices.get(change.arm)
        try:
            known = () if index is None else arms[index].features
            features = known if change.features is None else tuple(change.features.items())
            arm = Arm(arm=change.arm, reward=change.reward, active=change.active, features=features)
        except InputError as error:
            return Refusal(order=order, reason=str(error))
        if index is not None:
            arms[index] = arm
        elif arm.active:
            indices[arm.arm] = len(arms)
            arms.append(arm)
        else:
            return Refusal(order=order, reason=f"arm {arm.arm!r} cannot be retired: it is not known")
    if tuple(arms) == current.arms:
        return None
    try:
        settings = _with_ads(current, arms)
    except InputError as error:
        return Refusal(order=order, reason=str(error))
    current = replace(current, settings=settings)
    added = len(arms) - len(current.arms)
    share = added / max(1, sum(arm.active for arm in arms))
    changed = replace(
        current,
        arms=tuple(arms),
        # Features of ads are known only with the first of them.
        model=align(current.model, current.arms, arms, settings=settings)
        if current.arms
        else first_model(settings, arms),
        answers=align_answers(current, arms, settings),
        clock=joined(current.clock, share, settings.horizon_episodes),
    )
    if added and (reason := too_large(changed)):
        return Refusal(order=order, reason=reason)
    return changed


def _with_ads(current: Parameters, arms: Sequence[Arm]) -> LearningSettings:
    """Check the features of arms against the declaration; the first arms of a catalogue that was empty complete it."""
    settings = current.settings
    if not current.arms:
        return replace(settings, features=with_ads(settings.features, arms))
    features, given = settings.features, {arm.arm: arm.features for arm in current.arms}
    # An ad may lack a feature that was declared later, until somebody gives it one.
    check_ads(() if features is None else features.ads, [arm for arm in arms if given.get(arm.arm) != arm.features])
    if features is None:
        return settings
    return replace(settings, features=replace(features, ads=scaled_ads(features.ads, arms)))


def _with_features(current: Parameters, order: FeaturesChange) -> Parameters | Refusal | None:
    """Declare other features; what is known is carried over by name."""
    before, renamed = current.settings.features, order.renamed
    try:
        features = wanted_features(features_of(order.features), before, renamed)
        if not differences(before, features, renamed):
            return None
        dim = features.dim or current.settings.dim
        check_columns(replace(current.settings, features=features, dim=dim), len(current.arms))
        changed = recast(current, features, renamed)
        if reason := too_large(changed):
            raise InputError(reason)
        if before is not None and features.context != before.context:
            changed = replace(changed, former=_former(current, features, renamed))
    except AdcascadeError as error:
        return Refusal(order=order, reason=str(error))
    columns = columns_of(current.settings, features, renamed)
    clock = joined(current.clock, new_share(columns, features), current.settings.horizon_episodes)
    if any(current.thresholds) and min(columns.model.min(), columns.ads.min(initial=0)) < 0:
        # The width of a column of which nothing is known exceeds the thresholds for every session that has it.
        return replace(changed, clock=clock, thresholds=(NEVER,) * current.settings.horizon, ties=())
    return replace(changed, clock=clock)


def _former(current: Parameters, features: Features, renamed: Mapping[str, str]) -> FormerFeatures:
    """Return the present features as the former ones; raise `InputError` if sessions under those are not over."""
    before, former = current.settings.features, current.former
    if former is not None and min(current.progress.values(), default=0) < current.former_until:
        until = np.datetime64(current.former_until, "ms").astype("datetime64[s]")
        raise InputError(
            f"sessions under the features before version {former.since} may be open until {until} UTC: give the order "
            "again then"
        )
    context = () if before is None else before.context
    return FormerFeatures(
        since=current.version + 1,
        first=0 if former is None else former.since,
        context=context,
        renamed=renamed_in(context, features.context, renamed),
    )


def catalogue_difference(current: Sequence[Arm], wanted: Sequence[Arm]) -> tuple[ArmEntry, ...]:
    """Return the changes that make the active arms, their rewards and their features, those of `wanted`.

    An arm that `wanted` lacks is retired. It keeps its reward.

    >>> changes = catalogue_difference((Arm(arm="a", reward=1.0),), (Arm(arm="b", reward=2.0),))
    >>> [(change.arm, change.active) for change in changes]
    [('b', True), ('a', False)]
    """
    known = {arm.arm: arm for arm in current}
    named = {arm.arm for arm in wanted}
    changed = [arm for arm in wanted if known.get(arm.arm) != arm and (arm.active or arm.arm in known)]
    retired = [replace(arm, active=False) for arm in current if arm.active and arm.arm not in named]
    return tuple(entry_of(arm) for arm in (*changed, *retired))


def entry_of(arm: Arm) -> ArmEntry:
    """Return the wanted state of an arm as an entry of an order."""
    return ArmEntry(arm=arm.arm, reward=arm.reward, active=arm.active, features=dict(arm.features) or None)


def describe_changes(arms: Iterable[Arm], changes: Iterable[ArmEntry]) -> list[tuple[str, str, str]]:
    """Return changes of these arms for people, a row each: +, − or ~, the arm, and its rewards or changed features.

    >>> describe_changes([Arm(arm="a", reward=1.0)], [ArmEntry(arm="a", reward=2.5, active=True)])
    [('~', 'a', '1 → 2.5')]
    """
    known = {arm.arm: arm for arm in arms}
    return [_described(known.get(change.arm), change) for change in changes]


def _described(known: Arm | None, change: ArmEntry) -> tuple[str, str, str]:
    new = f"{change.reward:.15g}"
    if known is None or (change.active and not known.active):
        return "+", change.arm, new if known is None else f"{new} (was retired)"
    if known.active and not change.active:
        return "−", change.arm, f"{known.reward:.15g}"
    moved = sorted(set((change.features or {}).items()) - set(known.features))
    if moved:
        price = [f"{known.reward:.15g} → {new}"] if change.reward != known.reward else []
        return "~", change.arm, ", ".join([*price, *(f"{name} = {value}" for name, value in moved)])
    return "~", change.arm, f"{known.reward:.15g} → {new}"


def _roll_back(current: Parameters, command: Command, history: Mapping[int, Parameters]) -> Parameters | Refusal | None:
    number = command.version
    target = None if number is None else history.get(number)
    if target is None or not current.version - KEPT < target.version <= current.version:
        oldest = min(history)
        return Refusal(
            order=command,
            reason=f"version {number} is not among the last {KEPT} ({oldest} to {current.version})",
        )
    features, renamed = current.settings.features, current.former.renamed if current.former else {}
    if features is not None and target.settings.features != features:
        target = recast(target, features, renamed)
    return _with_estimate(current, target, current.arms)


def _take_over(current: Parameters, order: Import) -> Parameters | Refusal | None:
    """Take the estimate of given parameters under the present position, prices and frozen state.

    An arm that these lack starts at the prior. An arm that the catalogue lacks is added, or else integrated out.
    """
    try:
        given = parameters_of(order.parameters)
        for name in ("folds", "observations", "expected_sessions", "explore_budget"):
            if not 0 <= getattr(given, name) < MOST:
                raise ParametersError(f"{name} is out of range")
    except ParametersError as error:
        return Refusal(order=order, reason=f"these parameters cannot be used: {error}")
    for name in ("dim", "model", "intercept", "standardise"):
        theirs, ours = getattr(given.settings, name), getattr(current.settings, name)
        if theirs != ours:
            return Refusal(order=order, reason=f"these parameters have {name} {theirs}, the present ones {ours}")
    if given.settings.features != current.settings.features:
        return Refusal(order=order, reason="these parameters have other features than the present ones")
    known = current.indices
    added = [arm for arm in given.arms if order.arms and arm.arm not in known]
    try:
        taken = _with_estimate(current, given, (*current.arms, *added))
        if taken is not None:
            # Else no worker could read the version.
            type(taken.model).unpack(taken.model.pack(), intercept=taken.settings.intercept)
    except AdcascadeError as error:
        return Refusal(order=order, reason=f"these parameters do not fit the catalogue: {error}")
    # Also where no arm is added: what arms that are integrated out have said takes room.
    if taken is not None and (reason := too_large(taken)):
        return Refusal(order=order, reason=reason)
    return taken


def _with_estimate(current: Parameters, target: Parameters, arms: tuple[Arm, ...]) -> Parameters | None:
    """Return the estimate of `target` for these arms; None if it is the current one."""
    indices = {arm.arm: index for index, arm in enumerate(arms)}
    pending = target.pending
    if pending is not None:
        pending = pending.renamed([indices.get(arm.arm, -1) for arm in target.arms])
    thresholds, ties = (fitted_thresholds(one, current.settings.horizon) for one in (target.thresholds, target.ties))
    known = target.indices
    fresh = sum(arm.active and arm.arm not in known for arm in arms)
    if fresh and any(thresholds):
        # The width of an arm that the target does not have exceeds its thresholds for nearly every session.
        thresholds, ties = (NEVER,) * current.settings.horizon, ()
    share = fresh / max(1, sum(arm.active for arm in arms))
    taken = replace(
        current,
        arms=arms,
        model=align(target.model, target.arms, arms, settings=current.settings).with_horizon(current.settings.horizon),
        folds=target.folds,
        clock=joined(target.clock, share, current.settings.horizon_episodes),
        kept=target.kept,
        changed=target.changed,
        changes=target.changes,
        observations=target.observations,
        expected_sessions=target.expected_sessions,
        explore_budget=target.explore_budget,
        thresholds=thresholds,
        ties=ties,
        answers=align_answers(target, arms, current.settings),
        calibration=Calibration(),
        standardisation=target.standardisation,
        pending=pending,
    )
    return None if taken == current else taken


def align(model: ClickModel, known: Sequence[Arm], wanted: Sequence[Arm], *, settings: LearningSettings) -> ClickModel:
    """Return the belief about `wanted` arms: the prior for new ones; the belief about others is integrated out."""
    names, columns = [arm.arm for arm in known], ad_columns(settings, wanted)
    if names == [arm.arm for arm in wanted]:
        return model.with_features(columns)
    indices = {name: index for index, name in enumerate(names)}
    fresh = [row for row, arm in enumerate(wanted) if arm.arm not in indices]
    indices |= {wanted[row].arm: len(names) + number for number, row in enumerate(fresh)}
    grown = model.with_arms(len(fresh), features=columns[fresh]) if fresh else model
    return grown.choose_arms([indices[arm.arm] for arm in wanted]).with_features(columns)


def under(settings: LearningSettings, parameters: Parameters) -> Parameters:
    """Return the same estimate under other settings; what contexts and ads mean, and their scale, stays as it is."""
    known, renamed = parameters.settings, parameters.former.renamed if parameters.former else {}
    # A tagged version that is carried has followed the features; another one follows now.
    tagged = known.tagged if known.control_identity == settings.control_identity else settings.tagged
    kept = {name: getattr(known, name) for name in KEPT_BY_MODEL}
    settings = replace(settings, **kept, tagged=in_columns(tagged, known.features, renamed))
    if settings == parameters.settings:
        return parameters
    return replace(
        parameters,
        settings=settings,
        model=parameters.model.with_horizon(settings.horizon),
        thresholds=fitted_thresholds(parameters.thresholds, settings.horizon),
        ties=fitted_thresholds(parameters.ties, settings.horizon),
        answers=align_answers(parameters, parameters.arms, settings),
    )


def align_answers(target: Parameters, arms: Sequence[Arm], settings: LearningSettings) -> AnswerCounts | None:
    """Return the counts of answers of `target` for these arms and settings, from nothing where it has none."""
    empty = counts_for(settings, len(arms))
    if empty is None or target.answers is None:
        return empty
    known = target.indices
    return target.answers.choose_arms([known.get(arm.arm, -1) for arm in arms]).with_horizon(settings.horizon)


def fitted_thresholds(thresholds: tuple[float, ...], horizon: int) -> tuple[float, ...]:
    """Cut thresholds, or ties, to the horizon, or repeat the last one for new steps; none stay none.

    >>> fitted_thresholds((3.0, 2.0), 4)
    (3.0, 2.0, 2.0, 2.0)
    """
    return (*thresholds, *thresholds[-1:] * horizon)[:horizon]
