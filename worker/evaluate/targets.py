"""The target: another policy, applied to every session of the log.

The target of a session plans with the changed settings; arms, prices and exclusions are those in force at the time. So
the evaluation is of a policy that replaces the other one for this session, and not of one that runs, and learns, from
the start. Its estimate comes from one of three sources:

- *as served*: the version that served the session;
- *folded again*: the journal of the log is folded from version 0 under the changed settings, with the recorded slates
  and answers. This is for another estimator, and for exploration that depends on the making of versions (`aucbbp`
  thresholds, β "theory"). A session has the newest of these versions that was in force at its arrival. Each version
  has learned from earlier sessions only, so no estimate has seen the sessions that it plans;
- *given*: one version from a file, for every session. If it has learned from this log, its revenue is slightly
  overestimated.

The target has no warm-up, no `random_share` and no control group: the policy alone is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from worker.bandit.policies import policy_named
from worker.errors import FailedError, InputError
from worker.logs.ordered import OrderedLog
from worker.logs.versions import in_force
from worker.stream.catalogue import align, align_answers, under
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings

#: Returns the target's estimate for a session, from the version that served it and its arrival time.
Estimates: TypeAlias = Callable[[Parameters, int], Parameters]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The difference between the target and the policy that served."""

    settings: dict[str, Any] = field(default_factory=dict)
    parameters: Parameters | None = None


def find_estimates(log: OrderedLog, change: Change) -> tuple[Estimates, str]:
    """Return the target's estimates, and a description of their source."""
    given = change.parameters
    if given is not None:
        changed = replace(given.settings, **change.settings)
        if changed.beta == "theory" and not (given.settings.beta == "theory" and given.radius):
            raise InputError(
                "--beta theory: the given parameters have no radius of the theory, because they were made without it"
            )
        return (lambda served, time: given), f"version {given.version} of the file, for every session"
    if _needs_folding(log, change):
        versions = fold_again(log, change.settings)
        at = in_force({number: version.effective_at for number, version in versions.items()})
        origin = f"folded again from the journal, {len(versions)} versions"
        return (lambda served, time: versions[at(time) or 0]), origin
    return (lambda served, time: served), "as served"


#: Settings by which the policy plans every session.
ALONE: Final[dict[str, Any]] = {"warmup": 0, "random_share": 0.0, "control_share": 0.0, "max_loss": 0.0}


def planned_by(estimate: Parameters, served: Parameters, settings: dict[str, Any]) -> Parameters:
    """Return an estimate under changed settings, with the arms and prices of the version that served."""
    if served.settings.dim != estimate.settings.dim:
        raise InputError(f"the parameters have dim {estimate.settings.dim}, the log has {served.settings.dim}")
    if served.settings.features != estimate.settings.features:
        raise InputError("the parameters and the log have different features of contexts or ads")
    if served.settings.repeats != estimate.settings.repeats:
        raise InputError("the parameters and the log differ in whether a session may show an arm twice")
    changed = replace(estimate.settings, **settings, **ALONE)
    if changed.horizon > served.settings.horizon:
        raise FailedError(
            f"a horizon of {changed.horizon} cannot be evaluated: version {served.version} of the log served at most "
            f"{served.settings.horizon} displays"
        )
    aligned = replace(
        estimate,
        arms=served.arms,
        model=align(estimate.model, estimate.arms, served.arms, settings=estimate.settings),
        answers=align_answers(estimate, served.arms, estimate.settings),
        guarded=False,
    )
    return under(changed, aligned)


# ── folded again ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _needs_folding(log: OrderedLog, change: Change) -> bool:
    """Return whether the changed settings give other versions, in a way that matters for planning."""
    return any(_gives_other_versions(known.settings, change.settings) for known in log.versions.known.values())


def _gives_other_versions(recorded: LearningSettings, changes: dict[str, Any]) -> bool:
    changed = replace(recorded, **changes)
    thresholds = ("policy", "bonus", "beta", "spread", "horizon") if policy_named(changed.policy).is_selective else ()
    if any(getattr(changed, name) != getattr(recorded, name) for name in ("estimator", *thresholds)):
        return True
    return changed.beta == "theory" and recorded.beta != "theory"


def fold_again(log: OrderedLog, settings: dict[str, Any]) -> dict[int, Parameters]:
    """Fold the journal of a log from version 0 under changed settings; raise `FailedError` if it is not complete."""
    if 0 not in log.versions.known:
        raise FailedError("folding again needs version 0 and the whole journal; the log lacks version 0")
    first = log.versions.read(0)
    made_under = log.versions.made_under(**settings)
    learner = Learner(replace(first.settings, **settings), first.arms, made_under=made_under)
    versions = {0: learner.current}
    expected = first.resume_offset
    for records in log.journal_pieces():
        if records[0][0] != expected:
            raise FailedError(f"folding again needs the whole journal; the log lacks its offset {expected}")
        expected += len(records)
        for made in learner.handle(records).versions:
            versions.setdefault(made.version, made)
    return versions
