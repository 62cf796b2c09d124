"""`adcascade evaluate`: what another policy would have earned on a recorded log."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from worker.bandit.estimators import ESTIMATORS
from worker.bandit.policies import BONUSES, POLICIES
from worker.cli.options.learning import beta
from worker.cli.options.parser import JSON, CommandSpec, Option, Parser, integer, number
from worker.console import ProgressBar, check_writable, note, progress, say, table, write_json
from worker.errors import InputError, ParametersError
from worker.evaluate.estimators import METHODS, Estimate
from worker.evaluate.evaluation import Evaluation, Served, evaluate_log
from worker.evaluate.intervals import Interval
from worker.evaluate.targets import Change
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Topics


def share() -> Parser:
    """Return a parser of numbers strictly between 0 and 1.

    >>> share()("0.9")
    0.9
    """
    parse = number(above=0, most=1)

    def between(text: str) -> float:
        value = float(parse(text))
        if value == 1:
            raise ValueError("must be below 1")
        return value

    return between


#: What the target may do otherwise than the policy that served.
CHANGES: Final = (
    Option(name="policy", help="the policy to evaluate [the one that served]", choices=POLICIES),
    Option(name="bonus", help="what it adds to Q to explore [as served]", choices=BONUSES),
    Option(name="beta", help="how much it explores: standard deviations, or theory [as served]", parse=beta),
    Option(name="epsilon", help="share that epsilon-greedy explores [as served]", parse=number(least=0, most=1)),
    Option(
        name="estimator",
        help="how it learns: the journal of the log is folded again [as served]",
        choices=ESTIMATORS,
    ),
    Option(name="horizon", help="most displays in a session, at most those served [as served]", parse=integer(least=1)),
)

OPTIONS = (
    Option(
        name="log",
        help="the log: JSON lines as `kcat -J` writes them, also gzipped; - for standard input",
        positional=True,
    ),
    *CHANGES,
    Option(
        name="parameters",
        help="plan all sessions by this one version, instead of those that served",
        metavar="FILE",
    ),
    Option(
        name="method",
        help="estimator to ask; repeatable; exit 1 if one that is named here has no answer",
        choices=METHODS,
        repeatable=True,
        default=(),
    ),
    Option(name="confidence", help="of the intervals", parse=share(), default=0.95),
    Option(
        name="seed",
        help="of the folds of the model, and of what a target draws that draws",
        parse=integer(least=0),
        default=0,
    ),
    Option(name="prefix", help="prefix of the topics", default="ads"),
    Option(name="skip-bad", help="pass over lines that cannot be read, and count them", flag=True, default=False),
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Evaluate a policy; exit 1 if nothing, or not what was asked for, can be answered."""
    check_writable(options.json)
    change = _change(options)
    evaluation = evaluate_log(
        options.log,
        change,
        methods=[method for method in METHODS if not options.method or method in options.method],
        confidence=options.confidence,
        seed=options.seed,
        topics=Topics(options.prefix),
        skip_bad=options.skip_bad,
        stage=_stage,
    )
    write_json(options.json, as_json(evaluation, options))
    if options.json == "-":
        for text in evaluation.notes:
            note(f"note: {text}")
    else:
        say(report(evaluation))
    refused = [estimate for estimate in evaluation.estimates if estimate.refused is not None]
    if refused and (options.method or len(refused) == len(evaluation.estimates)):
        for estimate in refused:
            note(f"adcascade: {estimate.method} has no answer: {estimate.refused}")
        return 1
    return 0


def _change(options: argparse.Namespace) -> Change:
    given = {option.attribute: getattr(options, option.attribute) for option in CHANGES}
    settings = {name: value for name, value in given.items() if value is not None}
    if options.epsilon is not None and options.policy not in (None, "epsilon-greedy"):
        raise InputError("--epsilon is for --policy epsilon-greedy only")
    if options.parameters is None:
        return Change(settings=settings)
    if options.estimator is not None:
        raise InputError("--estimator and --parameters contradict each other: given parameters are not made again")
    return Change(settings=settings, parameters=_parameters(options.parameters))


def _parameters(path: str) -> Parameters:
    try:
        return decode_parameters(Path(path).read_bytes(), complete=False)
    except OSError as error:
        raise InputError(f"--parameters {path}: {error.strerror or error}") from None
    except ParametersError as error:
        raise ParametersError(f"--parameters {path}: {error}") from None


def _stage(title: str, total: float | None) -> AbstractContextManager[ProgressBar]:
    return progress(title, total, unit="records")


# ── for machines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(evaluation: Evaluation, options: argparse.Namespace) -> dict[str, Any]:
    """Return the evaluation as it is written."""
    found = evaluation.model_clicks
    return {
        "log": options.log,
        "target": {"estimate": evaluation.origin, **asdict(evaluation.target)},
        "confidence": evaluation.confidence,
        "seed": options.seed,
        "sessions": evaluation.served.sessions,
        "drawn": evaluation.drawn,
        "warmup": evaluation.warmup,
        "versions": evaluation.versions,
        "left_out": dict(evaluation.left_out),
        "served": _served(evaluation.served),
        "weighable": None if evaluation.weighable is None else _served(evaluation.weighable),
        "model": None if found is None else {"clicks": found[0], "expected_clicks": found[1]},
        "estimates": [asdict(estimate) for estimate in evaluation.estimates],
        "notes": list(evaluation.notes),
    }


def _served(served: Served) -> dict[str, Any]:
    return asdict(served)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def report(evaluation: Evaluation) -> str:
    """Return a table of the answers, and why there is none where there is none."""
    percent = f"{100 * evaluation.confidence:.4g} %"
    rows = [_row("as served", evaluation.served.revenue, None, evaluation.served.sessions, "")]
    some = evaluation.weighable
    if some is not None and some != evaluation.served:
        rows.append(_row("as served, by chance", some.revenue, None, some.sessions, ""))
    rows.extend(
        _row(e.method, e.revenue, e.difference, e.sessions, _footing(e)) for e in evaluation.estimates if e.revenue
    )
    lines = [
        _title(evaluation),
        "",
        table(["per session", "revenue", f"{percent} interval", "against served", "sessions", "rests on"], rows),
    ]
    refused = [f"{e.method} has no answer: {e.refused}" for e in evaluation.estimates if e.refused is not None]
    left_out = [f"left out: {count} sessions, {reason}" for reason, count in evaluation.left_out.items()]
    notes = [f"note: {text}" for text in evaluation.notes]
    more = [*refused, *left_out, *notes]
    return "\n".join([*lines, "", *more] if more else lines)


def _title(evaluation: Evaluation) -> str:
    target = evaluation.target
    explored = {
        "epsilon-greedy": f", ε = {target.epsilon:g}",
        **dict.fromkeys(("ucbbp", "aucbbp", "myopic-ucb"), f", {target.bonus} bonus, β = {target.beta}"),
    }.get(target.policy, "")
    return (
        f"{target.policy}{explored}, {target.estimator} estimator, up to {target.horizon} displays; "
        f"its estimates: {evaluation.origin}\n"
        f"{evaluation.served.sessions} sessions evaluated, {evaluation.versions} versions; in the log, "
        f"{evaluation.drawn} sessions were drawn uniformly, {evaluation.warmup} came in the warm-up"
    )


def _row(name: str, revenue: Interval | None, difference: Interval | None, sessions: int, footing: str) -> list[str]:
    if revenue is None:
        return [name, "", "", "", str(sessions), footing]
    return [
        name,
        f"{revenue.estimate:.4f}",
        f"{revenue.low:.4f} … {revenue.high:.4f}",
        "" if difference is None else "{} ({} … {})".format(*map(_signed, _ends(difference))),
        str(sessions),
        footing,
    ]


def _ends(found: Interval) -> tuple[float, float, float]:
    return found.estimate, found.low, found.high


def _signed(value: float) -> str:
    """Return a difference; the sign of nothing is +.

    >>> _signed(-1e-9), _signed(-0.25)
    ('+0.0000', '-0.2500')
    """
    return f"{round(value, 4) + 0.0:+.4f}"


def _footing(estimate: Estimate) -> str:
    if estimate.method == "direct":
        return f"a model of {estimate.clicks:.0f} clicks"
    depth = len(estimate.effective)
    text = f"{estimate.matching} matching, {estimate.clicks:.0f} clicks"
    if estimate.positions < depth:
        rest = "the model" if estimate.method == "dr" else f"at most {estimate.beyond:.3g} more"
        text += f"; positions 1–{estimate.positions}, then {rest}"
    return text


SUMMARY: Final = """\
What would another policy have earned per session on this log? The target plans every session
anew, with the estimate of the version that served it: as if the policy had been swapped at that
moment. Five estimators answer:

  replay  sessions drawn uniformly that happened to show what the target shows, by position
  ips     sessions left to chance, weighted by how much likelier the target shows the same
  snips   ips with weights made to sum to one: a little biased, less noisy
  direct  a click model fitted on other sessions of the log: precise, and wrong if the model is
  dr      the click model, corrected by weighted sessions: right even if the model is wrong

Sessions are left to chance in the warm-up, under a random_share above 0, and by policies that
draw. An estimator that has too few of them for an honest answer says so instead. Intervals take
the session as unit; that of direct trusts the form of its model. "against served" compares with
what the same sessions earned. Exit 1 if nobody has an answer, or one named by --method has none."""

COMMAND = CommandSpec(
    name="evaluate",
    summary=SUMMARY,
    examples=(
        "adcascade evaluate demo.jsonl.gz --policy greedy",
        "adcascade evaluate demo.jsonl.gz --policy ucbbp --beta 0.5 --json -",
        "adcascade evaluate demo.jsonl.gz --estimator newton --method dr",
        "adcascade evaluate demo.jsonl.gz --parameters version-12.json --confidence 0.9",
    ),
    options=OPTIONS,
    run=run,
)
