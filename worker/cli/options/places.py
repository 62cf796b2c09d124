"""The places where options are set: the command line, variables, the TOML file, and defaults.

Rules that hold in this file:

- The flag wins over the variable, the variable over the file, and that over the default. In the file, a table that is
  named after the command, such as ``[worker]`` or ``[arms.add]``, wins over the top.
- Variables and the file are shared by all commands, so a name of another command is known.
- An unknown name is an error, with the nearest known one: a setting that is misspelt must not be ignored.
- No error shows a pair of a name and a value: it may be a secret.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from worker.cli.options.parser import CONFIG, PREFIX, CommandSpec, Option, boolean, did_you_mean, pair
from worker.console import note, read_file
from worker.errors import InputError

LoadAll: TypeAlias = Callable[[], Iterable[CommandSpec]]


#: Variables with our prefix that are no options: of the tests, and of deploy/kafka/broker.
OTHER_VARIABLES: Final = frozenset(
    PREFIX + name
    for name in (
        *("FUZZ", "FUZZED_REQUESTS", "FUZZ_SEED", "HOSTILE", "HOSTILE_ONLY", "HOSTILE_SEED", "KAFKA_CACHE", "KILLS"),
        *("SCHEDULES", "TEST_CLOCK", "TEST_KAFKA", "THOROUGH"),
    )
)

# Kubernetes adds variables for a service, such as ADCASCADE_SERVICE_HOST and ADCASCADE_PORT=tcp://10.0.0.1:80.
_SERVICE: Final = re.compile(
    r"ADCASCADE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")


def resolve(
    parsed: argparse.Namespace, environ: Mapping[str, str] | None = None, load_all: LoadAll | None = None
) -> argparse.Namespace:
    """Add variables, file and defaults to the flags; raise `InputError` on the first value that is wrong.

    `load_all` returns all commands, which share the variables and the file; without it unknown names pass.
    """
    variables = own_variables(os.environ if environ is None else environ)
    options = parsed.command_spec.options
    known = {CONFIG.variable, *(option.variable for option in options)} | OTHER_VARIABLES
    if load_all is not None and not known.issuperset(variables):
        known |= {option.variable for _, option in _every(load_all())}
        for name in sorted(variables.keys() - known):
            raise InputError(f"unknown variable {name}{did_you_mean(name, sorted(known))}")
    file = _read(parsed, variables, load_all)
    return argparse.Namespace(**{option.attribute: _value(option, parsed, variables, file) for option in options})


def _every(commands: Iterable[CommandSpec]) -> Iterator[tuple[tuple[str, ...], Option]]:
    """Yield all options, each with the name of its command, and then of its action."""
    for command in commands:
        for action in command.actions or (command,):
            path = (command.name, action.name) if command.actions else (command.name,)
            yield from ((path, option) for option in action.options)


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with our prefix, without those that Kubernetes adds for a service.

    >>> own_variables({"ADCASCADE_PORT": "tcp://10.0.0.1:80", "ADCASCADE_WEB_PORT": "8080", "HOME": "/"})
    {'ADCASCADE_WEB_PORT': '8080'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX)
        and not _SERVICE.fullmatch(name)
        and not (name.endswith("_PORT") and _ADDRESS.match(value))
    }


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read(parsed: argparse.Namespace, variables: Mapping[str, str], load_all: LoadAll | None) -> dict[str, Any]:
    """Return the values of the file by name, those of the command's tables without the name of the table."""
    path = parsed.config or variables.get(CONFIG.variable)
    if not path:
        return {}
    try:
        content = tomllib.loads(read_file(path, "--config").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from None
    values = dict(_flat(content))
    if load_all is not None:
        tables = _check(path, values, _every(load_all()))
        used = {option.attribute for option in parsed.command_spec.options if option.table or option.pairs}
        for table in tables & content.keys() - used:
            del content[table]
            if parsed.config:  # the variable is for all commands
                note(f"--config {path}: `adcascade {' '.join(parsed.command_path)}` does not use [{table}]")
    for depth in range(1, len(parsed.command_path) + 1):
        table = ".".join(parsed.command_path[:depth]) + "."
        values |= {name.removeprefix(table): value for name, value in values.items() if name.startswith(table)}
    return content | values


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values; those of an inner table have its name in front.

    >>> list(_flat({"beta": 2, "arms": {"add": {"reward": 1}}}))
    [('beta', 2), ('arms.add.reward', 1)]
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _check(path: str, names: Iterable[str], every: Iterable[tuple[tuple[str, ...], Option]]) -> set[str]:
    """Raise `InputError` for a name that no command has; return the tables that may have any names, as [features]."""
    known, tables = set[str](), set[str]()
    for command, option in every:
        if option.table or option.pairs:
            tables.add(option.attribute)
        elif not option.positional:
            known |= {".".join([*command[:depth], option.attribute]) for depth in range(len(command) + 1)}
    for name in names:
        table, dot, _ = name.partition(".")
        if table in tables and not dot:
            raise InputError(f"--config {path}: {name} must be a table, [{name}]")
        if table not in tables and name not in known:
            near = did_you_mean(table, sorted(tables)) or did_you_mean(name, sorted(known))
            raise InputError(f"--config {path}: unknown name {name!r}{near}")
    return tables


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _value(option: Option, parsed: argparse.Namespace, variables: Mapping[str, str], file: Mapping[str, Any]) -> Any:
    name, given = option.attribute, getattr(parsed, option.attribute, None)
    if option.table:
        return option.parse(file[name]) if name in file else option.default
    if option.pairs:
        return _pairs(option, given or (), variables.get(option.variable, ""), file)
    places = [(given, option.typed)]
    if not option.positional:
        places += [(variables.get(option.variable), option.variable), (file.get(name), f"{name} in the config file")]
    for value, where in places:
        if value is not None:
            return _parse(option, value, where)
    return option.default


#: A comma before the next pair. Values may have commas, too.
_NEXT_PAIR = re.compile(r"\s*,\s*(?=[\w.]+=)")


def _pairs(option: Option, flags: Iterable[str], variable: str, file: Mapping[str, Any]) -> dict[str, str]:
    table = f"{option.attribute}."
    pairs = {
        name.removeprefix(table): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in file.items()
        if name.startswith(table)
    }
    for texts, parse, where in (
        (_NEXT_PAIR.split(variable), pair, option.variable),
        (flags, option.parse, option.typed),
    ):
        try:
            pairs |= dict(parse(text) for text in texts if text.strip())
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
    return pairs


def _parse(option: Option, given: Any, where: str) -> Any:
    if option.repeatable:
        parts = given if isinstance(given, list) else [part.strip() for part in str(given).split(",")]
        return tuple(_parse_one(option, str(part), where) for part in parts)
    return _parse_one(option, ",".join(map(str, given)) if isinstance(given, list) else str(given), where)


def _parse_one(option: Option, text: str, where: str) -> Any:
    if option.choices and text not in option.choices:
        near = did_you_mean(text, option.choices)
        raise InputError(f"{where}: unknown value {text!r}{near or ';'} one of {', '.join(option.choices)}")
    try:
        return boolean(text) if option.flag else option.parse(text)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
