"""`adcascade explain`: the reasons for a slate, for one version of the parameters and one context."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson

from worker.bandit.arrays import Floats, Ints
from worker.bandit.policies import policy_named
from worker.cli.options.learning import setting
from worker.cli.options.parser import JSON, CommandSpec, Option, integer
from worker.cli.options.target import TARGET, control
from worker.cli.options.versions import pick
from worker.console import check_writable, read_file, table, write_result
from worker.errors import InputError, ParametersError
from worker.stream.contexts import MISSING
from worker.stream.encoders import context_encoder
from worker.stream.explanation import Explanation, Position, explain
from worker.stream.parameters import Parameters, decode_parameters, with_settings
from worker.stream.settings import LearningSettings

TOP = 5  # arms in the table of a position
LONGEST = 10_000  # displays in a session; more would be a typing error, and would not fit into memory

#: Settings that replace those of the record, with changes of their options.
OVERRIDES: dict[str, dict[str, Any]] = {
    "policy": {},
    "bonus": {},
    "beta": {},
    "horizon": {"parse": integer(least=1, most=LONGEST)},
}

OPTIONS = (
    Option("parameters", "record of a version, from `adcascade parameters export`", metavar="FILE"),
    Option("version", "version of a running deployment, by number or tag, without --parameters", metavar="VERSION"),
    Option(
        "context",
        "context of the user: a JSON list of numbers, or an object of declared features; @FILE, or - for stdin",
        metavar="JSON",
    ),
    *(
        setting(name, default=None, help=f"{setting(name).help} (default: that of the record)", **changes)
        for name, changes in OVERRIDES.items()
    ),
    Option("exclude", "arm that may not be shown; repeatable", repeatable=True, default=(), metavar="ARM"),
    *TARGET,
    JSON,
)


def run(options: argparse.Namespace) -> int:
    """Explain one slate."""
    if options.context is None:
        raise InputError("--context is missing (see adcascade explain --help)")
    if (options.parameters is None) == (options.version is None):
        raise InputError("either --parameters FILE or --version VERSION is needed (see adcascade explain --help)")
    if options.parameters == options.context == "-":
        raise InputError("--parameters - and --context - cannot both be read from standard input")
    check_writable(options.json)
    if options.version is None:
        given = _read_parameters(options.parameters)
    else:
        given = _checked(pick(control(options), options.version), f"version {options.version}")
    parameters = _overridden(given, options)
    context = _read_context(options.context, parameters.settings)
    reasons = explain(parameters, context, _indices(parameters, options.exclude))
    record = {"slate": list(reasons.slate), "positions": [asdict(position) for position in reasons.positions]}
    write_result(options.json, record, report(parameters, reasons), [f"note: {text}" for text in reasons.notes])
    return 0


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_parameters(path: str) -> Parameters:
    try:
        parameters = decode_parameters(_read(path, "--parameters"), complete=False)
    except ParametersError as error:
        raise ParametersError(f"--parameters {path}: {error}") from None
    return _checked(parameters, f"--parameters {path}")


def _checked(parameters: Parameters, where: str) -> Parameters:
    if not parameters.arms:
        raise ParametersError(f"{where}: there is no arm")
    if parameters.settings.horizon > LONGEST:
        raise ParametersError(f"{where}: horizon must be at most {LONGEST}, not {parameters.settings.horizon}")
    return parameters


def _overridden(parameters: Parameters, options: argparse.Namespace) -> Parameters:
    changes = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
    if changes.get("beta") == "theory" and parameters.settings.beta != "theory":
        # The radius of the record belongs to its own β; 0 has it computed again.
        parameters = replace(parameters, radius=0.0)
    return with_settings(parameters, **changes) if changes else parameters


def _read_context(text: str, settings: LearningSettings) -> Floats:
    """Read the numbers of a context, or an object of declared features; with these, a number may be null."""
    where = "--context"
    if text == "-" or text.startswith("@"):
        where = f"--context {text}"
        data = _read(text.removeprefix("@"), where)
    else:
        data = text.encode()
    try:
        numbers = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise InputError(f"{where}: must be a JSON list of numbers such as '[0.5, -1.2]'") from None
    encoder = context_encoder(settings.features)
    if encoder is not None and isinstance(numbers, dict):
        try:
            return np.array(encoder.encode(numbers))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if not isinstance(numbers, list):
        raise InputError(f"{where}: must be a JSON list of numbers, not {_kind(numbers)}")
    for number, value in enumerate(numbers, start=1):
        if value is None and encoder is not None:
            numbers[number - 1] = MISSING  # as in the journal
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{where}: number {number} is {_kind(value)}, not a finite number")
    if len(numbers) != settings.dim:
        raise InputError(f"{where}: has {len(numbers)} numbers, the parameters need {settings.dim}")
    return np.array(numbers, dtype=np.float64)


def _read(path: str, where: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    return read_file(path, where)


def _indices(parameters: Parameters, arms: tuple[str, ...]) -> Ints:
    known = {arm.arm: index for index, arm in enumerate(parameters.arms)}
    for arm in arms:
        if arm not in known:
            raise InputError(f"--exclude {arm}: the parameters have no such arm")
    return np.array([known[arm] for arm in arms], dtype=np.intp)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(
        type(value), repr(value)
    )


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(parameters: Parameters, reasons: Explanation) -> str:
    """Return the best arms of every position, and the reason for the choice in words."""
    settings = parameters.settings
    active = sum(arm.active for arm in parameters.arms)
    with_repeats, without = policy_named(settings.policy).has_bonus
    bonus = f"{settings.bonus} bonus" if (with_repeats if settings.repeats else without) else "no repeats"
    policy = f"{settings.policy}, {bonus}, β = {settings.beta}" if with_repeats else settings.policy
    lines = [f"version {parameters.version}: {policy}; {active} of {len(parameters.arms)} arms active"]
    lines += [f"note: {text}" for text in reasons.notes]
    if reasons.slate:
        lines.append(f"slate: {' → '.join(reasons.slate)}")
    rewards = {arm.arm: arm.reward for arm in parameters.arms}
    for position in reasons.positions:
        if position.choice is not None:
            lines += ["", f"position {position.position}, {position.mode}: {reason(position)}"]
            lines.append(_candidates(position, rewards))
    return "\n".join(lines)


def _candidates(position: Position, rewards: dict[str, float]) -> str:
    ranked = sorted(position.arms, key=lambda one: (one.arm != position.choice, -one.score))
    rows = [
        [
            "→" if one.arm == position.choice else "",
            one.arm,
            *(f"{value:.4g}" for value in (one.probability, rewards[one.arm], one.q, one.width, one.bonus, one.score)),
        ]
        for one in ranked[:TOP]
    ]
    text = table(["", "arm", "probability", "reward", "Q", "width", "bonus", "score"], rows)
    more = len(ranked) - TOP
    return text + (f"\n   … and {more} more" if more > 0 else "")


def reason(position: Position) -> str:
    """Return the reason for a choice in words."""
    chosen = next(one for one in position.arms if one.arm == position.choice)
    later = f"{position.continuation:.4g} can still be earned when it is passed over"
    if position.continuation == 0:
        later = "nothing is planned after it"
    surest = max(position.arms, key=lambda one: one.q)
    others = [one for one in position.arms if one is not chosen]
    if not others:
        return f"{chosen.arm} is the only arm left; {later}"
    if surest is chosen or surest.q <= chosen.q:
        second = max(others, key=lambda one: one.q)
        return (
            f"{chosen.arm} is expected to earn the most, {chosen.q:.4g} (next: {second.arm}, {second.q:.4g}); {later}"
        )
    if chosen.bonus > 0:
        return (
            f"{surest.arm} is expected to earn more ({surest.q:.4g} against {chosen.q:.4g}), but {chosen.arm} may well "
            f"be better than it looks (bonus {chosen.bonus:.4g} against {surest.bonus:.4g}); {later}"
        )
    return f"{chosen.arm} and {surest.arm} are as good as equal ({chosen.q:.7g}, {surest.q:.7g}); {later}"


COMMAND = CommandSpec(
    name="explain",
    summary="Show why a slate is chosen: probability, Q, width, bonus and score of every arm at every position.",
    examples=(
        "adcascade explain --parameters parameters.json --context '[0.4, -1.1]'",
        "adcascade explain --parameters parameters.json --context @context.json --exclude shoes --json -",
        "adcascade explain --parameters parameters.json --context '[0, 0]' --policy greedy --horizon 3",
        "adcascade explain --version 41 --broker kafka:9092 --context '[0.4, -1.1]'     # a decision of the past",
    ),
    options=OPTIONS,
    run=run,
)
