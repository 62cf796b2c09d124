"""Options of commands: one declaration gives the flag, the environment variable and the name in the TOML file.

An option `session-timeout` is the flag ``--session-timeout``, the variable ``ADCASCADE_SESSION_TIMEOUT`` and, in the
file given with ``--config``, the name ``session_timeout`` (at the top, or in a table named after the command, such as
``[worker]`` or ``[arms.add]``). The flag wins over the variable, the variable over the table, the table over the top,
and that over the default. Unknown flags, variables, tables and names are errors (`worker.cli.options.names`).
"""

from __future__ import annotations

import argparse
import inspect
import math
import operator
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, TypeVar

from worker.cli.options.names import PREFIX, check_file, check_variables, did_you_mean, note_unused, own_variables
from worker.console import read_file
from worker.errors import InputError

Parser = Callable[[str], Any]
Settings = TypeVar("Settings")


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
    flag. `group` is the heading in the help, and `show` writes the default as it is typed.
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
    show: Callable[[Any], str] = str

    @property
    def attribute(self) -> str:
        """The name in Python and in the TOML file."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return PREFIX + self.attribute.upper()

    def default_texts(self) -> list[str]:
        """Return the default as it is typed, the parts of a repeatable one separately; empty if there is none."""
        if self.default in (None, ()):
            return []
        if self.flag:
            return ["on" if self.default else "off"]
        if isinstance(self.default, tuple):
            return [*map(str, self.default)] if self.repeatable else [",".join(map(str, self.default))]
        return [self.show(self.default)]


JSON = Option("json", "file for the result as JSON, or - for standard output", metavar="FILE")
CONFIG = Option("config", "TOML file with options of the same names", metavar="FILE")


def grouped(title: str, *options: Option) -> tuple[Option, ...]:
    """Return the options under a common heading in the help."""
    return tuple(replace(option, group=title) for option in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command: its options, its function, and examples of its use.

    `run` receives one attribute per option and returns the exit code, if it is not 0. A command with `actions`
    (``parameters show``) has no `run`.
    """

    name: str
    summary: str
    examples: Sequence[str] = ()
    options: Sequence[Option] = ()
    run: Callable[[argparse.Namespace], int | None] | None = None
    actions: Sequence[CommandSpec] = ()


# ── parsing values ───────────────────────────────────────────────────────────────────────────────────────────────────


def count(name: str, help: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> Option:
    """Return an option for a whole number within bounds."""
    return Option(name, help, parse=integer(least=least, most=most), default=default, metavar="N")


def port(name: str, help: str, default: int = 0) -> Option:
    """Return an option for a port; any free one by default."""
    return count(name, help, default, least=0, most=65535)


def integer(*, least: int | None = None, most: int | None = None) -> Parser:
    """Return a parser of whole numbers within bounds.

    >>> integer(least=1)("5")
    5
    """
    return bounded(int, "a whole number", least=least, most=most)


def number(word: str | None = None, /, **bounds: float) -> Parser:
    """Return a parser of finite numbers within bounds (`least`, `most`, or exclusive: `above`, `below`), or of a word.

    >>> number(above=0)("0.5"), number("auto", most=1)("auto")
    (0.5, 'auto')
    """
    parse = bounded(float, "a number", **bounds)
    if word is None:
        return parse

    def parse_or_word(text: str) -> Any:
        try:
            return text if text == word else parse(text)
        except ValueError as error:
            raise ValueError(f"{error} (or {word})") from None

    return parse_or_word


#: Bounds by name: whether a value respects the bound, and the words of the refusal.
_BOUNDS: Final[Mapping[str, tuple[Callable[[float, float], bool], str]]] = {
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def bounded(
    read: Callable[[str], float], noun: str, show: Callable[[Any], str] = str, /, **bounds: float | None
) -> Parser:
    """Return a parser that refuses values beyond its bounds; `show` writes a bound as it is typed."""

    def parse(text: str) -> float:
        try:
            value = read(text)
        except ValueError:
            raise ValueError(f"must be {noun}, not {text!r}") from None
        if not math.isfinite(value):
            raise ValueError(f"must be finite, not {text}")
        for name, bound in bounds.items():
            respects, words = _BOUNDS[name]
            if bound is not None and not respects(value, bound):
                raise ValueError(f"must be {words} {show(bound)}, not {text}")
        return value

    return parse


def boolean(text: str) -> bool:
    """Read true or false from a variable.

    >>> boolean("yes"), boolean("0")
    (True, False)
    """
    try:
        return ConfigParser.BOOLEAN_STATES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be true or false, not {text!r}") from None


def pair(text: str) -> tuple[str, str]:
    """Read a name with its value; the error does not show the text, which may have a secret.

    >>> pair("brand=north face")
    ('brand', 'north face')
    """
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ValueError("must be NAME=VALUE")
    return name.strip(), value


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
            command: CommandSpec = parsed.command_spec
            flags = [flag for option in (*command.options, CONFIG) for flag in _flags(option)]
            near = did_you_mean(word, flags) if word.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return parsed


_WRONG_ACTION = re.compile(r"argument ACTION: invalid choice: '(.*?)' \(choose from (.*)\)")


def _flags(option: Option) -> list[str]:
    if option.positional or option.secret or option.table:
        return []
    return [f"--{option.name}", *([f"--no-{option.name}"] if option.flag else [])]


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
    parser.set_defaults(command_spec=command, command_path=path)
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
        group.add_argument(option.attribute, help=text, metavar=_metavar(option), nargs=nargs)
        return
    if option.default is not False and (shown := option.default_texts()):
        text += f" (default: {', '.join(shown)})"
    several = option.repeatable or option.pairs
    how: dict[str, Any] = {"action": "append" if several else "store", "metavar": _metavar(option)}
    if option.flag:
        how = {"action": argparse.BooleanOptionalAction}
    group.add_argument(f"--{option.name}", dest=option.attribute, help=text, default=None, **how)


def _metavar(option: Option) -> str:
    if option.positional:
        return option.metavar or option.name.upper()
    return option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else "VALUE")


# ── flags, variables, file and defaults ──────────────────────────────────────────────────────────────────────────────


def resolve(
    parsed: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    load_all: Callable[[], Iterable[CommandSpec]] | None = None,
) -> argparse.Namespace:
    """Add variables, file and defaults to the flags; raise `InputError` on the first value that is wrong.

    `load_all` returns all commands, which share the variables and the file; without it unknown names pass.
    """
    variables = own_variables(os.environ if environ is None else environ)
    options: Sequence[Option] = parsed.command_spec.options
    known = {CONFIG.variable, *(option.variable for option in options)}
    if load_all is not None and not known.issuperset(variables):
        check_variables(variables, known.union(option.variable for _, _, option in _every(load_all())))
    file = _file(parsed, variables, load_all)
    return argparse.Namespace(**{option.attribute: _value(option, parsed, variables, file) for option in options})


def filled(kind: Callable[..., Settings], options: argparse.Namespace, **others: Any) -> Settings:
    """Return settings with the values of the options that have the names of its fields, and with the `others`."""
    names = inspect.signature(kind).parameters.keys() & vars(options).keys() - others.keys()
    return kind(**{name: getattr(options, name) for name in names}, **others)


def _every(commands: Iterable[CommandSpec]) -> Iterator[tuple[CommandSpec, CommandSpec, Option]]:
    """Yield all options, each with its command and its action; without actions, the command is both."""
    return (
        (command, action, option)
        for command in commands
        for action in command.actions or (command,)
        for option in action.options
    )


def _file(
    parsed: argparse.Namespace, variables: Mapping[str, str], load_all: Callable[[], Iterable[CommandSpec]] | None
) -> dict[str, Any]:
    """Return the settings of the file by name: the action's table wins over the command's, that over the top."""
    path = parsed.config or variables.get(CONFIG.variable)
    if not path:
        return {}
    text = read_file(path, "--config")
    try:
        content = tomllib.loads(text.decode())
        if load_all is not None:
            check_file(content, names := _names(load_all()))
            if parsed.config:  # the variable is for all commands
                note_unused(content, names, parsed)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    tables = {option.attribute for option in parsed.command_spec.options if option.table or option.pairs}
    settings: dict[str, Any] = {}
    for name in ("", *parsed.command_path):
        content = content.get(name, {}) if name else content
        settings |= {key: value for key, value in content.items() if key in tables or not isinstance(value, dict)}
    return settings


def _names(commands: Iterable[CommandSpec]) -> dict[str, set[str]]:
    """Return the names that each table of the file may have, for `check_file`."""
    names, tables = dict[str, set[str]](), set[str]()
    for command, action, option in _every(commands):
        if not option.positional:
            free = option.table or option.pairs
            inner = [] if free else [command.name, *([f"{command.name}.{action.name}"] if command.actions else [])]
            for table in ("", *inner):
                names.setdefault(table, set()).add(option.attribute)
            if free:
                tables.add(option.attribute)
    return names | {table: set() for table in tables}  # [features] is a table, though there is such a command


def _value(option: Option, parsed: argparse.Namespace, variables: Mapping[str, str], file: Mapping[str, Any]) -> Any:
    name, flag = option.attribute, getattr(parsed, option.attribute, None)
    if option.table:
        return option.parse(file[name]) if name in file else option.default
    if option.pairs:
        return _parse_pairs(option, flag or (), variables.get(option.variable, ""), file.get(name, {}))
    if flag is not None:
        return _parse(option, flag, _metavar(option) if option.positional else f"--{option.name}")
    if option.positional:
        return option.default
    if option.variable in variables:
        text = variables[option.variable]
        parts = [part.strip() for part in text.split(",")] if option.repeatable else text
        return _parse(option, parts, option.variable)
    return _parse(option, file[name], f"{name} in the config file") if name in file else option.default


def _parse_pairs(option: Option, flags: Iterable[str], variable: str, table: Any) -> dict[str, str]:
    """Return the pairs of the file, the variable and the flags. No error shows a value: it may be a secret."""
    if not isinstance(table, Mapping):
        raise InputError(f"{option.attribute} in the config file must be a table [{option.attribute}]")
    pairs = dict(_flat(table, option.attribute))
    pairs |= _pairs((text for text in _NEXT_PAIR.split(variable) if text.strip()), option.variable)
    for name, value in _pairs(flags, f"--{option.name}").items():
        if option.hidden(name):
            raise InputError(
                f"--{option.name} {name}: the list of processes would show its value; put it into {option.variable}, "
                f"or into the table [{option.attribute}] of the --config file"
            )
        pairs[name] = value
    return pairs


#: A comma before the next pair. Values may have commas, too.
_NEXT_PAIR = re.compile(r"\s*,\s*(?=[\w.]+=)")


def _pairs(texts: Iterable[str], where: str) -> dict[str, str]:
    try:
        return dict(map(pair, texts))
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


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
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    if option.choices and text not in option.choices:
        near = did_you_mean(text, option.choices)
        raise InputError(f"{where}: unknown value {text!r}{near or ';'} one of {', '.join(option.choices)}")
    try:
        return boolean(text) if option.flag else option.parse(text)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
