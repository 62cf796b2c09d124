"""`adcascade explain`: the reasons for a slate, for one version of the parameters and one context."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.bandit.policies import policy_named
from worker.cli.options.learning import setting
from worker.cli.options.parser import JSON, CommandSpec, Option, integer
from worker.cli.options.target import TARGET, control, pick, read_version
from worker.console import listing, read_input, write_result
from worker.errors import InputError, ParametersError
from worker.stream.catalogue import under
from worker.stream.contexts import MISSING
from worker.stream.explanation import Candidate, Explanation, Position, explain
from worker.stream.features import context_encoder
from worker.stream.parameters import Parameters
from worker.stream.tastes import BASE_RATE, Contribution, columns_of_object, context_columns

TOP = 5  # arms in the table of a position
STRONGEST = 5  # parts of the log-odds of the chosen arm
LONGEST = 10_000  # displays in a session; more would be a typing error, and would not fit into memory

#: Fields of a candidate in JSON.
CANDIDATE = ("arm", "probability", "q", "width", "bonus", "score", "answer_rate", "spread", "contributions")

#: Columns of the numbers of a candidate, with their fields.
NUMBERS = {
    "probability": "probability",
    "goes on": "answer_rate",
    "reward": "reward",
    "Q": "q",
    **{name: name for name in ("width", "spread", "bonus", "score")},
}

#: Settings that replace those of the record, with changes of their options.
OVERRIDES: dict[str, dict[str, Any]] = {
    "policy": {},
    "bonus": {},
    "beta": {},
    "horizon": {"parse": integer(least=1, most=LONGEST)},
}

OPTIONS = (
    Option("parameters", "record of a version, from `adcascade parameters export`", metavar="FILE"),
    Option("version", "version of a running deployment, by number or tag (default: the newest)", metavar="VERSION"),
    Option(
        "context",
        "context of the user: a JSON list of numbers, or an object of declared features; @FILE, or - for stdin",
        metavar="JSON",
    ),
    Option("session", "id of the session, by which it differs from others in its bonuses (spread)", metavar="ID"),
    *(
        setting(name, default=None, help=f"{setting(name).help} (default: that of the record)", **changes)
        for name, changes in OVERRIDES.items()
    ),
    Option("exclude", "arm that may not be shown; repeatable", repeatable=True, default=(), metavar="ARM"),
    *TARGET,
    JSON,
)


def run(options: argparse.Namespace) -> None:
    """Explain one slate."""
    if options.context is None:
        raise InputError("--context is missing (see adcascade explain --help)")
    if options.parameters is not None and options.version is not None:
        raise InputError("--parameters FILE and --version VERSION cannot both be given (see adcascade explain --help)")
    if options.parameters is None and options.state is None and options.broker is None:
        raise InputError("--parameters FILE, --state DIR or --broker is needed (see adcascade explain --help)")
    if options.parameters == options.context == "-":
        raise InputError("--parameters - and --context - cannot both be read from standard input")
    if options.parameters is not None:
        where = f"--parameters {options.parameters}"
        given = read_version(options.parameters, "--parameters", complete=False)
    else:
        given = pick(control(options), options.version)
        where = f"version {given.version}"
    parameters = _overridden(_checked(given, where), options)
    context, names = _read_context(options.context, parameters)
    excluded = _indices(parameters, options.exclude)
    reasons = explain(parameters, context, excluded, session=options.session, names=names)
    record = as_json(reasons)
    write_result(options.json, record, report(parameters, reasons), [f"note: {text}" for text in reasons.notes])


def as_json(reasons: Explanation) -> dict[str, Any]:
    """Return the reasons in their JSON form; rates of going on, and factors of the spread, only where there are any."""
    positions = [
        {
            **{name: getattr(position, name) for name in ("position", "continuation", "choice", "mode")},
            "arms": [_fields(one) for one in position.arms],
        }
        for position in reasons.positions
    ]
    return {"slate": list(reasons.slate), "positions": positions}


def _fields(one: Candidate) -> dict[str, Any]:
    return {name: value for name in CANDIDATE if (value := getattr(one, name)) is not None}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    return under(replace(parameters.settings, **changes), parameters)


def _read_context(text: str, parameters: Parameters) -> tuple[Floats, tuple[str, ...]]:
    """Read the numbers of a context, or an object of declared features, and return them with their names.

    With declared features, a number may be null.
    """
    where, settings = "--context", parameters.settings
    if text == "-" or text.startswith("@"):
        where = f"--context {text}"
        data = read_input(text.removeprefix("@"), where)
    else:
        data = text.encode()
    encoder = context_encoder(settings.features)
    form: Any = list[float] if encoder is None else list[float | None] | dict[str, Any]
    try:
        given = msgspec.json.decode(data, type=form)
    except msgspec.DecodeError as error:
        wanted = "a JSON list of numbers, such as '[0.5, -1.2]'"
        or_object = "" if encoder is None else ", or an object of declared features"
        raise InputError(f"{where}: must be {wanted}{or_object}: {error}") from None
    if encoder is not None and isinstance(given, dict):
        try:
            return np.array(encoder.encode(given)), columns_of_object(parameters, given)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if len(given) != settings.dim:
        raise InputError(f"{where}: has {len(given)} numbers, the parameters need {settings.dim}")
    return np.array([MISSING if value is None else value for value in given]), context_columns(parameters)


def _indices(parameters: Parameters, arms: tuple[str, ...]) -> Ints:
    known = parameters.indices
    for arm in arms:
        if arm not in known:
            raise InputError(f"--exclude {arm}: the parameters have no such arm")
    return np.array([known[arm] for arm in arms], dtype=np.intp)


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
            chosen = next(one for one in position.arms if one.arm == position.choice)
            lines.append(f"   log-odds of {chosen.arm}: {in_parts(chosen.contributions)}")
    return "\n".join(lines)


def _candidates(position: Position, rewards: dict[str, float]) -> str:
    ranked = sorted(position.arms, key=lambda one: (one.arm != position.choice, -one.score))
    rows = [
        {**_fields(one), "reward": rewards[one.arm], "mark": "→" if one.arm == position.choice else ""}
        for one in ranked
    ]
    numbers = {heading: f"{{{name}:.4g}}" for heading, name in NUMBERS.items() if name in rows[0]}
    return listing({"": "{mark}", "arm": "{arm}", **numbers}, rows, TOP)


def in_parts(parts: tuple[Contribution, ...]) -> str:
    """Return log-odds as a sum of named parts, the strongest features after the base rate."""
    base = next(part for part in parts if part.feature == BASE_RATE)
    features = [part for part in parts if part is not base]
    named = [f"{base.feature} {base.contribution:+.2f}", *map(_named, features[:STRONGEST])]
    if rest := features[STRONGEST:]:
        named.append(f"{len(rest)} more {sum(part.contribution for part in rest):+.2f}")
    return f"{sum(part.contribution for part in parts):+.2f} = {', '.join(named)}"


def _named(part: Contribution) -> str:
    if part.value is None:
        return f"{part.feature} missing {part.contribution:+.2f}"
    # The name of a mark has its value already, as in device=mobile.
    value = "" if "=" in part.feature or "#" in part.feature else f"={part.value:.4g}"
    return f"{part.feature}{value} {part.contribution:+.2f}"


def reason(position: Position) -> str:
    """Return the reason for a choice in words."""
    chosen = next(one for one in position.arms if one.arm == position.choice)
    stay = "" if chosen.answer_rate is None else f", by the {chosen.answer_rate:.0%} who then go on"
    later = f"{position.continuation:.4g} can still be earned when it is passed over{stay}"
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
    if chosen.q < 0.999 * surest.q:  # a fixed order does not choose by scores
        return f"{chosen.arm} is next in the order, {chosen.q:.4g} ({surest.arm}: {surest.q:.4g}); {later}"
    return f"{chosen.arm} and {surest.arm} are as good as equal ({chosen.q:.7g}, {surest.q:.7g}); {later}"


COMMAND = CommandSpec(
    name="explain",
    summary=(
        "Show why a slate is chosen: probability, Q, width, bonus and score of every arm at every position, and the\n"
        "features that carried the choice, as named parts of the log-odds of a click."
    ),
    examples=(
        "adcascade explain --parameters parameters.json --context '[0.4, -1.1]'",
        'adcascade explain --parameters parameters.json --context \'{"age": 31, "device": "mobile"}\'',
        "adcascade explain --parameters parameters.json --context @context.json --exclude shoes --json -",
        "adcascade explain --parameters parameters.json --context '[0, 0]' --policy greedy --horizon 3",
        "adcascade explain --parameters parameters.json --context '[0.4, -1.1]' --session user-17   # as it was served",
        "adcascade explain --state /var/lib/adcascade --context '{\"age\": 31}'             # the newest version",
        "adcascade explain --version 41 --broker kafka:9092 --context '[0.4, -1.1]'     # a decision of the past",
    ),
    options=OPTIONS,
    run=run,
)
