"""Plan the sessions of a log again, as they were served and as the target would serve them.

The code that serves plans both slates, from the versions in the log. A session is left out if the log contradicts its
version: its slate must be possible, and the propensity of its first decision, if recorded, must be that of the version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.planning import Masked
from worker.bandit.policies import EpsilonGreedy, Greedy, Random, policy_named
from worker.errors import InputError
from worker.evaluate.logged import LoggedSession
from worker.evaluate.model import ModelForm
from worker.evaluate.sessions import Bools, Rule, Sessions
from worker.evaluate.targets import Estimates, planned_by
from worker.logs.versions import RecordedVersions
from worker.stream.chance import session_uniforms
from worker.stream.contexts import Standardisation, stack_packed
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings

DRAWS: Final = 8  # slates drawn from a target that draws
CONTRADICTS: Final = "contradicts its version"
CLOSE: Final = 1e-9


@dataclass(slots=True)
class Assembled:
    """All sessions, planned for the target.

    supported : (n,), whether the rule that served a session supports the target
    warmup : (n,), whether the session came in the warm-up
    left_out : number of sessions left out, by reason
    target : settings of the policy evaluated
    form : the kind of click model that serves
    """

    sessions: Sessions
    supported: Bools
    warmup: Bools
    left_out: Counter[str]
    versions: int
    target: LearningSettings
    form: ModelForm


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
    shape = _Shape.of(served_by)
    parts = [
        _part(served, target, sessions, shape, seed)
        for served, target, sessions in _groups(logged, served_by, estimates, settings)
    ]
    fits = np.concatenate([part.fits for part in parts])
    if not fits.any():
        raise InputError("every session of the log contradicts the version that served it")
    sessions = Sessions.joined([part.sessions for part in parts])
    sessions = replace(sessions, contexts=_common_scale(sessions.contexts, served_by))
    return Assembled(
        sessions=sessions.part(fits).cut(max(part.settings.horizon for part in parts)),
        supported=np.concatenate([part.supported for part in parts])[fits],
        warmup=np.concatenate([np.full(len(part.fits), part.warmup) for part in parts])[fits],
        left_out=+Counter({CONTRADICTS: int((~fits).sum())}),
        versions=len(served_by),
        target=parts[-1].settings,
        form=_form(served_by, parts[-1].settings),
    )


def _form(served_by: Mapping[int, Parameters], target: LearningSettings) -> ModelForm:
    """Return the form of the newest model that served, or that of a target which can tell users apart if it cannot.

    Features are those of the newest version with all arms of the log.
    """
    widest = max(served_by.values(), key=lambda version: (len(version.arms), version.version))
    served = served_by[max(served_by)].settings
    chosen = served if served.model != AdditiveModel.name else target
    columns = widest.ad_columns
    return ModelForm(
        name=chosen.model,
        intercept=chosen.intercept,
        ridge=chosen.ridge,
        features=columns if columns.shape[1] and len(widest.arms) else None,
    )


def _groups(
    logged: Mapping[int, Sequence[LoggedSession]],
    served_by: Mapping[int, Parameters],
    estimates: Estimates,
    settings: dict[str, Any],
) -> Iterator[tuple[Parameters, Parameters, list[LoggedSession]]]:
    """Yield the sessions of each version that served and each estimate of the target."""
    for number, served in served_by.items():
        groups: dict[int, tuple[Parameters, list[LoggedSession]]] = {}
        for session in logged[number]:
            estimate = estimates(served, session.arrived_at)
            groups.setdefault(id(estimate), (estimate, []))[1].append(session)
        for estimate, sessions in groups.values():
            yield served, planned_by(estimate, served, settings), sessions


@dataclass(slots=True, kw_only=True)
class _Shape:
    """The common dimensions of all versions of a log, and the periods of constant arms and prices."""

    arms: int
    horizon: int
    repeats: bool
    periods: dict[tuple[Arm, ...], int]

    @classmethod
    def of(cls, versions: Mapping[int, Parameters]) -> _Shape:
        widest = max(versions.values(), key=lambda version: len(version.arms))
        names = [arm.arm for arm in widest.arms]
        periods: dict[tuple[Arm, ...], int] = {}
        for version in versions.values():
            if [arm.arm for arm in version.arms] != names[: len(version.arms)]:
                raise InputError(f"versions {version.version} and {widest.version} have their arms in different orders")
            if version.settings.repeats != widest.settings.repeats:
                raise InputError("the versions of the log differ in whether a session may show an arm twice")
            periods.setdefault(version.arms, len(periods))
        horizon = max(version.settings.horizon for version in versions.values())
        return cls(arms=len(names), horizon=horizon, repeats=widest.settings.repeats, periods=periods)

    def table(self, field: str) -> Floats:
        """Return one field of every arm in every period: (g, K)."""
        table = np.zeros((len(self.periods), max(1, self.arms)))
        for arms, row in self.periods.items():
            table[row, : len(arms)] = [getattr(arm, field) for arm in arms]
        return table

    def wide(self, slates: Ints) -> Ints:
        """Pad slates to the horizon of the log: (n, h) → (n, H)."""
        missing = self.horizon - slates.shape[1]
        return np.pad(slates, ((0, 0), (0, missing)), constant_values=NO_ARM) if missing else slates


@dataclass(slots=True, kw_only=True)
class _Part:
    """The sessions of one version and one estimate, with the contexts as they were recorded."""

    sessions: Sessions
    settings: LearningSettings
    warmup: bool
    supported: Bools
    fits: Bools


def _part(served: Parameters, target: Parameters, logged: list[LoggedSession], shape: _Shape, seed: int) -> _Part:
    indices = {arm.arm: index for index, arm in enumerate(served.arms)}
    contexts = stack_packed([session.opening.context for session in logged], served.settings.dim)
    excluded = [sorted({indices[arm] for arm in one.opening.exclude if arm in indices}) for one in logged]
    slates = _slates(logged, indices, shape)
    names = [session.session_id for session in logged]
    drawn = np.array([session.opening.mode in ("warmup", "random") for session in logged])
    alone = replace(served, settings=replace(served.settings, warmup=0, random_share=0.0))
    warmup = served.folds < served.settings.warmup
    whole = warmup or policy_named(served.settings.policy) is Random
    rule = _Planning(alone, shape).rule(contexts, excluded, names, 1.0 if whole else served.settings.random_share)
    # A deterministic policy showed its plan; rounding on this machine may resolve a tie differently.
    planned = np.where((drawn | (rule.epsilon > 0))[:, None], rule.best, slates)
    rule = replace(rule, best=planned)
    planning = _Planning(target, shape)
    aim = planning.rule(contexts, excluded, names, 0.0)
    same = alone.settings == target.settings and alone.model is target.model
    if same:
        aim = replace(aim, best=rule.best)
    displayed = np.array([session.displayed for session in logged], dtype=np.intp)
    clicked = np.array([session.clicked for session in logged], dtype=bool)
    prices, period = shape.table("reward"), shape.periods[served.arms]
    last = slates[np.arange(len(slates)), np.maximum(displayed - 1, 0)]
    sessions = Sessions(
        contexts=contexts,
        slates=slates,
        displayed=displayed,
        answered=np.array([session.answered for session in logged], dtype=np.intp),
        clicked=clicked,
        earned=np.where(clicked, prices[period, last], 0.0),
        prices=prices,
        active=shape.table("active").astype(bool),
        period=np.full(len(logged), period),
        excluded=tuple(map(tuple, excluded)),
        served=rule,
        target=aim,
        target_slates=planning.draws(aim, contexts, excluded, names, seed),
        drawn=drawn,
        depth=shape.horizon,
    )
    return _Part(
        sessions=sessions,
        settings=target.settings,
        warmup=warmup,
        supported=rule.explores | same,
        fits=_fits(sessions, logged),
    )


def _slates(sessions: Sequence[LoggedSession], indices: Mapping[str, int], shape: _Shape) -> Ints:
    slates = np.full((len(sessions), shape.horizon), NO_ARM, dtype=np.intp)
    for row, session in enumerate(sessions):
        arms = [indices.get(arm, NO_ARM) for arm in session.opening.slate[: shape.horizon]]
        slates[row, : len(arms)] = arms
    return slates


def _fits(sessions: Sessions, logged: Sequence[LoggedSession]) -> Bools:
    """Return whether the records of each session are possible under its version."""
    slates, eligible = sessions.slates, sessions.eligible[:, :1]
    expected = np.where(sessions.drawn, 1 / eligible[:, 0], sessions.served.steps(slates, eligible)[:, 0])
    propensities = np.array([session.propensity for session in logged])
    fits = np.isnan(propensities) | (np.abs(propensities - expected) <= CLOSE)
    fits &= (slates != NO_ARM).sum(axis=1) == [len(session.opening.slate) for session in logged]
    fits &= ~sessions.drawn | (sessions.served.uniform > 0)
    fits &= (sessions.active[sessions.period[:, None], slates] | (slates == NO_ARM)).all(axis=1)
    for row, arms in enumerate(sessions.excluded):
        if arms and np.isin(slates[row], arms).any():
            fits[row] = False
    return np.asarray(fits)


def _common_scale(contexts: Floats, served_by: Mapping[int, Parameters]) -> Floats:
    """Return all contexts as the newest version of the log takes them, for click models of the whole log.

    If none of the versions had a scale yet, the log itself gives it.
    """
    newest = served_by[max(served_by)]
    known = [version for version in served_by.values() if version.standardisation is not None]
    if not known and newest.awaits_standardisation:
        features = newest.settings.features
        numbers = features.number_columns if features is not None and features.context else None
        return Standardisation.estimate(contexts, numbers).apply(contexts)
    return (known[-1] if known else newest).prepared(contexts)


class _Planning:
    """Plan slates under the policy of one version."""

    def __init__(self, parameters: Parameters, shape: _Shape) -> None:
        self._parameters, self._shape = parameters, shape
        self._planner = parameters.planner()
        self._policy = parameters.policy()

    def rule(self, contexts: Floats, excluded: Sequence[Sequence[int]], names: list[str], uniform: float) -> Rule:
        """Return the rule of the policy for some contexts of the sessions `names`."""
        count, settings = len(contexts), self._parameters.settings
        epsilon = {Random: 1.0, EpsilonGreedy: settings.epsilon}.get(type(self._policy), 0.0)
        if self._planner is None or epsilon == 1:
            best = np.full((count, settings.horizon), NO_ARM, dtype=np.intp)
        else:
            policy = Greedy() if epsilon else self._policy
            prepared, masked = self._parameters.prepared(contexts), self._masked(excluded)
            # Ties with a threshold are broken by the session, as in serving.
            chance = session_uniforms(settings.salt, names, settings.horizon) if policy.needs_chance else None
            best = policy.slates(self._planner, prepared, masked, chance).arms
        return Rule(
            best=self._shape.wide(best),
            epsilon=np.full(count, epsilon),
            uniform=np.full(count, uniform),
            repeats=self._shape.repeats,
        )

    def draws(
        self, rule: Rule, contexts: Floats, excluded: Sequence[Sequence[int]], names: list[str], seed: int
    ) -> Ints:
        """Draw slates of the policy: (r, n, H), independent of the draws that served the sessions."""
        if self._planner is None or not (rule.epsilon > 0).any():
            return rule.best[None]
        horizon = self._parameters.settings.horizon
        contexts, masked = self._parameters.prepared(contexts), self._masked(excluded)
        drawn = []
        for number in range(DRAWS):
            uniforms = session_uniforms(f"evaluate {seed} {number}", names, horizon)
            drawn.append(self._shape.wide(self._policy.slates(self._planner, contexts, masked, uniforms).arms))
        return np.stack(drawn)

    def _masked(self, excluded: Sequence[Sequence[int]]) -> Masked | None:
        return None if self._planner is None else self._planner.masked(excluded)
