"""`adcascade evaluate`: the revenue of another policy on a recorded log."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Final

from worker.bandit.policies import POLICIES, EpsilonGreedy, Fixed
from worker.cli.options.brokers import PREFIX
from worker.cli.options.learning import check_fixed, setting
from worker.cli.options.parser import JSON, CommandSpec, Option, number
from worker.cli.options.target import read_version
from worker.console import note, table, write_result
from worker.errors import InputError
from worker.evaluate.estimators import Estimate
from worker.evaluate.evaluation import Evaluation, evaluate_log
from worker.evaluate.intervals import ConfidenceInterval
from worker.evaluate.planning import Change
from worker.stream.features import listed
from worker.stream.topology import Topics

#: Settings of the target.
CHANGES: Final = tuple(
    setting(name, default=None, help=f"{setting(name).help} (default: as served)")
    for name in ("policy", "order", "bonus", "beta", "spread", "epsilon")
)

OPTIONS = (
    Option(
        "log", "recorded log: JSON lines as `kcat -J` writes them, also gzipped; - for standard input", positional=True
    ),
    *CHANGES,
    Option(
        "parameters", "one version of the parameters for all sessions, instead of those that served", metavar="FILE"
    ),
    Option("confidence", "confidence level of the intervals", parse=number(above=0, below=1), default=0.95),
    PREFIX,
    Option("skip-bad", "whether unreadable lines are skipped and counted", flag=True, default=False),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Evaluate a policy; exit 1 if no estimator has an answer."""
    evaluation = evaluate_log(
        options.log,
        _change(options),
        confidence=options.confidence,
        topics=Topics(options.prefix),
        skip_bad=options.skip_bad,
    )
    notes = [f"note: {text}" for text in evaluation.notes]
    write_result(options.json, as_json(evaluation, options.log), report(evaluation), notes)
    if any(estimate.refused is None for estimate in evaluation.estimates):
        return 0
    for estimate in evaluation.estimates:
        note(f"adcascade: {estimate.method} has no answer: {estimate.refused}")
    return 1


def _change(options: argparse.Namespace) -> Change:
    given = {option.attribute: getattr(options, option.attribute) for option in CHANGES}
    check_fixed(options)
    if options.epsilon is not None and options.policy not in (None, EpsilonGreedy.name):
        raise InputError("--epsilon is for --policy epsilon-greedy only")
    return Change(
        settings={name: value for name, value in given.items() if value is not None},
        parameters=options.parameters and read_version(options.parameters, "--parameters", complete=False),
    )


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(evaluation: Evaluation, log: str) -> dict[str, Any]:
    """Return the evaluation in its JSON form."""
    document, features, check = asdict(evaluation), evaluation.target.features, evaluation.check
    target = {"estimate": document.pop("origin"), **document["target"]}
    target["features"] = None if features is None else features.document()
    passed = None if check is None else {"passed": check.passed, **document["check"]}
    return {"log": log, **document, "target": target, "check": passed}


def report(evaluation: Evaluation) -> str:
    """Return a table of the answers, and the reasons for missing ones."""
    percent = f"{100 * evaluation.confidence:.4g} %"
    rows = [_row("as served", evaluation.served.revenue, None, evaluation.served.sessions, "")]
    rows.extend(
        _row(e.method, e.revenue, e.difference, e.sessions, _basis(e)) for e in evaluation.estimates if e.revenue
    )
    lines = [
        _title(evaluation),
        "",
        table(["per session", "revenue", f"{percent} interval", "against served", "sessions", "rests on"], rows),
    ]
    more = [f"{e.method} has no answer: {e.refused}" for e in evaluation.estimates if e.refused is not None]
    more += [f"left out: {count} sessions, {reason}" for reason, count in evaluation.left_out.items()]
    more += [f"note: {text}" for text in evaluation.notes]
    return "\n".join([*lines, "", *more] if more else lines)


def _title(evaluation: Evaluation) -> str:
    target = evaluation.target
    policy = POLICIES[target.policy]
    explored = f", ε = {target.epsilon:g}" if policy is EpsilonGreedy else ""
    if policy.has_bonus[0]:
        explored = f", {target.bonus} bonus, β = {target.beta}"
    if policy is Fixed:
        explored = f", {listed(target.order, 5)} first" if target.order else ", the order of the catalogue"
    origin = f"; its estimates: {evaluation.origin}" if policy.uses_model else ""
    return (
        f"{target.policy}{explored}, up to {target.horizon} displays{origin}\n"
        f"{evaluation.served.sessions} sessions evaluated, {evaluation.versions} versions; in the log, "
        f"{evaluation.drawn} sessions were drawn uniformly, {evaluation.warmup} came in the warm-up"
    )


def _row(
    name: str, revenue: ConfidenceInterval, difference: ConfidenceInterval | None, sessions: int, basis: str
) -> list[str]:
    gained = ""
    if difference is not None:
        gained = f"{difference.estimate:+z.4f} ({difference.low:+z.4f} … {difference.high:+z.4f})"
    interval = f"{revenue.low:.4f} … {revenue.high:.4f}"
    return [name, f"{revenue.estimate:.4f}", interval, gained, str(sessions), basis]


def _basis(estimate: Estimate) -> str:
    if estimate.matching is None:
        return f"the click model, {estimate.clicks:.0f} clicks"
    rest = f"; positions 1–{estimate.positions}, then the model" if estimate.positions < estimate.of_positions else ""
    return f"{estimate.matching} matching, {estimate.clicks:.0f} clicks{rest}"


SUMMARY: Final = """\
The revenue per session of another policy on a recorded log. The target plans every session again,
with the estimate of the version that served it: as if the policy had been swapped at that time.
Three estimators:

  snips   sessions whose slates were left to chance and that show the target's ads, weighted by
          how likely these were
  direct  click models fitted on other sessions of the log: precise, but wrong if the model is
  dr      the click models, corrected by weighted sessions: right even if the model is wrong

Sessions are left to chance in the warm-up, under a random_share above 0, and by policies that
draw. An estimator with too few of them has no answer and gives the reason. The unit of the
intervals is the session. The interval of direct assumes that the form of the model is right: a note
says if the sessions drawn uniformly contradict it, or are too few to tell.
"against served" is the difference to the revenue of the same sessions as they were served.
In an imported log, sessions are left to chance if their first propensity is below 1. Without such
sessions, weights have an answer for the order that every session shows, and direct for targets whose
ads were seen at the same positions; policies other than fixed and random need --parameters.
For settings that change what is learned: adcascade replay --relearn --output FILE, then --parameters.
Exit 1 if no estimator has an answer."""

COMMAND = CommandSpec(
    name="evaluate",
    summary=SUMMARY,
    examples=(
        "adcascade evaluate demo.jsonl.gz --policy greedy",
        "adcascade evaluate demo.jsonl.gz --policy ucbbp --beta 0.5 --json -",
        "adcascade evaluate history.gz --policy fixed --order shoes,hats",
        "adcascade evaluate demo.jsonl.gz --parameters version-12.json --confidence 0.9",
    ),
    options=OPTIONS,
    run=run,
)
