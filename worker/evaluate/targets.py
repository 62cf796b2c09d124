"""What is evaluated: every session of the log as another policy would have served it, with what was known then.

The target of a session is the estimate that served it, planned by the changed settings; arms, prices and exclusions are
those in force at the time. So the answer is to "what if the policy had been swapped at that moment", not to "what if it
had run, and learned, from the start". Three ways to get the estimate:

- *as served*: that of the version which served the session;
- *folded again*: with another estimator, or where exploration depends on how versions are made (`aucbbp` thresholds,
  β "theory"), the journal of the log is folded again from version 0 under the changed settings, with the slates and
  answers that it has. A session gets the newest of these versions that was in force at its arrival. Each version
  rests on earlier sessions only, so no session judges an estimate that has seen it;
- *given*: one version from a file, for every session. If it has learned from this log, its value is overrated a little.

The target itself neither warms up nor draws a share of sessions at random: the policy alone is evaluated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from worker.bandit.model import Posterior
from worker.bandit.precision import Precision
from worker.errors import FailedError, InputError
from worker.logs.ordered import OrderedLog
from worker.stream.catalogue import under
from worker.stream.learner import Learner
from worker.stream.parameters import Arm, LearningSettings, Parameters

CHUNK = 1024  # journal records folded at once


#: The estimate that the target plans by, for a session that a version served and that arrived at some time.
Estimates: TypeAlias = Callable[[Parameters, int], Parameters]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different from how the log was served; None and empty: nothing."""

    settings: dict[str, Any] = field(default_factory=dict)
    parameters: Parameters | None = None


def find_estimates(log: OrderedLog, change: Change) -> tuple[Estimates, str]:
    """Return the target's estimates, and how they came about, in words."""
    given = change.parameters
    if given is not None:
        changed = replace(given.settings, **change.settings)
        if changed.beta == "theory" and not (given.settings.beta == "theory" and given.radius):
            raise InputError("--beta theory: the parameters were not made under it and do not say what it stands for")
        return (lambda served, time: given), f"version {given.version} of the file, for every session"
    if _needs_folding(log, change):
        versions = fold_again(log, change.settings)
        return _in_force(versions), f"folded again from the journal, {len(versions)} versions"
    return (lambda served, time: served), "as served"


def planned_by(estimate: Parameters, served: Parameters, settings: dict[str, Any]) -> Parameters:
    """Return the policy of changed settings on an estimate, with the arms and prices of the version that served."""
    if served.settings.dim != estimate.settings.dim:
        raise InputError(f"the parameters have dim {estimate.settings.dim}, the log has {served.settings.dim}")
    if served.settings.repeats != estimate.settings.repeats:
        raise InputError("the parameters and the log differ in whether a session may show an arm twice")
    changed = replace(estimate.settings, **settings, warmup=0, random_share=0.0)
    if changed.horizon > served.settings.horizon:
        raise FailedError(
            f"a horizon of {changed.horizon} cannot be evaluated: version {served.version} of the log was served with "
            f"{served.settings.horizon}, and nobody saw more"
        )
    aligned = replace(
        estimate,
        arms=served.arms,
        posterior=align(estimate.posterior, estimate.arms, served.arms, ridge=estimate.settings.ridge),
    )
    return under(changed, aligned)


def align(posterior: Posterior, known: Sequence[Arm], wanted: Sequence[Arm], *, ridge: float) -> Posterior:
    """Return what is believed about `wanted` arms: at the prior where they are not known; others are integrated out."""
    names = [arm.arm for arm in known]
    if names == [arm.arm for arm in wanted]:
        return posterior
    places = {name: place for place, name in enumerate(names)}
    new = sum(arm.arm not in places for arm in wanted)
    grown = posterior.with_arms(new, ridge=ridge) if new else posterior
    fresh = iter(range(len(names), len(names) + new))
    chosen = [places[arm.arm] if arm.arm in places else next(fresh) for arm in wanted]
    gone = sorted(set(range(len(names))) - set(chosen))
    precision = grown.precision
    lost = precision.centres[gone].T @ precision.cross[gone]
    return Posterior(
        theta_context=grown.theta_context,
        theta_arms=grown.theta_arms[chosen],
        precision=Precision(
            context=precision.context - (lost + lost.T) / 2 if gone else precision.context,
            cross=precision.cross[chosen],
            arms=precision.arms[chosen],
        ),
    )


# ── folded again ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _needs_folding(log: OrderedLog, change: Change) -> bool:
    """Say whether the changed settings would have made other versions, in a way that planning depends on."""
    return any(_made_otherwise(known.settings, change.settings) for known in log.versions.known.values())


def _made_otherwise(recorded: LearningSettings, changes: dict[str, Any]) -> bool:
    changed = replace(recorded, **changes)
    thresholds = ("policy", "bonus", "beta", "horizon") if changed.policy == "aucbbp" else ()
    if any(getattr(changed, name) != getattr(recorded, name) for name in ("estimator", *thresholds)):
        return True
    return changed.beta == "theory" and recorded.beta != "theory"


def fold_again(log: OrderedLog, settings: dict[str, Any]) -> list[Parameters]:
    """Fold the journal of a log from version 0 under changed settings; raise `FailedError` if it is not complete."""
    zero = log.versions.known.get(0)
    if zero is None:
        raise FailedError("folding again needs version 0 and the journal from its beginning; the log has not version 0")
    first = log.versions.read(0)
    made_under = {number: replace(known.settings, **settings) for number, known in log.versions.known.items()}
    learner = Learner(replace(first.settings, **settings), first.arms, made_under=made_under)
    versions = {0: learner.current}
    records = log.journal_records()
    expected = first.resume_offset
    while chunk := list(islice(records, CHUNK)):
        for offset, _ in chunk:
            if offset != expected:
                raise FailedError(f"folding again needs the whole journal; the log lacks its offset {expected}")
            expected += 1
        for made in learner.handle(chunk).versions:
            versions.setdefault(made.version, made)
    return [versions[number] for number in sorted(versions)]


def _in_force(versions: Sequence[Parameters]) -> Estimates:
    # `effective_at` does not always rise with the version, so the newest so far is kept beside each.
    ordered = sorted(versions, key=lambda version: (version.effective_at, version.version))
    starts = [version.effective_at for version in ordered]
    newest: list[Parameters] = []
    for version in ordered:
        newest.append(max(version, newest[-1], key=lambda known: known.version) if newest else version)
    return lambda served, time: newest[max(bisect_right(starts, time) - 1, 0)]
