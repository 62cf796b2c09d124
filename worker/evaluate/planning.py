"""Plan the sessions of a log again, as they were served and as the target would serve them.

The code that serves plans both slates, from the versions in the log. A session is left out if the log contradicts its
version: its slate must be possible, and the propensity of its first decision, if recorded, must be that of the version.
The version that an imported session names did not serve it, and cannot be contradicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.click_model import ClickModel
from worker.bandit.policies import EpsilonGreedy, Greedy, Random, policy_named
from worker.errors import InputError
from worker.evaluate.imported import weigh_imported
from worker.evaluate.logged import LoggedSession
from worker.evaluate.sessions import Bools, Rule, Sessions
from worker.evaluate.targets import ALONE, Estimates, planned_by
from worker.logs.versions import RecordedVersions
from worker.stream.contexts import Standardisation, recoded, stack_packed
from worker.stream.events import Arrival
from worker.stream.feature_changes import continued_columns
from worker.stream.parameters import Parameters, first_model
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner

DRAWS: Final = 8  # slates drawn from a target that draws
CLOSE: Final = 1e-9
WEAK_RIDGE: Final = 0.1  # without an intercept, a prior around even odds would raise the probability of rare clicks


@dataclass(slots=True)
class Assembled:
    """All sessions, planned for the target.

    supported : (n,), whether the rule that served a session supports the target
    unsupported : why no imported session supports it, if that is so
    warmup : (n,), whether the session came in the warm-up
    contradicting : number of sessions left out because they contradict their version
    prior : the click model that serves, before any data
    """

    sessions: Sessions
    supported: Bools
    unsupported: str | None
    warmup: Bools
    contradicting: int
    prior: ClickModel


def assemble(
    logged: Mapping[int, Sequence[LoggedSession]],
    versions: RecordedVersions,
    estimates: Estimates,
    settings: dict[str, Any],
    *,
    seed: int,
) -> Assembled:
    """Plan every session as it was served and as the target would serve it."""
    served_by = {number: versions.read(number) for number in sorted(logged)}
    everything = [session for number in served_by for session in logged[number]]
    widest, periods = _arms(served_by)
    sessions, horizon = _recorded(everything, served_by, widest, periods), 0
    warmup, same = np.zeros((2, len(sessions)), dtype=bool)
    drawn: list[tuple[Ints, Ints]] = []
    for served, target, rows in _groups(everything, served_by, estimates, settings):
        group = [everything[row] for row in rows.tolist()]
        alone = _under(served, **ALONE)
        warmup[rows] = served.is_warming_up
        whole = warmup[rows[0]] or policy_named(served.settings.policy) is Random
        sessions.served.uniform[rows] = 1.0 if whole else served.random_share
        same[rows] = alone.settings == target.settings and alone.model is target.model
        horizon = max(horizon, target.settings.horizon)
        for rule, version in (sessions.served, alone), (sessions.target, target):
            policy = version.policy()
            epsilon = {Random: 1.0, EpsilonGreedy: version.settings.epsilon}.get(type(policy), 0.0)
            rule.epsilon[rows] = epsilon
            if epsilon < 1:  # the plans without chance
                best = _slates(_under(version, policy=Greedy.name) if epsilon else version, group, widest.indices)
                rule.best[rows, : best.shape[1]] = best
        if epsilon:  # draws of the target, independent of those that served the sessions
            drawing = [_under(target, salt=f"evaluate {seed} {number}") for number in range(DRAWS)]
            drawn.append((rows, np.stack([_slates(version, group, widest.indices) for version in drawing])))
    for array in (warmup, same, sessions.served.uniform, sessions.served.epsilon):
        array[sessions.imported] = 0  # the version that they name did not serve them
    # A deterministic policy showed its plan; rounding on this machine may resolve a tie differently.
    certain = ~sessions.drawn & (sessions.served.epsilon == 0)
    sessions.served.best[certain] = sessions.slates[certain]
    sessions.target.best[same] = sessions.served.best[same]
    target_slates = np.repeat(sessions.target.best[None], DRAWS if drawn else 1, axis=0)
    for rows, slates in drawn:
        target_slates[:, rows, : slates.shape[2]] = slates
    fits = _fits(sessions, everything)
    sessions, weighed, unsupported = weigh_imported(sessions, everything, horizon=horizon)
    if not fits.any():
        raise InputError("every session of the log contradicts the version that served it")
    contexts = _common_scale(sessions.contexts, served_by)
    return Assembled(
        sessions=replace(sessions, contexts=contexts, target_slates=target_slates).part(fits).cut(horizon),
        supported=(sessions.served.explores | same | weighed)[fits],
        unsupported=unsupported,
        warmup=warmup[fits],
        contradicting=int((~fits).sum()),
        prior=_prior(widest, served_by[max(served_by)].settings, target.settings, contexts[fits]),
    )


def _arms(versions: Mapping[int, Parameters]) -> tuple[Parameters, dict[tuple[Arm, ...], int]]:
    """Return the newest version with all arms of the log, and the periods of constant arms and prices."""
    widest = max(versions.values(), key=lambda version: (len(version.arms), version.version))
    names = [arm.arm for arm in widest.arms]
    periods: dict[tuple[Arm, ...], int] = {}
    for version in versions.values():
        if [arm.arm for arm in version.arms] != names[: len(version.arms)]:
            raise InputError(f"versions {version.version} and {widest.version} have their arms in different orders")
        if version.settings.repeats != widest.settings.repeats:
            raise InputError("the versions of the log differ in whether a session may show an arm twice")
        periods.setdefault(version.arms, len(periods))
    return widest, periods


def _recorded(
    logged: Sequence[LoggedSession],
    served_by: Mapping[int, Parameters],
    widest: Parameters,
    periods: Mapping[tuple[Arm, ...], int],
) -> Sessions:
    """Return the sessions as they were recorded; `assemble` fills in the rules."""
    count, horizon = len(logged), max(version.settings.horizon for version in served_by.values())
    index = widest.indices
    slates = _padded([[index.get(arm, NO_ARM) for arm in one.slate[:horizon]] for one in logged], horizon)
    excluded = [sorted({index[arm] for arm in one.exclude if arm in index}) for one in logged]
    prices, active = np.zeros((2, len(periods), max(1, len(index))))
    for arms, row in periods.items():
        prices[row, : len(arms)] = [arm.reward for arm in arms]
        active[row, : len(arms)] = [arm.active for arm in arms]
    period = np.array([periods[served_by[one.version].arms] for one in logged])
    displayed = np.array([one.displayed for one in logged], dtype=np.intp)
    clicked = np.array([one.clicked for one in logged], dtype=bool)
    last = slates[np.arange(count), np.maximum(displayed - 1, 0)]
    served, target = (
        Rule(
            best=np.full((count, horizon), NO_ARM, dtype=np.intp),
            epsilon=np.zeros(count),
            uniform=np.zeros(count),
            repeats=widest.settings.repeats,
        )
        for _ in range(2)
    )
    return Sessions(
        contexts=_contexts(logged, served_by, widest),
        slates=slates,
        displayed=displayed,
        answered=np.array([one.answered for one in logged], dtype=np.intp),
        clicked=clicked,
        earned=np.where(clicked, prices[period, last], 0.0),
        prices=prices,
        active=active.astype(bool),
        period=period,
        excluded=_padded(excluded, max(map(len, excluded))),
        served=served,
        target=target,
        target_slates=target.best[None],
        drawn=np.array([one.mode in ("warmup", "random") for one in logged]),
        imported=np.array([one.mode == "imported" for one in logged]),
        recorded=np.full((count, horizon), np.nan),
        depth=horizon,
    )


def _contexts(logged: Sequence[LoggedSession], served_by: Mapping[int, Parameters], newest: Parameters) -> Floats:
    """Return all contexts in the columns of the newest version, (n, d)."""
    contexts, features = np.empty((len(logged), newest.settings.dim)), newest.settings.features
    changes = {one.former.since: one.former.renamed for one in served_by.values() if one.former is not None}
    numbers = np.array([one.version for one in logged])
    for number in np.unique(numbers).tolist():
        rows, served = np.flatnonzero(numbers == number), served_by[number].settings
        own = stack_packed([logged[row].context for row in rows.tolist()], served.dim)
        later = [renamed for since, renamed in sorted(changes.items()) if since > number]
        if features is not None and served.features is not None and later:
            names: dict[str, str] = {}
            for renamed in later:
                names = {old: renamed.get(new, new) for old, new in names.items()} | renamed
            columns = continued_columns(served.features.context, features.context, names)
            own = recoded(own, columns, features.number_columns)
        contexts[rows] = own
    return contexts


def _padded(rows: Sequence[Sequence[int]], width: int) -> Ints:
    """Return rows of arms as an array, filled up with NO_ARM."""
    table = np.full((len(rows), width), NO_ARM, dtype=np.intp)
    for row, arms in enumerate(rows):
        table[row, : len(arms)] = arms
    return table


def _groups(
    logged: Sequence[LoggedSession],
    served_by: Mapping[int, Parameters],
    estimates: Estimates,
    settings: dict[str, Any],
) -> Iterator[tuple[Parameters, Parameters, Ints]]:
    """Yield the versions that served, each with the estimates of the target and the rows of their sessions."""
    groups: dict[tuple[int, int], tuple[Parameters, Parameters, list[int]]] = {}
    for row, session in enumerate(logged):
        served = served_by[session.version]
        estimate = estimates(served, session.arrived_at)
        groups.setdefault((served.version, id(estimate)), (served, estimate, []))[2].append(row)
    for served, estimate, rows in groups.values():
        yield served, planned_by(estimate, served, settings), np.array(rows)


def _slates(parameters: Parameters, sessions: Sequence[LoggedSession], index: Mapping[str, int]) -> Ints:
    """Plan sessions under one version as in serving, by their ids: (n, h) of indices of arms."""
    arrivals = [
        Arrival(session_id=one.session_id, occurred_at=one.arrived_at, context=(), exclude=one.exclude)
        for one in sessions
    ]
    planned = SlatePlanner(parameters).plan(arrivals, [one.context for one in sessions])
    return _padded([[index[arm] for arm in slate.arms] for slate in planned], parameters.settings.horizon)


def _under(parameters: Parameters, **changes: Any) -> Parameters:
    return replace(parameters, settings=replace(parameters.settings, **changes))


def _fits(sessions: Sessions, logged: Sequence[LoggedSession]) -> Bools:
    """Return whether the records of each session are possible under its version."""
    slates, eligible = sessions.slates, sessions.eligible[:, :1]
    expected = np.where(sessions.drawn, 1 / eligible[:, 0], sessions.served.steps(slates, eligible)[:, 0])
    propensities = np.array([session.propensities[0] for session in logged])
    fits = np.isnan(propensities) | (np.abs(propensities - expected) <= CLOSE)
    fits &= (slates != NO_ARM).sum(axis=1) == [len(session.slate) for session in logged]
    fits &= ~sessions.drawn | (sessions.served.uniform > 0)
    fits &= (sessions.active[sessions.period[:, None], slates] | (slates == NO_ARM)).all(axis=1)
    excluded = (slates[:, :, None] == sessions.excluded[:, None, :]) & (slates != NO_ARM)[:, :, None]
    return np.asarray((fits & ~excluded.any(axis=(1, 2))) | sessions.imported)


def _prior(widest: Parameters, served: LearningSettings, target: LearningSettings, contexts: Floats) -> ClickModel:
    """Return the prior of the newest model that served, or that of a target which can tell users apart if it cannot.

    Features are those of the newest version with all arms of the log, and measured in its contexts.
    """
    chosen = served if served.model != AdditiveModel.name else target
    ridge = chosen.ridge if chosen.intercept else min(chosen.ridge, WEAK_RIDGE)
    return first_model(replace(chosen, features=widest.settings.features, ridge=ridge), widest.arms, contexts)


def _common_scale(contexts: Floats, served_by: Mapping[int, Parameters]) -> Floats:
    """Return all contexts as the newest version of the log takes them, for click models of the whole log.

    If none of the versions had a scale yet, the log itself gives it.
    """
    newest = served_by[max(served_by)]
    known = [version for version in served_by.values() if version.standardisation is not None]
    if not known and newest.awaits_standardisation:
        features = newest.settings.features
        numbers = features.number_columns if features is not None and features.context else None
        return replace(newest, pending=None, standardisation=Standardisation.estimate(contexts, numbers)).prepared(
            contexts
        )
    return (known[-1] if known else newest).prepared(contexts)
