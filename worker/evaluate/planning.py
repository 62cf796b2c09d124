"""Plan the sessions of a log again, as they were served and as the target would serve them.

The code that serves plans both slates, from the versions in the log. Rules that hold in this file:

- A version that warms up, or whose policy is random, draws slates uniformly. The first h arms of a slate then have the
  probability U_h = Π_{j≤h} 1/E_j, with E_j the number of arms eligible at position j.
- A version whose policy has a plan for the session draws the share u of its sessions uniformly (`random_share`), and
  shows the plan to the others: P_h = u U_h + (1 − u) 1{a_1 … a_h as planned}. With u = 0, its sessions support its own
  policy and no other.
- A version that draws arm by arm (ε-greedy) has recorded choices, whose propensities are planned again. Sessions of the
  lottery have U_h.
- A target that draws has one slate for each session, from chance that is independent of what was served.

The target of a session plans with the changed settings; arms, prices, exclusions, the number of positions and repeats
are those in force at the time. So the evaluation is of a policy that replaces the other one for this session, and not
of one that runs, and learns, from the start. Its estimate is that of the version that served the session, or of one
version from a file. A version from a file that has learned from this log slightly overestimates the target's revenue.
The target has no warm-up, no `random_share` and no control group: the policy alone is evaluated.

The version that an imported session names did not serve it: another system chose its slate, and recorded how likely its
choices were, or did not.

- A session whose first propensity is below 1 was left to chance. Its weights have the recorded propensities, each given
  the earlier positions; if all of them are those of a uniform draw, the session counts as drawn uniformly.
- Every other session was certain. Certain sessions support one target: one that shows what they have shown, in each of
  them and up to their last display. Its revenue is that of the log.
- If a later display of a session left to chance has no propensity, no such session is weighed: whether there is a later
  display depends on the answers, so leaving out these sessions alone would bias the estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel
from worker.bandit.policies import POLICIES, Random
from worker.errors import InputError
from worker.evaluate.sessions import LoggedSession, Sessions
from worker.logs.versions import RecordedVersions
from worker.stream.catalogue import align, align_answers, under
from worker.stream.contexts import Standardisation, recoded, stack_packed
from worker.stream.events import Arrival
from worker.stream.feature_changes import continued_columns
from worker.stream.parameters import Parameters, first_model
from worker.stream.slates import Slate, SlatePlanner

WEAK_RIDGE: Final = 0.1  # without an intercept, a prior around even odds would raise the probability of rare clicks
CLOSE: Final = 1e-6  # propensities of a table may be rounded
#: Settings by which the policy plans every session.
ALONE: Final[dict[str, Any]] = {"warmup": 0, "random_share": 0.0, "control_share": 0.0, "max_loss": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The difference between the target and the policy that served."""

    settings: dict[str, Any] = field(default_factory=dict)
    parameters: Parameters | None = None

    def target(self, served: Parameters) -> Parameters:
        """Return the version that plans for the target where this one served."""
        estimate = self.parameters or served
        if served.settings.dim != estimate.settings.dim:
            raise InputError(f"the parameters have dim {estimate.settings.dim}, the log has {served.settings.dim}")
        if served.settings.features != estimate.settings.features:
            raise InputError("the parameters and the log have different features of contexts or ads")
        kept: dict[str, Any] = {"horizon": served.settings.horizon, "repeats": served.settings.repeats}
        changed = replace(estimate.settings, **self.settings, **ALONE, **kept)
        made_for = ("policy", "bonus", "beta", "spread") if POLICIES[changed.policy].is_selective else ()
        if any(getattr(changed, name) != getattr(estimate.settings, name) for name in made_for):
            raise InputError(
                f"the policy {changed.policy} under β {changed.beta} needs versions that were made for it: give "
                "--parameters FILE, which adcascade replay LOG --relearn with these settings writes (--output FILE)"
            )
        aligned = replace(
            estimate,
            arms=served.arms,
            model=align(estimate.model, estimate.arms, served.arms, settings=estimate.settings),
            answers=align_answers(estimate, served.arms, estimate.settings),
            guarded=False,
        )
        return under(changed, aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """All sessions of a log, planned for the target.

    unsupported : why no imported session supports the target, if that is so
    prior : the click model before any data
    """

    sessions: Sessions
    unsupported: str | None
    prior: ClickModel


def assemble(logged: Mapping[int, Sequence[LoggedSession]], versions: RecordedVersions, change: Change) -> Assembled:
    """Plan every session as it was served and as the target would serve it."""
    served_by = {number: versions.read(number) for number in sorted(logged)}
    # Later versions have the arms of earlier ones, and more.
    newest = max(served_by.values(), key=lambda version: (len(version.arms), version.version))
    horizon = max(version.settings.horizon for version in served_by.values())
    parts, unsupported = [], None
    for number, served in served_by.items():
        group = _Group(logged[number], served, change.target(served), newest.indices, horizon)
        sessions = group.sessions(_contexts(number, served_by, newest, logged[number]))
        if logged[number][0].mode == "imported":
            recorded = _padded([one.propensities for one in logged[number]], horizon, np.nan)
            sessions, unsupported = with_recorded(sessions, recorded, group.eligible)
        else:
            sessions = group.with_chances(sessions)
        parts.append(sessions)
    everything = Sessions.joined(parts)
    contexts = _on_one_scale(everything.contexts, newest)
    return Assembled(
        sessions=replace(everything, contexts=contexts), unsupported=unsupported, prior=_prior(newest, contexts)
    )


class _Group:
    """The sessions of one version, and the version that plans for the target."""

    def __init__(
        self,
        group: Sequence[LoggedSession],
        served: Parameters,
        target: Parameters,
        index: Mapping[str, int],
        horizon: int,
    ) -> None:
        self._group, self._index, self._horizon = group, index, horizon
        self._served, self._target, self._alone = served, target, _under(served, **ALONE)
        self._prices = {arm.arm: arm.reward for arm in served.arms}

    def sessions(self, contexts: Floats) -> Sessions:
        """Return the sessions as they were recorded, with the slates of the target."""
        group, target = self._group, self._target
        if POLICIES[target.settings.policy].draws:
            target = _under(target, salt=f"evaluate {target.settings.salt}")
        slates, wanted = [one.slate[: self._horizon] for one in group], _plans(target, group)
        return Sessions(
            contexts=contexts,
            slates=self._arms(slates),
            target=self._arms(wanted),
            prices=self._revenue(slates),
            target_prices=self._revenue(wanted),
            chances=np.full((len(group), self._horizon), np.nan),
            target_chances=np.full((len(group), self._horizon), np.nan),
            displayed=np.array([one.displayed for one in group], dtype=np.intp),
            answered=np.array([one.answered for one in group], dtype=np.intp),
            clicked=np.array([one.clicked for one in group], dtype=bool),
            drawn=np.array([one.mode in ("warmup", "random") for one in group]),
            warmup=np.full(len(group), self._served.is_warming_up and group[0].mode != "imported"),
        )

    @property
    def eligible(self) -> Ints:
        """The number of eligible arms at each position, at least 1: (n, H)."""
        active = {arm.arm for arm in self._served.arms if arm.active}
        left = np.array([len(active.difference(one.exclude)) for one in self._group])[:, None]
        shown = np.zeros(self._horizon) if self._served.settings.repeats else np.arange(self._horizon)
        return np.asarray(np.maximum(left - shown, 1), dtype=np.intp)

    def with_chances(self, sessions: Sessions) -> Sessions:
        """Return the sessions with the probabilities of their slates, if the policy that served had any choice.

        The slates of a target that is this very policy are those that were shown; rounding on this machine may resolve
        a tie differently.
        """
        served, alone, target, planned = self._served, self._alone, self._target, ~sessions.drawn[:, None]
        policy, share = POLICIES[served.settings.policy], served.random_share
        steps = 1 / self.eligible
        if served.is_warming_up or policy is Random:
            share, plans = 1.0, sessions.slates
        elif policy.draws and not served.guarded:
            recorded = [slate.propensities or () for slate in _slates(alone, self._group)]
            steps = np.where(planned, _padded(recorded, self._horizon, 1.0), steps)
            return replace(sessions, chances=steps.cumprod(axis=1))
        elif alone.settings == target.settings and alone.model is target.model and not served.guarded:
            plans = np.where(planned, sessions.slates, sessions.target)
            prices = np.where(planned, sessions.prices, sessions.target_prices)
            sessions = replace(sessions, target=plans, target_prices=prices)
        elif share:
            rows, plans = np.flatnonzero(sessions.drawn), sessions.slates.copy()
            plans[rows] = self._arms(_plans(alone, [self._group[row] for row in rows.tolist()]))
        else:
            return sessions
        chances, target_chances = (
            share * np.where(slates == NO_ARM, 1.0, steps).cumprod(axis=1)
            + (1 - share) * (slates == plans).cumprod(axis=1)
            for slates in (sessions.slates, sessions.target)
        )
        return replace(sessions, chances=np.where(chances > 0, chances, np.nan), target_chances=target_chances)

    def _arms(self, slates: Sequence[Sequence[str]]) -> Ints:
        arms = [[self._index.get(arm, NO_ARM) for arm in slate] for slate in slates]
        return _padded(arms, self._horizon, NO_ARM).astype(np.intp)

    def _revenue(self, slates: Sequence[Sequence[str]]) -> Floats:
        return _padded([[self._prices.get(arm, 0.0) for arm in slate] for slate in slates], self._horizon, 0.0)


def with_recorded(sessions: Sessions, recorded: Floats, eligible: Ints) -> tuple[Sessions, str | None]:
    """Return imported sessions with their recorded propensities, (n, H), and why none can be weighed, if that is so.

    `eligible` (n, H) is the number of eligible arms at each position.
    """
    shown = sessions.shown
    differs = (shown & (sessions.target != sessions.slates)).any(axis=1)
    if not differs.any():
        return replace(sessions, chances=np.ones(recorded.shape), target_chances=np.ones(recorded.shape)), None
    chance = recorded[:, 0] < 1
    lacking = int((chance[:, None] & shown & np.isnan(recorded)).sum())
    if lacking:
        return sessions, f"{lacking} imported displays after the first have no propensity: weights need it of every one"
    if not chance.any():
        why = "no propensity is below 1"
        if np.isnan(recorded[:, 0]).all():
            why = "how likely theirs were is not known (import with --propensity-column)"
        return sessions, f"the target shows other ads in {differs.mean():.1%} of the imported sessions, and {why}"
    chances = np.cumprod(np.where(shown, recorded, 1.0), axis=1)
    uniform = (~shown | (np.abs(recorded * eligible - 1) <= CLOSE)).all(axis=1)
    return replace(sessions, chances=np.where(chance[:, None], chances, np.nan), drawn=chance & uniform), None


def _padded(rows: Sequence[Sequence[float]], width: int, filling: float) -> Floats:
    """Return rows of numbers as an array, filled up on the right."""
    table = np.full((len(rows), width), filling)
    for row, numbers in enumerate(rows):
        table[row, : len(numbers)] = numbers
    return table


def _under(parameters: Parameters, **changes: Any) -> Parameters:
    return replace(parameters, settings=replace(parameters.settings, **changes))


def _slates(parameters: Parameters, sessions: Sequence[LoggedSession]) -> list[Slate]:
    """Plan sessions under one version as in serving, by their ids."""
    arrivals = [
        Arrival(session_id=one.session_id, occurred_at=one.arrived_at, context=(), exclude=one.exclude)
        for one in sessions
    ]
    return SlatePlanner(parameters).plan(arrivals, [one.context for one in sessions])


def _plans(parameters: Parameters, sessions: Sequence[LoggedSession]) -> list[tuple[str, ...]]:
    return [slate.arms for slate in _slates(parameters, sessions)]


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _contexts(
    number: int, served_by: Mapping[int, Parameters], newest: Parameters, group: Sequence[LoggedSession]
) -> Floats:
    """Return the contexts of the sessions of a version in the columns of the newest version, (n, d)."""
    served, features = served_by[number].settings, newest.settings.features
    own = stack_packed([one.context for one in group], served.dim)
    changes = {one.former.since: one.former.renamed for one in served_by.values() if one.former is not None}
    later = [renamed for since, renamed in sorted(changes.items()) if since > number]
    if features is None or served.features is None or not later:
        return own
    names: dict[str, str] = {}
    for renamed in later:
        names = {old: renamed.get(new, new) for old, new in names.items()} | renamed
    return recoded(own, continued_columns(served.features.context, features.context, names), features.number_columns)


def _on_one_scale(contexts: Floats, newest: Parameters) -> Floats:
    """Return contexts as a model of the whole log takes them: on the scale that the log itself gives them."""
    scale, features = None, newest.settings.features
    if newest.settings.standardise:
        numbers = features.number_columns if features is not None and features.context else None
        scale = Standardisation.estimate(contexts, numbers)
    return replace(newest, pending=None, standardisation=scale).prepared(contexts)


def _prior(newest: Parameters, contexts: Floats) -> ClickModel:
    """Return the personal model before any data; priors of features follow their size in the log.

    An additive model cannot tell users apart by ad. Where they differ, it would be wrong for the target's slates.
    """
    settings = newest.settings
    ridge = settings.ridge if settings.intercept else min(settings.ridge, WEAK_RIDGE)
    return first_model(replace(settings, model=PersonalModel.name, ridge=ridge), newest.arms, contexts)
