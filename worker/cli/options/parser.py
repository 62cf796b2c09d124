"""Options of commands: one declaration gives the flag, the environment variable and the name in the TOML file.

An option `session-timeout` is the flag ``--session-timeout``, the variable ``ADCASCADE_SESSION_TIMEOUT`` and, in the
file given with ``--config``, the name ``session_timeout`` (at the top, or in a table named after the command, such as
``[worker]`` or ``[arms.add]``). The flag wins over the variable, the variable over the table, the table over the top,
and that over the default. Unknown flags, variables, tables and names are errors (`worker.cli.options.names`).
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from worker.cli.options.names import PREFIX, check_file, check_variables, did_you_mean, of_kubernetes
from worker.console import read_file
from worker.errors import InputError

Parser = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One named setting of a command.

    `help` is a noun phrase; a default that is found out at run time stands at its end, as ``(default: …)``. `parse`
    turns text into the value and raises `ValueError` with a reason. A `flag` takes no text (``--no-repeats`` turns it
    off); a `repeatable` option collects a tuple; a `positional` one has no dashes and no variable. A `secret` is never
    shown, and comes from the environment or a file only. A `table` is a table of the TOML file, and nothing else; its
    `parse` takes the table. With `pairs`, the value is a dictionary of texts: the flag is repeated (``--kafka a.b=1``),
    the variable separates pairs with commas, the TOML file has a table (``[kafka]``), and a name that is in several
    places is taken from the first of them. A name for which `hidden` is true has a secret value, and is refused as a
    flag. `group` is the heading in the help.
    """

    name: str
    help: str
    _: KW_ONLY
    parse: Parser = str
    default: Any = None
    choices: Collection[str] = ()
    metavar: str | None = None
    flag: bool = False
    repeatable: bool = False
    positional: bool = False
    optional: bool = False
    secret: bool = False
    table: bool = False
    pairs: bool = False
    hidden: Callable[[str], bool] = lambda name: False
    group: str = "options"

    @property
    def attribute(self) -> str:
        """The name in Python and in the TOML file."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return PREFIX + self.attribute.upper()


JSON = Option("json", "file for the result as JSON, or - for standard output", metavar="FILE")
CONFIG = Option("config", "TOML file with options of the same names", metavar="FILE")


def grouped(title: str, *options: Option) -> tuple[Option, ...]:
    """Return the options under a common heading in the help."""
    return tuple(replace(option, group=title) for option in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command: its options, its function, and examples of its use.

    `run` receives one attribute per option and returns the exit code. A command with `actions` (``parameters show``)
    has no `run`.
    """

    name: str
    summary: str
    examples: Sequence[str] = ()
    options: Sequence[Option] = ()
    run: Callable[[argparse.Namespace], int] | None = None
    actions: Sequence[CommandSpec] = ()


# ── parsing values ───────────────────────────────────────────────────────────────────────────────────────────────────


def integer(*, least: int | None = None, most: int | None = None) -> Parser:
    """Return a parser of whole numbers within bounds.

    >>> integer(least=1)("5")
    5
    """
    return _bounded(int, "a whole number", least, most)


def count(name: str, help: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> Option:
    """Return an option for a whole number within bounds."""
    return Option(name, help, parse=integer(least=least, most=most), default=default, metavar="N")


def port(name: str, help: str) -> Option:
    """Return an option for a port; any free one by default."""
    return count(name, help, 0, least=0, most=65535)


def number(*, least: float | None = None, most: float | None = None, above: float | None = None) -> Parser:
    """Return a parser of finite numbers within bounds; `above` excludes the bound itself.

    >>> number(above=0)("0.5")
    0.5
    """
    parse = _bounded(float, "a number", least, most)

    def bounded(text: str) -> float:
        value = float(parse(text))
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"must be finite, not {text}")
        if above is not None and value <= above:
            raise ValueError(f"must be above {above}, not {text}")
        return value

    return bounded


def _bounded(kind: Callable[[str], Any], noun: str, least: float | None, most: float | None) -> Parser:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"must be {noun}, not {text!r}") from None
        if least is not None and value < least:
            raise ValueError(f"must be at least {least}, not {text}")
        if most is not None and value > most:
            raise ValueError(f"must be at most {most}, not {text}")
        return value

    return parse


def boolean(text: str) -> bool:
    """Read true or false from a variable.

    >>> boolean("yes"), boolean("0")
    (True, False)
    """
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be true or false, not {text!r}")


# ── the parser of a command line ─────────────────────────────────────────────────────────────────────────────────────


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option or action."""

    def error(self, message: str) -> Any:
        """Raise `InputError`, instead of printing the usage."""
        if found := _WRONG_ACTION.match(message):
            known = [word.strip(" '") for word in found[2].split(",")]
            message = f"unknown action {found[1]!r}{did_you_mean(found[1], known) or ';'} one of {', '.join(known)}"
        raise InputError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; the error of an unknown one names the nearest flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            command: CommandSpec = parsed._command
            flags = [flag for option in (*command.options, CONFIG) for flag in _flags(option)]
            near = did_you_mean(word, flags) if word.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return parsed


_WRONG_ACTION = re.compile(r"argument ACTION: invalid choice: '(.*?)' \(choose from (.*)\)")


def _flags(option: Option) -> list[str]:
    if option.positional or option.secret or option.table:
        return []
    return [f"--{option.name}", *([f"--no-{option.name}"] if option.flag else [])]


_UNSET: Any = object()


def build_parser(command: CommandSpec, prog: str) -> ArgumentParser:
    """Return the parser of one command, with its actions as sub-commands."""
    parser = ArgumentParser(prog=prog, **_texts(command))
    _fill(parser, command, ())
    return parser


def _texts(command: CommandSpec) -> dict[str, Any]:
    secrets = [f"{option.variable}  {option.help}" for option in command.options if option.secret]
    tables = [f"[{option.attribute}]  {option.help}" for option in command.options if option.table]
    sections = {
        "examples": command.examples,
        "secrets, from the environment or the --config file": secrets,
        "tables of the --config file": tables,
    }
    texts = ["\n  ".join([f"{title}:", *lines]) for title, lines in sections.items() if lines]
    positional = [option for option in command.options if option.positional]
    names = ["ACTION"] if command.actions else [f"[{_metavar(o)}]" if o.optional else _metavar(o) for o in positional]
    return {
        "usage": " ".join(["%(prog)s", *names, "[OPTIONS]"]),
        "description": command.summary,
        "epilog": "\n\n".join(texts),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def _fill(parser: argparse.ArgumentParser, command: CommandSpec, path: tuple[str, ...]) -> None:
    path = (*path, command.name)
    if command.actions:
        actions = parser.add_subparsers(prog=parser.prog, dest="action", metavar="ACTION", required=True)
        for action in command.actions:
            _fill(actions.add_parser(action.name, help=action.summary, **_texts(action)), action, path)
        return
    parser.set_defaults(_command=command, _path=path)
    groups: dict[str, Any] = {"options": parser}
    for option in (*command.options, CONFIG):
        if not option.secret and not option.table:
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            _add(groups[option.group], option)


def _add(group: Any, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.positional:
        nargs = "?" if option.optional else None
        group.add_argument(option.attribute, help=text, metavar=_metavar(option), nargs=nargs, default=_UNSET)
        return
    if option.default not in (None, ()) and option.default is not False:
        shown = option.default if isinstance(option.default, tuple) else ["on" if option.flag else option.default]
        between = ", " if option.repeatable else ","  # as it is typed
        text += f" (default: {between.join(map(str, shown))})"
    several = option.repeatable or option.pairs
    how: dict[str, Any] = {"action": "append" if several else "store", "metavar": _metavar(option)}
    if option.flag:
        how = {"action": argparse.BooleanOptionalAction}
    default = None if several else _UNSET
    group.add_argument(f"--{option.name}", dest=option.attribute, help=text, default=default, **how)


def _metavar(option: Option) -> str:
    if option.positional:
        return option.metavar or option.name.upper()
    return option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else "VALUE")


def resolve(
    parsed: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    load_all: Callable[[], Iterable[CommandSpec]] | None = None,
) -> argparse.Namespace:
    """Add variables, file and defaults to the flags; raise `InputError` on the first value that is wrong.

    `load_all` returns all commands, which share the variables and the file; without it unknown names pass.
    """
    environ = os.environ if environ is None else environ
    command: CommandSpec = parsed._command
    own = {*_variables(command), CONFIG.variable}
    if load_all is not None and any(name.startswith(PREFIX) and name not in own for name in environ):
        leaves = [leaf for each in load_all() for leaf in _leaves(each)]
        check_variables(
            environ, own.union(*({option.variable for option in leaf.options if not option.table} for leaf in leaves))
        )
    file = _config(parsed, environ, load_all)
    values = {}
    for option in command.options:
        if option.table:
            values[option.attribute] = _parse_table(option, file)
            continue
        if option.pairs:
            flags = getattr(parsed, option.attribute) or ()
            variable = environ.get(option.variable, "")
            values[option.attribute] = _parse_pairs(option, flags, variable, file.get(option.attribute, {}))
            continue
        given = getattr(parsed, option.attribute, _UNSET)
        if given is not _UNSET and given is not None:
            where = _metavar(option) if option.positional else f"--{option.name}"
            values[option.attribute] = _parse(option, given, where)
        elif (
            not option.positional
            and option.variable in environ
            and not of_kubernetes(option.variable, environ[option.variable])
        ):
            text: Any = environ[option.variable]
            text = [part.strip() for part in text.split(",")] if option.repeatable else text
            values[option.attribute] = _parse(option, text, option.variable)
        elif option.attribute in file and not option.positional:
            values[option.attribute] = _parse(option, file[option.attribute], f"{option.attribute} in the config file")
        elif option.positional and not option.optional:
            raise InputError(f"{_metavar(option)} is missing: {option.help}")
        else:
            values[option.attribute] = option.default
    return argparse.Namespace(**values)


def _parse_table(option: Option, file: Mapping[str, Any]) -> Any:
    if option.attribute not in file:
        return option.default
    try:
        return option.parse(file[option.attribute])
    except InputError as error:
        raise InputError(f"{error} (in the config file)") from None


def _parse_pairs(option: Option, flags: Iterable[str], variable: str, table: Any) -> dict[str, str]:
    """Return the pairs of the file, the variable and the flags. No error shows a value: it may be a secret."""
    if not isinstance(table, Mapping):
        raise InputError(f"{option.attribute} in the config file must be a table [{option.attribute}]")
    pairs = dict(_flat(table, option.attribute))
    pairs |= dict(_pair(text, option.variable) for text in _NEXT_PAIR.split(variable) if text.strip())
    for name, value in (_pair(text, f"--{option.name}") for text in flags):
        if option.hidden(name):
            raise InputError(
                f"--{option.name} {name}: the list of processes would show its value; put it into {option.variable}, "
                f"or into the table [{option.attribute}] of the --config file"
            )
        pairs[name] = value
    return pairs


#: A comma before the next pair. Values may have commas, too.
_NEXT_PAIR = re.compile(r"\s*,\s*(?=[\w.]+=)")


def _pair(text: str, where: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise InputError(f"{where}: must be NAME=VALUE")
    return name.strip(), value


def _flat(table: Mapping[str, Any], place: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of a table; a nested one, of unquoted names with dots, is part of the name."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, Mapping):
            yield from _flat(value, place, f"{name}.")
        elif isinstance(value, str | int | float):
            yield name, str(value).lower() if isinstance(value, bool) else str(value)
        else:
            raise InputError(f"{name} in [{place}] of the config file must be a text, a number, true or false")


def _parse(option: Option, given: Any, where: str) -> Any:
    if option.repeatable:
        given = given if isinstance(given, list) else [given]
        return tuple(_parse_one(option, part, where) for part in given)
    return _parse_one(option, given, where)


def _parse_one(option: Option, given: Any, where: str) -> Any:
    text = str(given)
    if option.choices and text not in option.choices:
        near = did_you_mean(text, option.choices)
        raise InputError(f"{where}: unknown value {text!r}{near or ';'} one of {', '.join(option.choices)}")
    try:
        return boolean(text) if option.flag else option.parse(text)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _leaves(command: CommandSpec) -> list[CommandSpec]:
    return [leaf for action in command.actions for leaf in _leaves(action)] if command.actions else [command]


def _config(
    parsed: argparse.Namespace, environ: Mapping[str, str], load_all: Callable[[], Iterable[CommandSpec]] | None
) -> dict[str, Any]:
    given = getattr(parsed, "config", _UNSET)
    path = environ.get(CONFIG.variable) if given is _UNSET else given
    if not path:
        return {}
    try:
        content = tomllib.loads(read_file(path, "--config").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from None
    if load_all is not None:
        try:
            commands = list(load_all())
            tables = {option.attribute for each in commands for leaf in _leaves(each) for option in _tables(leaf)}
            rest = {name: value for name, value in content.items() if name not in tables}
            check_file(rest, {each.name: {leaf.name: _names(leaf) for leaf in _leaves(each)} for each in commands})
        except InputError as error:
            raise InputError(f"--config {path}: {error}") from None
    top, action = parsed._path[0], parsed._path[-1]
    table = content.get(top, {})
    names = [option.attribute for option in _tables(parsed._command)]
    own = {name: content[name] for name in names if name in content}
    return {**_values(content), **_values(table), **_values(table.get(action, {})), **own}


def _names(command: CommandSpec) -> list[str]:
    return [option.attribute for option in command.options if not (option.positional or option.table or option.pairs)]


def _variables(command: CommandSpec) -> set[str]:
    return {option.variable for option in command.options if not option.table}


def _tables(command: CommandSpec) -> list[Option]:
    return [option for option in command.options if option.table or option.pairs]


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if not isinstance(value, dict)}
