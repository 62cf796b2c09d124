"""`adcascade explain`: the reasons for a slate, of a version and a context, or of a session that was served."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from worker.cli.explanation import (
    TOP,
    explanation,
    facts,
    fields_of,
    heading,
    numbers,
    picture,
    report,
    verdict,
    why_lines,
)
from worker.cli.options.parser import JSON, CommandSpec, Option, did_you_mean
from worker.cli.options.source import source
from worker.cli.options.target import TARGET, control, pick, read_version
from worker.console import read_input, write_file, write_result
from worker.errors import InputError, ParametersError
from worker.replay.one_session import ServedSession, find_session
from worker.stream.contexts import MISSING
from worker.stream.events import TOPICS, Arrival
from worker.stream.explanation import Explanation, explain
from worker.stream.features import context_encoder
from worker.stream.parameters import Parameters
from worker.stream.tastes import columns_of_object, context_columns
from worker.stream.why_not import why_not

LONGEST = 10_000  # displays in a session; more would be a typing error, and would not fit into memory
MOST = 20  # arms in the table of a position of a session

OPTIONS = (
    Option("log", "log with the session, with --session alone (-: standard input)", positional=True, optional=True),
    Option("parameters", "record of a version, from `adcascade parameters export`", metavar="FILE"),
    Option("version", "version of a running deployment, by number or tag (default: the newest)", metavar="VERSION"),
    Option(
        "context",
        "context of the user: a JSON list of numbers, or an object of declared features; @FILE, or - for stdin",
        metavar="JSON",
    ),
    Option("session", "id of a session that was served; with --context, the id by which chance decides", metavar="ID"),
    Option("why-not", "arm of which to say what it would have needed to be shown", metavar="ARM"),
    Option("exclude", "arm that may not be shown; repeatable", repeatable=True, default=(), metavar="ARM"),
    *TARGET,
    Option("html", "file for the explanation as a page with pictures", metavar="FILE"),
    JSON,
)


class Case(NamedTuple):
    """A slate to explain; `names` are those of the columns of its context, `served` what is known of its session."""

    parameters: Parameters
    arrival: Arrival
    names: tuple[str, ...]
    reasons: Explanation
    served: ServedSession | None = None


def run(options: argparse.Namespace) -> int:
    """Explain one slate; return 1 if a session planned again is not the recorded one."""
    case = _session(options) if options.context is None else _given_context(options)
    parameters, reasons, served = case.parameters, case.reasons, case.served
    record = as_json(reasons)
    said, head, lines, why = [], {"version": str(parameters.version)}, [], []
    if served is not None:
        said, head = verdict(served), facts(served)
        lines = [*said, *(f"{f'{name}:':<10} {text}" for name, text in head.items()), ""]
        record = {"session": session_json(served), **record}
    if options.why_not is not None:
        if not reasons.modes:
            raise InputError("--why-not: this slate was not planned here, so no plan can be changed; leave it out")
        answer = why_not(parameters, case.arrival, options.why_not, mode=reasons.modes[0], names=case.names)
        why = [f"why not {answer.arm}?", *(f"   {line}" for line in why_lines(answer, reasons))]
        record["why_not"] = answer
    lines += [report(parameters, reasons, most=TOP if served is None else MOST), *(["", *why] if why else [])]
    if options.html is not None:
        title = f"Why did session {case.arrival.session_id} see this?" if served else "Why this slate?"
        sections = [(why[0], "", "\n".join(why[1:]))] if why else []
        sections += [(heading(one), picture(one), numbers(parameters, one)) for one in reasons.positions]
        write_file(options.html, explanation(title, head, said, reasons.notes, sections).encode())
    loud = [line for line in said if line.startswith("!!!")]
    write_result(options.json, record, "\n".join(lines), [*loud, *(f"note: {text}" for text in reasons.notes)])
    return 1 if loud else 0


def as_json(reasons: Explanation) -> dict[str, Any]:
    """Return the reasons in their JSON form; rates, factors of the spread and `out` only where there are any."""
    positions = [
        {
            **{name: getattr(position, name) for name in ("position", "continuation", "choice", "mode")},
            "arms": [fields_of(one) for one in position.arms],
            **({"out": position.out} if position.out else {}),
        }
        for position in reasons.positions
    ]
    return {"slate": list(reasons.slate), "positions": positions}


def session_json(served: ServedSession) -> dict[str, Any]:
    """Return the facts of a session in their JSON form."""
    arrival = served.arrival
    return {
        "id": arrival.session_id,
        "arrived_at": arrival.occurred_at,
        "version": served.parameters.version,
        "context": arrival.context if served.given is None else served.given,
        "exclude": arrival.exclude,
        "shown": served.slate,
        "differences": served.differences,
        "answers": [
            {"position": position, "clicked": one.clicked, "occurred_at": one.occurred_at}
            for position, one in sorted(served.reactions.items())
        ],
        "learning": served.learning,
    }


# ── what to explain ──────────────────────────────────────────────────────────────────────────────────────────────────


def _given_context(options: argparse.Namespace) -> Case:
    """Return a context under a version."""
    if options.log is not None:
        raise InputError(
            "LOG is for --session ID without --context; a version comes from --parameters, --state, --broker"
        )
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
    parameters = _checked(given, where)
    context, names = _read_context(options.context, parameters)
    _check_arms(parameters, "--exclude", options.exclude)
    _check_arms(parameters, "--why-not", filter(None, [options.why_not]))
    arrival = Arrival(session_id=options.session or "", occurred_at=0, context=context, exclude=tuple(options.exclude))
    return Case(parameters, arrival, names, explain(parameters, arrival, names=names))


def _session(options: argparse.Namespace) -> Case:
    """Return a session that was served."""
    _check_source(options)
    kept = "(where the sessions of open windows are, and those of serve --keep)"
    name = options.log or (f"the topics {options.prefix}.*" if options.state is None else f"{options.state} {kept}")
    with source(options, TOPICS, session=options.session) as log:
        served = find_session(log, options.session, name)
    parameters, arrival = _checked(served.parameters, f"version {served.parameters.version}"), served.arrival
    _check_arms(parameters, "--why-not", filter(None, [options.why_not]))
    names = context_columns(parameters) if served.given is None else columns_of_object(parameters, served.given)
    reasons = Explanation(slate=served.slate, positions=(), notes=())
    if served.planned is not None:
        reasons = explain(parameters, arrival, names=names, served=served.planned)
    return Case(parameters, arrival, names, reasons, served)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_source(options: argparse.Namespace) -> None:
    """Raise `InputError` unless there is one source of sessions, and nothing that would change what was served."""
    if options.session is None or options.parameters is not None:
        raise InputError(
            "--context is missing; or --session ID, with LOG, --state DIR or --broker: why it was served so"
        )
    changed = [name for name in ("version", "exclude") if getattr(options, name)]
    if changed:
        raise InputError(f"--{changed[0]} is for --context: a session is explained as it was served")


def _checked(parameters: Parameters, where: str) -> Parameters:
    if not parameters.arms:
        raise ParametersError(f"{where}: there is no arm")
    if parameters.settings.horizon > LONGEST:
        raise ParametersError(f"{where}: horizon must be at most {LONGEST}, not {parameters.settings.horizon}")
    return parameters


def _read_context(text: str, parameters: Parameters) -> tuple[tuple[float, ...], tuple[str, ...]]:
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
            return tuple(encoder.encode(given)), columns_of_object(parameters, given)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if len(given) != settings.dim:
        raise InputError(f"{where}: has {len(given)} numbers, the parameters need {settings.dim}")
    return tuple(MISSING if value is None else value for value in given), context_columns(parameters)


def _check_arms(parameters: Parameters, option: str, arms: Iterable[str]) -> None:
    for arm in arms:
        if arm not in parameters.indices:
            raise InputError(f"{option} {arm}: the parameters have no such arm{did_you_mean(arm, parameters.indices)}")


COMMAND = CommandSpec(
    name="explain",
    summary=(
        "Show why a slate is chosen: probability, Q, width, bonus and score of every arm at every position, and the\n"
        "features that carried the choice, as named parts of the log-odds of a click. With --session ID and a log, a\n"
        "state folder or Kafka: the session that was served, planned again, what was shown, answered and learned. If\n"
        "the plan is not the recorded decision, the exit code is 1."
    ),
    examples=(
        "adcascade explain --parameters parameters.json --context '[0.4, -1.1]'",
        'adcascade explain --parameters parameters.json --context \'{"age": 31, "device": "mobile"}\'',
        "adcascade explain log.gz --session user-17 --html why.html                  # why this user saw that ad",
        "adcascade explain --state /var/lib/adcascade --session user-17 --why-not shoes",
        "adcascade explain --parameters parameters.json --context @context.json --exclude shoes --json -",
        "adcascade explain --parameters parameters.json --context '[0.4, -1.1]' --session user-17   # as it was served",
        "adcascade explain --state /var/lib/adcascade --context '{\"age\": 31}'             # the newest version",
        "adcascade explain --version 41 --broker kafka:9092 --context '[0.4, -1.1]'     # a decision of the past",
    ),
    options=OPTIONS,
    run=run,
)
