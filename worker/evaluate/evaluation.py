"""What another policy would have earned on a log: reads it, plans it anew, and asks every estimator.

Which sessions each estimator rests on:

- `direct` on all sessions after the warm-up;
- `ips`, `snips` and `dr` on those whose slates were left to chance, so that they tell about other slates too: served
  under a `random_share` above 0 (all of these, not only those drawn: see `evaluate_support`), or by a policy that
  draws. If the target is the very policy that served, every session tells about it. If there are none, the sessions of
  the warm-up are used;
- `replay` on those of them that were drawn uniformly.

In the warm-up little is known yet, and what a policy makes of that says little about the policy; so its sessions are a
last resort, unless given parameters are evaluated: then they are as good as any. `direct` and `dr` use a model fitted
on all answered displays of the log, cross-fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worker.errors import FailedError, InputError
from worker.evaluate.estimators import METHODS, Estimate, direct, weighted
from worker.evaluate.intervals import Interval, interval
from worker.evaluate.logged import LoggedSessions
from worker.evaluate.model import Judges, judges
from worker.evaluate.planning import Assembled, assemble
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import Unsupported
from worker.evaluate.targets import Change, find_estimates
from worker.logs.findings import Findings
from worker.logs.ordered import OrderedLog
from worker.logs.stages import Stage, silent, ticking
from worker.stream.parameters import LearningSettings
from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What sessions earned as they were served."""

    sessions: int
    clicks: int
    revenue: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Every estimator's answer, and what they rest on.

    Parameters
    ----------
    target : settings of the policy evaluated; where nothing was changed, those of the newest version
    origin : how its estimates came about
    served : what the sessions earned that the target is evaluated on
    weighable : what those earned that tell about other slates too; None if there are none
    drawn : how many sessions of the log were drawn uniformly as a whole
    warmup : how many sessions of the log came in the warm-up
    model_clicks : clicks found, and clicks expected by models that had not seen them; None without a model
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
    model_clicks: tuple[int, float] | None
    notes: Sequence[str]


def evaluate_log(
    path: str,
    change: Change,
    *,
    methods: Sequence[str] = METHODS,
    confidence: float = 0.95,
    seed: int = 0,
    topics: Topics | None = None,
    skip_bad: bool = False,
    stage: Stage = silent,
) -> Evaluation:
    """Evaluate a changed policy on a log.

    Parameters
    ----------
    path : of the log, or ``-``
    change : how the target differs from what served
    methods : estimators to ask
    seed : of the folds, and of what the target draws, if it draws
    """
    findings = Findings()
    with OrderedLog(topics or Topics(), findings) as log:
        reader = log.read(path, skip_bad=skip_bad, stage=stage)
        if not log.versions.known:
            others = f" (its topics are {', '.join(sorted(log.others)[:3])}; see --prefix)" if log.others else ""
            raise InputError(f"{reader.name}: has no parameters{others}, which evaluation needs to plan slates")
        with stage("gathering sessions", len(log.traffic)) as bar:
            logged = LoggedSessions(log, ticking(log.entries(), bar))
        if not logged.by_version:
            reasons = ", ".join(f"{count} {reason}" for reason, count in logged.left_out.items())
            raise FailedError(f"{reader.name}: no session can be used ({reasons or 'there is none'})")
        with stage("planning", None):
            estimates, origin = find_estimates(log, change)
            assembled = assemble(logged.by_version, log.versions, estimates, change.settings, seed=seed)
        newest = change.parameters or log.versions.read(max(log.versions.known))
        notes = []
        if reader.bad:
            notes.append(f"{reader.bad} bad lines were passed over; the first: {reader.first_bad}")
        if findings.count:
            notes.append(f"{findings.count} records contradict others or are damaged (see adcascade replay)")
        if change.parameters is not None:
            notes.extend(_seen_before(change, log))
    evaluation = evaluate(
        assembled, given=change.parameters is not None, methods=methods, confidence=confidence, seed=seed
    )
    return replace(
        evaluation,
        target=replace(newest.settings, **change.settings),
        origin=origin,
        left_out={**logged.left_out, **evaluation.left_out},
        notes=[*notes, *evaluation.notes],
    )


def evaluate(assembled: Assembled, *, given: bool, methods: Sequence[str], confidence: float, seed: int) -> Evaluation:
    """Ask every estimator about sessions that are planned already; `given`: by parameters that do not change."""
    everything = assembled.sessions
    model = _fitted(everything, methods, seed)
    scope = np.ones(len(everything), dtype=bool) if given or assembled.warmup.all() else ~assembled.warmup
    weighable = assembled.supported & scope
    if not weighable.any():
        weighable = assembled.supported
    sessions, part = everything.part(scope), everything.part(weighable)
    estimates = []
    for method in methods:
        try:
            if method in ("direct", "dr") and isinstance(model, str):
                raise Unsupported(model)
            known = model if isinstance(model, Judges) else None
            if method == "direct" and known is not None:
                estimates.append(direct(sessions, known.part(scope), confidence=confidence))
            else:
                of_part = known.part(weighable) if known is not None else None
                estimates.append(weighted(part, of_part, method=method, confidence=confidence))
        except Unsupported as reason:
            used = len(sessions) if method == "direct" else int(part.drawn.sum()) if method == "replay" else len(part)
            estimates.append(Estimate(method=method, sessions=used, refused=str(reason)))
    return Evaluation(
        target=assembled.target,
        origin="as served",
        confidence=confidence,
        served=_served(sessions, confidence),
        weighable=_served(part, confidence) if len(part) else None,
        drawn=int(everything.drawn.sum()),
        warmup=int(assembled.warmup.sum()),
        versions=assembled.versions,
        left_out=assembled.left_out,
        estimates=estimates,
        model_clicks=(model.clicks, model.expected_clicks) if isinstance(model, Judges) else None,
        notes=_notes(scope, weighable),
    )


def _fitted(sessions: Sessions, methods: Sequence[str], seed: int) -> Judges | str | None:
    """Return the click models, or why there are none; None if nobody asks for them."""
    if not {"direct", "dr"} & set(methods):
        return None
    try:
        return judges(sessions, generator=np.random.default_rng(seed))
    except Unsupported as reason:
        return str(reason)


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
            f"direct is about {scope.sum()} sessions, the others about the {weighable.sum()} of them whose slates were "
            "left to chance: not the same sessions, so not to be compared"
        ]
    return [
        f"no slate was left to chance after the warm-up: direct is about {scope.sum()} later sessions, the others "
        f"about the {weighable.sum()} of the warm-up, when little was known. A random_share above 0 would change that"
    ]


def _seen_before(change: Change, log: OrderedLog) -> list[str]:
    """Say if the parameters to be evaluated have learned from the sessions that they are evaluated on."""
    given = change.parameters
    first = log.first_time
    if given is None or first is None or given.window_end is None or given.window_end <= first:
        return []
    return [
        f"version {given.version} has learned from windows up to {given.window_end}, some of which are in this log: "
        "what it would have earned there is overrated a little"
    ]
