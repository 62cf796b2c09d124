"""Off-policy evaluation of a log: read it, plan its sessions for the target, apply the estimators.

`direct` uses all sessions after the warm-up, in which every policy has poor estimates. Where all sessions have the same
estimate or need none, those of the warm-up count as well. `snips` and `dr` use the sessions of these whose slates were
left to chance: served under a `random_share` above 0 (all of these, not only those drawn), by a policy that draws, or
by the target itself. Of an imported log, see `worker.evaluate.planning`. `direct` and `dr` use click models that are
cross-fitted on all displays of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final

from worker.bandit.policies import POLICIES
from worker.errors import FailedError, InputError
from worker.evaluate.calibration import ModelCheck, check_model
from worker.evaluate.estimators import METHODS, Estimate, direct, doubly_robust, snips
from worker.evaluate.intervals import ConfidenceInterval, interval
from worker.evaluate.model import CrossFit, cross_fit, unseen
from worker.evaluate.planning import Assembled, Change, assemble
from worker.evaluate.sessions import Bools, LoggedSessions, Sessions
from worker.evaluate.support import Unsupported, Weighted, weigh
from worker.logs.findings import Findings
from worker.logs.ordered import OrderedLog, read_log
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings, check_order
from worker.stream.topology import Topics

#: Largest share of the target's displays with arms that no session of the log has seen, for `direct`.
MOST_UNSEEN: Final = 0.01


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
    drawn : number of sessions of the log that were drawn uniformly as a whole
    warmup : number of sessions of the log in the warm-up
    check : the click models against the sessions drawn uniformly; None without a model
    """

    target: LearningSettings
    origin: str
    confidence: float
    served: Served
    drawn: int
    warmup: int
    versions: int
    left_out: Mapping[str, int]
    estimates: Sequence[Estimate]
    check: ModelCheck | None
    notes: Sequence[str]


def evaluate_log(
    path: str,
    change: Change,
    *,
    confidence: float = 0.95,
    topics: Topics | None = None,
    skip_bad: bool = False,
) -> Evaluation:
    """Evaluate a changed policy on a log."""
    findings, given = Findings(), change.parameters
    with read_log(path, findings, topics=topics, skip_bad=skip_bad) as log:
        if not log.versions.known:
            raise InputError(f"{log.name}: has no parameters, which evaluation needs to plan slates")
        logged = LoggedSessions(log)
        if not logged.by_version:
            reasons = ", ".join(f"{count} {reason}" for reason, count in logged.left_out.items())
            raise FailedError(f"{log.name}: no session can be used ({reasons or 'there is none'})")
        target = _target(log, logged, change)
        assembled = assemble(logged.by_version, log.versions, change)
    everything = assembled.sessions
    alike = given is not None or not POLICIES[target.policy].uses_model or everything.warmup.all()
    scope = ~everything.warmup | alike
    estimates, check = _estimates(assembled, scope, confidence, imported=logged.imported)
    origin = "as served" if given is None else f"version {given.version} of the file, for every session"
    flaws = {
        f"{log.bad_lines} bad lines skipped; the first: {log.first_bad}": log.bad_lines,
        f"{findings.count} records contradict others or are damaged (see adcascade replay)": findings.count,
    }
    notes = [text for text, applies in flaws.items() if applies]
    return Evaluation(
        target=target,
        origin=origin,
        confidence=confidence,
        served=_served(everything.part(scope), confidence),
        drawn=int(everything.drawn.sum()),
        warmup=int(everything.warmup.sum()),
        versions=len(logged.by_version),
        left_out=dict(logged.left_out),
        estimates=estimates,
        check=check,
        notes=[*notes, *_seen_before(given, log.first_time), *_parts(estimates), *doubts(check)],
    )


def _target(log: OrderedLog, logged: LoggedSessions, change: Change) -> LearningSettings:
    """Return the settings of the target; raise `InputError` if it needs estimates and the sessions are imported."""
    newest, name = change.parameters or log.versions.read(max(log.versions.known)), log.name
    check_order(change.settings.get("order", ()), newest.arms)
    target = change.target(newest).settings
    if logged.imported and change.parameters is None and POLICIES[target.policy].uses_model:
        raise InputError(
            f"{name}: an imported log has no estimates for the policy {target.policy}: give --policy fixed or random, "
            f"or --parameters FILE, which adcascade replay {name} --relearn --output FILE writes"
        )
    return target


def _estimates(
    assembled: Assembled, scope: Bools, confidence: float, *, imported: bool
) -> tuple[list[Estimate], ModelCheck | None]:
    """Apply the estimators to the sessions that each can use, and check the click models if there are any."""
    everything, rows = assembled.sessions, assembled.sessions.supported & scope

    @cache
    def fit() -> CrossFit:
        return cross_fit(everything, assembled.prior)

    @cache
    def weighted() -> Weighted:
        if assembled.unsupported and not rows.any():
            raise Unsupported(assembled.unsupported)
        return weigh(everything.part(rows))

    def by_model() -> Estimate:
        sessions, where = everything.part(scope), " at that position" if imported else ""
        if (share := unseen(sessions, anywhere=not imported)) > MOST_UNSEEN:
            raise Unsupported(
                f"{share:.0%} of the target's displays are arms that no session of the log has seen{where}"
            )
        return direct(sessions, fit().part(scope), confidence=confidence)

    answers: dict[str, Callable[[], Estimate]] = {
        "snips": lambda: snips(weighted(), confidence=confidence),
        "direct": by_model,
        "dr": lambda: doubly_robust(weighted(), fit().part(rows), confidence=confidence),
    }
    estimates, check = [], None
    for method in METHODS:
        try:
            estimates.append(answers[method]())
        except Unsupported as reason:
            used = scope if method == "direct" else rows
            estimates.append(Estimate(method=method, sessions=int(used.sum()), refused=str(reason)))
    with suppress(Unsupported):
        check = check_model(everything, fit())
    return estimates, check


def _served(sessions: Sessions, confidence: float) -> Served:
    earned = sessions.earned
    mean = float(earned.mean())
    return Served(
        sessions=len(sessions),
        clicks=int(sessions.clicked.sum()),
        revenue=interval(mean, earned - mean, confidence=confidence),
    )


# ── notes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def doubts(check: ModelCheck | None) -> list[str]:
    """Return a warning if the model is wrong on random sessions, or if they are too few."""
    if check is None or check.passed:
        return []
    if check.passed is None:
        return [
            f"not enough random sessions to check the click model ({check.sessions} were drawn uniformly): "
            "direct, which rests on it alone, may be wrong beyond its interval"
        ]
    reasons = [f"{group.group}: observed / expected revenue {group.ratio:.2f}" for group in check.groups]
    return [
        f"WARNING: the click model is wrong on random sessions ({'; '.join(reasons)}): "
        "do not trust direct, nor dr where it rests on the model"
    ]


def _parts(estimates: Sequence[Estimate]) -> list[str]:
    """Return a note if weights have an answer, and for a part of the sessions."""
    used = max((estimate.sessions for estimate in estimates if estimate.matching is not None), default=0)
    every = max(estimate.sessions for estimate in estimates)
    if not 0 < used < every:
        return []
    return [
        f"snips and dr use the {used} of {every} sessions whose slates were left to chance: an answer for all "
        "users only if these were chosen by lot"
    ]


def _seen_before(given: Parameters | None, first: int | None) -> list[str]:
    """Return a note if the given parameters have learned from sessions of this log."""
    if given is None or first is None or given.window_end is None or given.window_end <= first:
        return []
    return [
        f"version {given.version} has learned from windows up to {given.window_end}, and this log has some of them: "
        "its revenue is slightly overestimated"
    ]
