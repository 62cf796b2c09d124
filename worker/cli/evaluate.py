"""`adcascade evaluate`: the revenue of another policy on a recorded log."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from worker.bandit.policies import EpsilonGreedy, Fixed, policy_named
from worker.cli.options.brokers import PREFIX
from worker.cli.options.learning import check_fixed, setting
from worker.cli.options.parser import JSON, CommandSpec, Option, count, number
from worker.cli.options.target import read_version
from worker.console import listing, note, progress, table, write_result
from worker.errors import InputError
from worker.evaluate.calibration import ModelCheck
from worker.evaluate.estimators import METHODS, Estimate
from worker.evaluate.evaluation import Evaluation, evaluate_log
from worker.evaluate.intervals import ConfidenceInterval
from worker.evaluate.targets import Change
from worker.stream.features import listed
from worker.stream.topology import Topics

#: Settings of the target.
CHANGES: Final = tuple(
    setting(name, default=None, help=f"{setting(name).help} (default: as served)")
    for name in ("policy", "order", "bonus", "beta", "spread", "epsilon", "estimator", "horizon")
)

OPTIONS = (
    Option(
        "log", "recorded log: JSON lines as `kcat -J` writes them, also gzipped; - for standard input", positional=True
    ),
    *CHANGES,
    Option(
        "parameters", "one version of the parameters for all sessions, instead of those that served", metavar="FILE"
    ),
    Option(
        "method",
        "estimator of the revenue; repeatable; exit 1 if one of them has no answer (default: all)",
        choices=tuple(METHODS),
        repeatable=True,
        default=(),
    ),
    Option("confidence", "confidence level of the intervals", parse=number(above=0, below=1), default=0.95),
    count("seed", "random seed for cross-fitting and for a target that draws", 0, least=0),
    PREFIX,
    Option("skip-bad", "whether unreadable lines are skipped and counted", flag=True, default=False),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Evaluate a policy; exit 1 if no estimator, or not every one of --method, has an answer."""
    change = _change(options)
    evaluation = evaluate_log(
        options.log,
        change,
        methods=[method for method in METHODS if not options.method or method in options.method],
        confidence=options.confidence,
        seed=options.seed,
        topics=Topics(options.prefix),
        skip_bad=options.skip_bad,
        stage=partial(progress, unit="records"),
    )
    notes = [f"note: {text}" for text in evaluation.notes]
    write_result(options.json, as_json(evaluation, options), report(evaluation), notes)
    refused = [estimate for estimate in evaluation.estimates if estimate.refused is not None]
    if refused and (options.method or len(refused) == len(evaluation.estimates)):
        for estimate in refused:
            note(f"adcascade: {estimate.method} has no answer: {estimate.refused}")
        return 1
    return 0


def _change(options: argparse.Namespace) -> Change:
    given = {option.attribute: getattr(options, option.attribute) for option in CHANGES}
    settings = {name: value for name, value in given.items() if value is not None}
    check_fixed(options)
    if options.epsilon is not None and options.policy not in (None, EpsilonGreedy.name):
        raise InputError("--epsilon is for --policy epsilon-greedy only")
    if options.parameters is None:
        return Change(settings=settings)
    if options.estimator is not None:
        raise InputError("--estimator and --parameters contradict each other: given parameters are not folded again")
    return Change(settings=settings, parameters=read_version(options.parameters, "--parameters", complete=False))


# ── for machines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(evaluation: Evaluation, options: argparse.Namespace) -> dict[str, Any]:
    """Return the evaluation in its JSON form."""
    found = evaluation.model_clicks
    features = evaluation.target.features
    target = {**asdict(evaluation.target), "features": None if features is None else features.document()}
    return {
        "log": options.log,
        "target": {"estimate": evaluation.origin, **target},
        "confidence": evaluation.confidence,
        "seed": options.seed,
        "sessions": evaluation.served.sessions,
        "drawn": evaluation.drawn,
        "warmup": evaluation.warmup,
        "versions": evaluation.versions,
        "left_out": dict(evaluation.left_out),
        "served": asdict(evaluation.served),
        "weighable": None if evaluation.weighable is None else asdict(evaluation.weighable),
        "model": None if found is None else {"kind": evaluation.model, "clicks": found[0], "expected_clicks": found[1]},
        "model_check": None if evaluation.check is None else _check_as_json(evaluation.check),
        "estimates": [asdict(estimate) for estimate in evaluation.estimates],
        "notes": list(evaluation.notes),
    }


def _check_as_json(check: ModelCheck) -> dict[str, Any]:
    return {
        "sessions": check.sessions,
        "passed": check.passed,
        "failed": [group.group for group in check.failed],
        "form_z": check.form_z,
        "groups": [asdict(group) for group in check.groups],
    }


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def report(evaluation: Evaluation) -> str:
    """Return a table of the answers, and the reasons for missing ones."""
    percent = f"{100 * evaluation.confidence:.4g} %"
    rows = [_row("as served", evaluation.served.revenue, None, evaluation.served.sessions, "")]
    some = evaluation.weighable
    if some is not None and some != evaluation.served:
        rows.append(_row("as served, by chance", some.revenue, None, some.sessions, ""))
    rows.extend(
        _row(e.method, e.revenue, e.difference, e.sessions, _basis(e, evaluation.model))
        for e in evaluation.estimates
        if e.revenue
    )
    lines = [
        _title(evaluation),
        "",
        table(["per session", "revenue", f"{percent} interval", "against served", "sessions", "rests on"], rows),
    ]
    if evaluation.check is not None and evaluation.check.groups:
        lines += ["", _check_table(evaluation.check, percent)]
    refused = [f"{e.method} has no answer: {e.refused}" for e in evaluation.estimates if e.refused is not None]
    left_out = [f"left out: {count} sessions, {reason}" for reason, count in evaluation.left_out.items()]
    notes = [f"note: {text}" for text in evaluation.notes]
    more = [*refused, *left_out, *notes]
    return "\n".join([*lines, "", *more] if more else lines)


def _check_table(check: ModelCheck, percent: str) -> str:
    columns = {
        f"the click model on {check.sessions} random sessions": "{group}",
        "displays": "{displays}",
        "clicks": "{clicks}",
        "expected": "{expected_clicks:.0f}",
        "revenue/expected": "{ratio:.3f}",
        f"{percent} interval": "{low:.3f} … {high:.3f}",
        "z": "{z:+.1f}{mark}",
    }
    groups = [
        {**asdict(group), "ratio": group.ratio, "mark": " !" if group in check.failed else ""} for group in check.groups
    ]
    if check.form_z is not None:
        nothing = dict.fromkeys(("displays", "clicks", "expected_clicks", "ratio", "low", "high"))
        mark = " !" if check.form_failed else ""
        groups.append({**nothing, "group": "arms × features", "z": check.form_z, "mark": mark})
    return listing(columns, groups)


def _title(evaluation: Evaluation) -> str:
    target = evaluation.target
    policy = policy_named(target.policy)
    explored = f", ε = {target.epsilon:g}" if policy is EpsilonGreedy else ""
    if policy.has_bonus[0]:
        explored = f", {target.bonus} bonus, β = {target.beta}"
    if policy is Fixed:
        explored = f", {listed(target.order, 5)} first" if target.order else ", the order of the catalogue"
    estimator, origin = f", {target.estimator} estimator", f"; its estimates: {evaluation.origin}"
    if not policy.uses_model:
        estimator = origin = ""
    return (
        f"{target.policy}{explored}{estimator}, up to {target.horizon} displays{origin}\n"
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


def _basis(estimate: Estimate, model: str) -> str:
    estimator = METHODS[estimate.method]
    if not estimator.needs_chance:
        return f"the {model} model, {estimate.clicks:.0f} clicks"
    text = f"{estimate.matching} matching, {estimate.clicks:.0f} clicks"
    if estimate.positions < len(estimate.effective):
        rest = "the model" if estimator.needs_model else f"at most {estimate.beyond:.3g} more"
        text += f"; positions 1–{estimate.positions}, then {rest}"
    return text


SUMMARY: Final = """\
The revenue per session of another policy on a recorded log. The target plans every session again,
with the estimate of the version that served it: as if the policy had been swapped at that time.
Five estimators:

  replay  sessions drawn uniformly that showed the target's arms, position by position
  ips     sessions left to chance, weighted by the target's probability of the same slate
  snips   ips with weights normalised to sum to one: a small bias, less noise
  direct  click models fitted on other sessions of the log: precise, but wrong if the model is
  dr      the click models, corrected by weighted sessions: right even if the model is wrong

Sessions are left to chance in the warm-up, under a random_share above 0, and by policies that
draw. An estimator with too few of them has no answer and gives the reason. The unit of the
intervals is the session. The click models are of the kind that serves, fitted on every display, with
the rates by ad and position at which users who do not click go on. The interval of direct assumes that
their form is right; the second table checks that on the sessions drawn uniformly.
"against served" is the difference to the revenue of the same sessions as they were served.
In an imported log, sessions are left to chance if their first propensity is below 1. Without such
sessions, weights have an answer for the order that every session shows, and direct for targets whose
ads were seen at the same positions; policies other than fixed and random need --parameters.
Exit 1 if no estimator has an answer, or if one of --method has none."""

COMMAND = CommandSpec(
    name="evaluate",
    summary=SUMMARY,
    examples=(
        "adcascade evaluate demo.jsonl.gz --policy greedy",
        "adcascade evaluate demo.jsonl.gz --policy ucbbp --beta 0.5 --json -",
        "adcascade evaluate history.gz --policy fixed --order shoes,hats",
        "adcascade evaluate demo.jsonl.gz --estimator newton --method dr",
        "adcascade evaluate demo.jsonl.gz --parameters version-12.json --confidence 0.9",
    ),
    options=OPTIONS,
    run=run,
)
