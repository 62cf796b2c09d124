"""Sessions of a log as arrays: how each was served, and how the target would have served it.

The slates of both are planned again, by the same code that serves, from the versions in the log. What the log says
about a session has to fit: the slate must be possible under its version, and the propensity of its first decision (if
the log has it) must be what the version makes it; a session that does not fit is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from worker.bandit.planning import NO_ARM, Masked, Planner
from worker.bandit.policies import Policy, make_policy
from worker.bandit.precision import Floats, Ints
from worker.errors import InputError
from worker.evaluate.logged import LoggedSession
from worker.evaluate.sessions import Bools, Rule, Sessions
from worker.evaluate.targets import Estimates, planned_by
from worker.logs.versions import RecordedVersions
from worker.stream.chance import session_uniforms
from worker.stream.contexts import stack_packed
from worker.stream.folding import planner_of
from worker.stream.parameters import Arm, LearningSettings, Parameters, with_settings

DRAWS: Final = 8  # slates drawn from a target that leaves something to chance
CONTRADICTS: Final = "contradicts its version"
CLOSE: Final = 1e-9


@dataclass(slots=True)
class Assembled:
    """All sessions, planned anew.

    `supported` (n,) says whether the rule that served a session can tell about the target, `warmup` (n,) whether it
    came in the warm-up; `left_out` counts sessions by the reason; `target` is the policy evaluated.
    """

    sessions: Sessions
    supported: Bools
    warmup: Bools
    left_out: Counter[str]
    versions: int
    target: LearningSettings


def assemble(
    logged: Mapping[int, Sequence[LoggedSession]],
    versions: RecordedVersions,
    estimates: Estimates,
    settings: dict[str, Any],
    *,
    seed: int,
) -> Assembled:
    """Plan every session anew, as it was served and as the target would serve it."""
    if not logged:
        raise InputError("the log has no session that can be used")
    served_by = {number: versions.read(number) for number in sorted(logged)}
    shape = _Shape.of(served_by)
    parts = [
        _part(served, target, sessions, shape, seed)
        for served, target, sessions in _groups(logged, served_by, estimates, settings)
    ]
    return Assembled(
        sessions=_joined(parts, shape),
        supported=np.concatenate([part.supported[part.fits] for part in parts]),
        warmup=np.concatenate([np.full(part.fits.sum(), part.warmup) for part in parts]),
        left_out=+Counter({CONTRADICTS: sum(int((~part.fits).sum()) for part in parts)}),
        versions=len(served_by),
        target=parts[-1].settings,
    )


def _groups(
    logged: Mapping[int, Sequence[LoggedSession]],
    served_by: Mapping[int, Parameters],
    estimates: Estimates,
    settings: dict[str, Any],
) -> Iterator[tuple[Parameters, Parameters, list[LoggedSession]]]:
    """Yield the sessions that one version served and one estimate is to plan."""
    for number, served in served_by.items():
        groups: dict[int, tuple[Parameters, list[LoggedSession]]] = {}
        for session in logged[number]:
            estimate = estimates(served, session.arrived_at)
            groups.setdefault(id(estimate), (estimate, []))[1].append(session)
        for estimate, sessions in groups.values():
            yield served, planned_by(estimate, served, settings), sessions


@dataclass(slots=True, kw_only=True)
class _Shape:
    """What all versions of a log have in common, and the periods of constant arms and prices."""

    arms: int
    horizon: int
    repeats: bool
    periods: dict[tuple[Arm, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, versions: Mapping[int, Parameters]) -> _Shape:
        widest = max(versions.values(), key=lambda version: len(version.arms))
        names = [arm.arm for arm in widest.arms]
        for version in versions.values():
            if [arm.arm for arm in version.arms] != names[: len(version.arms)]:
                raise InputError(f"version {version.version} has its arms in another order than {widest.version}")
            if version.settings.repeats != widest.settings.repeats:
                raise InputError("some versions of the log let a session show an arm twice and some do not")
        horizon = max(version.settings.horizon for version in versions.values())
        return cls(arms=len(names), horizon=horizon, repeats=widest.settings.repeats)

    def period(self, arms: tuple[Arm, ...]) -> int:
        return self.periods.setdefault(arms, len(self.periods))

    def prices(self) -> Floats:
        table = np.zeros((len(self.periods), max(1, self.arms)))
        for arms, row in self.periods.items():
            table[row, : len(arms)] = [arm.reward for arm in arms]
        return table

    def active(self) -> Bools:
        table = np.zeros((len(self.periods), max(1, self.arms)), dtype=bool)
        for arms, row in self.periods.items():
            table[row, : len(arms)] = [arm.active for arm in arms]
        return table

    def wide(self, slates: Ints) -> Ints:
        """Fill slates up to the horizon of the log: (n, h) → (n, H)."""
        missing = self.horizon - slates.shape[1]
        return np.pad(slates, ((0, 0), (0, missing)), constant_values=NO_ARM) if missing else slates


@dataclass(slots=True, kw_only=True)
class _Part:
    """The sessions of one version and one estimate."""

    sessions: list[LoggedSession]
    contexts: Floats
    slates: Ints
    excluded: list[list[int]]
    period: int
    served: Rule
    target: Rule
    target_slates: Ints
    drawn: Bools
    settings: LearningSettings
    warmup: bool
    supported: Bools
    fits: Bools


def _part(served: Parameters, target: Parameters, sessions: list[LoggedSession], shape: _Shape, seed: int) -> _Part:
    places = {arm.arm: place for place, arm in enumerate(served.arms)}
    contexts = stack_packed([session.opening.context for session in sessions], served.settings.dim)
    excluded = [sorted({places[arm] for arm in s.opening.exclude if arm in places}) for s in sessions]
    slates = _slates(sessions, places, shape)
    names = [session.session_id for session in sessions]
    drawn = np.array([session.opening.mode in ("warmup", "random") for session in sessions])
    alone = with_settings(served, warmup=0, random_share=0.0)
    warmup = served.folds < served.settings.warmup
    whole = warmup or served.settings.policy == "random"
    rule = _Planning(alone, shape).rule(contexts, excluded, 1.0 if whole else served.settings.random_share)
    # What a deterministic policy showed is what it planned, whatever rounding on this machine makes of a tie.
    planned = np.where((drawn | (rule.epsilon > 0))[:, None], rule.best, slates)
    rule = Rule(best=planned, epsilon=rule.epsilon, uniform=rule.uniform, repeats=rule.repeats)
    planning = _Planning(target, shape)
    aim = planning.rule(contexts, excluded, 0.0)
    same = alone.settings == target.settings and alone.posterior is target.posterior
    if same:
        aim = Rule(best=rule.best, epsilon=aim.epsilon, uniform=aim.uniform, repeats=aim.repeats)
    part = _Part(
        sessions=sessions,
        contexts=contexts,
        slates=slates,
        excluded=excluded,
        period=shape.period(served.arms),
        served=rule,
        target=aim,
        target_slates=planning.draws(aim, contexts, excluded, names, seed),
        drawn=drawn,
        settings=target.settings,
        warmup=warmup,
        supported=rule.explores | same,
        fits=np.ones(len(sessions), dtype=bool),
    )
    part.fits = _fits(part, served)
    return part


def _slates(sessions: Sequence[LoggedSession], places: Mapping[str, int], shape: _Shape) -> Ints:
    slates = np.full((len(sessions), shape.horizon), NO_ARM, dtype=np.intp)
    for row, session in enumerate(sessions):
        arms = [places.get(arm, NO_ARM) for arm in session.opening.slate[: shape.horizon]]
        slates[row, : len(arms)] = arms
    return slates


def _fits(part: _Part, served: Parameters) -> Bools:
    """Return whether what the log says about each session can be true of its version."""
    active = np.array([arm.active for arm in served.arms], dtype=bool)
    eligible = np.array([max(1, int(active.sum()) - int(active[out].sum())) for out in part.excluded])
    expected = np.where(part.drawn, 1 / eligible, part.served.steps(part.slates, eligible[:, None])[:, 0])
    logged = np.array([session.propensity for session in part.sessions])
    fits = np.isnan(logged) | (np.abs(logged - expected) <= CLOSE)
    lengths = np.array([len(session.opening.slate) for session in part.sessions])
    fits &= (part.slates != NO_ARM).sum(axis=1) == lengths
    fits &= ~part.drawn | (part.served.uniform > 0)
    fits &= np.append(active, True)[part.slates].all(axis=1)  # NO_ARM is the last place, and always fits
    for row, out in enumerate(part.excluded):
        if out and np.isin(part.slates[row], out).any():
            fits[row] = False
    return np.asarray(fits)


def _joined(parts: Sequence[_Part], shape: _Shape) -> Sessions:
    kept = [part.fits for part in parts]
    sessions = [
        session for part in parts for session, fits in zip(part.sessions, part.fits.tolist(), strict=True) if fits
    ]
    if not sessions:
        raise InputError("no session of the log fits the version that served it")
    prices = shape.prices()
    slates = np.concatenate([part.slates[rows] for part, rows in zip(parts, kept, strict=True)])
    period = np.concatenate([np.full(rows.sum(), part.period) for part, rows in zip(parts, kept, strict=True)])
    displayed = np.array([session.displayed for session in sessions], dtype=np.intp)
    clicked = np.array([session.clicked for session in sessions], dtype=bool)
    last = slates[np.arange(len(slates)), np.maximum(displayed - 1, 0)]
    draws = max(len(part.target_slates) for part in parts)
    excluded = [tuple(out) for part in parts for out, fits in zip(part.excluded, part.fits, strict=True) if fits]
    whole = Sessions(
        contexts=np.concatenate([part.contexts[rows] for part, rows in zip(parts, kept, strict=True)]),
        slates=slates,
        displayed=displayed,
        answered=np.array([session.answered for session in sessions], dtype=np.intp),
        clicked=clicked,
        earned=np.where(clicked, prices[period, last], 0.0),
        prices=prices,
        active=shape.active(),
        period=period,
        excluded=tuple(excluded) if any(excluded) else (),
        served=_rules([part.served.part(rows) for part, rows in zip(parts, kept, strict=True)]),
        target=_rules([part.target.part(rows) for part, rows in zip(parts, kept, strict=True)]),
        target_slates=np.concatenate(
            [
                np.resize(part.target_slates, (draws, *part.target_slates.shape[1:]))[:, rows]
                for part, rows in zip(parts, kept, strict=True)
            ],
            axis=1,
        ),
        drawn=np.concatenate([part.drawn[rows] for part, rows in zip(parts, kept, strict=True)]),
        depth=shape.horizon,
    )
    return whole.cut(max(part.settings.horizon for part in parts))


def _rules(rules: Sequence[Rule]) -> Rule:
    return Rule(
        best=np.concatenate([rule.best for rule in rules]),
        epsilon=np.concatenate([rule.epsilon for rule in rules]),
        uniform=np.concatenate([rule.uniform for rule in rules]),
        repeats=rules[0].repeats,
    )


class _Planning:
    """Plans slates under one version's policy."""

    def __init__(self, parameters: Parameters, shape: _Shape) -> None:
        self._parameters, self._shape = parameters, shape
        self._planner: Planner | None = planner_of(parameters)
        settings = parameters.settings
        self._policy: Policy = make_policy(
            settings.policy,
            beta=parameters.beta,
            bonus=settings.bonus,
            epsilon=settings.epsilon,
            thresholds=parameters.thresholds or (0.0,) * settings.horizon,
        )

    def rule(self, contexts: Floats, excluded: Sequence[Sequence[int]], uniform: float) -> Rule:
        """Return the rule that the policy is, for some contexts."""
        count, settings = len(contexts), self._parameters.settings
        epsilon = {"random": 1.0, "epsilon-greedy": settings.epsilon}.get(settings.policy, 0.0)
        if self._planner is None or epsilon == 1:
            best = np.full((count, settings.horizon), NO_ARM, dtype=np.intp)
        else:
            policy = make_policy("greedy") if epsilon else self._policy
            best = policy.slates(self._planner, contexts, self._masked(excluded)).arms
        return Rule(
            best=self._shape.wide(best),
            epsilon=np.full(count, epsilon),
            uniform=np.full(count, uniform),
            repeats=self._shape.repeats,
        )

    def draws(
        self, rule: Rule, contexts: Floats, excluded: Sequence[Sequence[int]], names: list[str], seed: int
    ) -> Ints:
        """Draw slates of the policy: (r, n, H), with chance of their own, not that which served the sessions."""
        if self._planner is None or not (rule.epsilon > 0).any():
            return rule.best[None]
        horizon = self._parameters.settings.horizon
        masked = self._masked(excluded)
        drawn = []
        for number in range(DRAWS):
            uniforms = session_uniforms(f"evaluate {seed} {number}", names, horizon)
            drawn.append(self._shape.wide(self._policy.slates(self._planner, contexts, masked, uniforms).arms))
        return np.stack(drawn)

    def _masked(self, excluded: Sequence[Sequence[int]]) -> Masked | None:
        return None if self._planner is None else self._planner.masked(excluded)
