"""Off-policy evaluation of a log: read it, plan its sessions for the target, apply the estimators.

The sessions of each estimator:

- `direct` uses all sessions after the warm-up.
- `ips`, `snips` and `dr` use those of them whose slates were left to chance: served under a `random_share` above 0 (all
  of these, not only those drawn, see `worker.evaluate.support`), or by a policy that draws. If the target is the policy
  that served, they use every session. If there are none, they use the sessions of the warm-up. Of an imported log, see
  `worker.evaluate.imported`.
- `replay` uses those of them that were drawn uniformly.

In the warm-up every policy has poor estimates, so its sessions are a last resort. For given parameters, they are as
good as any. `direct` and `dr` use click models that are cross-fitted on all displays of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.click_model import ClickModel
from worker.bandit.policies import policy_named
from worker.errors import FailedError, InputError
from worker.evaluate.calibration import ModelCheck, check_model
from worker.evaluate.estimators import METHODS, Estimate, MatchingReplay, OffPolicyEstimator
from worker.evaluate.intervals import ConfidenceInterval, interval
from worker.evaluate.logged import CONTRADICTS, LoggedSessions
from worker.evaluate.model import CrossFit, cross_fit
from worker.evaluate.planning import Assembled, assemble
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported, sufficient
from worker.evaluate.targets import Change, find_estimates
from worker.logs.findings import Findings, Stage, silent
from worker.logs.format import LogReader
from worker.logs.ordered import OrderedLog, read_log
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings, check_order
from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The revenue of sessions as they were served."""

    sessions: int
    clicks: int
    revenue: ConfidenceInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The answers of all estimators, and their data.

    target : settings of the policy evaluated; unchanged ones are those of the newest version
    origin : source of its estimates
    served : revenue of the sessions that the target is evaluated on
    weighable : revenue of those whose slates were left to chance; None if there are none
    drawn : number of sessions of the log that were drawn uniformly as a whole
    warmup : number of sessions of the log in the warm-up
    model : kind of click model that `direct` and `dr` use
    model_clicks : number of clicks, and the number expected by models fitted on other sessions; None without a model
    check : these models against the sessions drawn uniformly; None without a model
    """

    target: LearningSettings
    origin: str
    confidence: float
    served: Served
    weighable: Served | None
    drawn: int
    warmup: int
    versions: int
    left_out: Mapping[str, int]
    estimates: Sequence[Estimate]
    model: str
    model_clicks: tuple[int, float] | None
    check: ModelCheck | None
    notes: Sequence[str]


def evaluate_log(
    path: str,
    change: Change,
    *,
    methods: Sequence[str] = tuple(METHODS),
    confidence: float = 0.95,
    seed: int = 0,
    topics: Topics | None = None,
    skip_bad: bool = False,
    stage: Stage = silent,
) -> Evaluation:
    """Evaluate a changed policy on a log; `seed` is for cross-fitting and for a target that draws."""
    findings = Findings()
    with read_log(path, findings, topics=topics, skip_bad=skip_bad, stage=stage) as log:
        reader = log.reader
        if not log.versions.known:
            raise InputError(f"{reader.name}: has no parameters, which evaluation needs to plan slates")
        logged = LoggedSessions(log)
        if not logged.by_version:
            reasons = ", ".join(f"{count} {reason}" for reason, count in logged.left_out.items())
            raise FailedError(f"{reader.name}: no session can be used ({reasons or 'there is none'})")
        target = _target(log, logged, change)
        with stage("planning", None):
            estimates, origin = find_estimates(log, change)
            assembled = assemble(logged.by_version, log.versions, estimates, change.settings, seed=seed)
    notes = _flaws(reader, findings, logged)
    if assembled.contradicting:
        logged.left_out[CONTRADICTS] = assembled.contradicting
    everything, given = assembled.sessions, change.parameters
    scope = np.ones(len(everything), dtype=bool) if given or assembled.warmup.all() else ~assembled.warmup
    weighable = assembled.supported & scope
    if not weighable.any():
        weighable = assembled.supported
    fit: CrossFit | Unsupported | None = None
    if any(METHODS[method].needs_model for method in methods):
        fit = _fit(everything, assembled.prior, seed)
    check = check_model(everything, fit, confidence=confidence) if isinstance(fit, CrossFit) else None
    return Evaluation(
        target=target,
        origin=origin,
        confidence=confidence,
        served=_served(everything.part(scope), confidence),
        weighable=_served(everything.part(weighable), confidence) if weighable.any() else None,
        drawn=int(everything.drawn.sum()),
        warmup=int(assembled.warmup.sum()),
        versions=len(logged.by_version),
        left_out=logged.left_out,
        estimates=[_estimate(METHODS[m], assembled, scope, weighable, fit, confidence) for m in methods],
        model=assembled.prior.name,
        model_clicks=(fit.clicks, float(fit.chances[everything.shown].sum())) if isinstance(fit, CrossFit) else None,
        check=check,
        notes=[*notes, *_seen_before(given, log.first_time), *_notes(scope, weighable), *doubts(check)],
    )


def _estimate(
    estimator: OffPolicyEstimator,
    assembled: Assembled,
    scope: Bools,
    weighable: Bools,
    fit: CrossFit | Unsupported | None,
    confidence: float,
) -> Estimate:
    """Apply an estimator to the sessions that it can use, or return why it has no answer."""
    everything, rows = assembled.sessions, weighable if estimator.needs_chance else scope
    used = everything.part(rows)
    try:
        if estimator.needs_chance and assembled.unsupported and not rows.any():
            raise Unsupported(assembled.unsupported)
        if estimator.needs_model and isinstance(fit, Unsupported):
            raise fit
        models = fit.part(rows) if isinstance(fit, CrossFit) else None
        return estimator.estimate(used, models, confidence=confidence)
    except Unsupported as reason:
        advice = ""
        if estimator.needs_chance and everything.clicked.sum() >= LEAST_CLICKS:  # users click at all
            drawn_only = estimator.name == MatchingReplay.name
            advice = (
                f"; {sufficient(everything.part(scope), first_position=estimator.needs_model, drawn_only=drawn_only)}"
            )
        return Estimate(method=estimator.name, sessions=estimator.usable(used), refused=f"{reason}{advice}")


def _target(log: OrderedLog, logged: LoggedSessions, change: Change) -> LearningSettings:
    """Return the settings of the target; raise `InputError` if it needs estimates and the sessions are imported."""
    newest, name = change.parameters or log.versions.read(max(log.versions.known)), log.reader.name
    check_order(change.settings.get("order", ()), newest.arms)
    target = replace(newest.settings, **change.settings)
    imported = any(session.mode == "imported" for session in logged.by_version.get(0, ()))
    if imported and change.parameters is None and policy_named(target.policy).uses_model:
        raise InputError(
            f"{name}: an imported log has no estimates for the policy {target.policy}: give --policy fixed or random, "
            f"or --parameters FILE, which adcascade replay {name} --relearn --output FILE writes"
        )
    return target


def _flaws(reader: LogReader, findings: Findings, logged: LoggedSessions) -> list[str]:
    """Return what is wrong with the log, or not in it."""
    texts = {
        f"{reader.bad} bad lines skipped; the first: {reader.first_bad}": reader.bad,
        f"{findings.count} records contradict others or are damaged (see adcascade replay)": findings.count,
    }
    return [text for text, applies in texts.items() if applies]


def _fit(sessions: Sessions, prior: ClickModel, seed: int) -> CrossFit | Unsupported:
    """Return the cross-fitted click models, or the reason why there are none."""
    try:
        return cross_fit(sessions, prior=prior, generator=np.random.default_rng(seed))
    except Unsupported as reason:
        return reason


def doubts(check: ModelCheck | None) -> list[str]:
    """Return a warning if the model is wrong on random sessions, or if they are too few."""
    if check is None:
        return []
    if check.passed is None:
        return [
            f"not enough random sessions to check the click model ({check.sessions} were drawn uniformly): "
            "direct, which rests on it alone, may be wrong beyond its interval"
        ]
    if check.passed:
        return []
    reasons = [f"{group.group}: observed / expected revenue {group.ratio:.2f}" for group in check.failed]
    if check.form_failed:
        reasons.append("its errors depend on ad and features")
    return [
        f"WARNING: the click model is wrong on random sessions ({'; '.join(reasons)}): "
        "do not trust direct, nor dr where it rests on the model"
    ]


def _served(sessions: Sessions, confidence: float) -> Served:
    mean = float(sessions.earned.mean())
    return Served(
        sessions=len(sessions),
        clicks=int((sessions.earned > 0).sum()),
        revenue=interval(mean, sessions.earned - mean, confidence=confidence),
    )


def _notes(scope: Bools, weighable: Bools) -> list[str]:
    if not weighable.any() or (scope == weighable).all():
        return []
    if (scope & weighable).any():
        return [
            f"direct uses {scope.sum()} sessions, the others the {weighable.sum()} of them whose slates were left to "
            "chance: do not compare them with each other"
        ]
    return [
        f"no slate was left to chance after the warm-up: direct uses {scope.sum()} later sessions, the others the "
        f"{weighable.sum()} of the warm-up, with poor estimates. A random_share above 0 avoids this"
    ]


def _seen_before(given: Parameters | None, first: int | None) -> list[str]:
    """Return a note if the given parameters have learned from sessions of this log."""
    if given is None or first is None or given.window_end is None or given.window_end <= first:
        return []
    return [
        f"version {given.version} has learned from windows up to {given.window_end}, and this log has some of them: "
        "its revenue is slightly overestimated"
    ]
