"""Options of commands: one declaration gives the flag, the environment variable and the name in the TOML file.

An option `session-timeout` is the flag ``--session-timeout``, the variable ``ADCASCADE_SESSION_TIMEOUT`` and, in the
file given with ``--config``, the name ``session_timeout``. Here are the declarations and the parser of a command line;
`worker.cli.options.places` looks the values up.
"""

from __future__ import annotations

import argparse
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from worker.errors import InputError

Parser = Callable[[str], Any]
Settings = TypeVar("Settings")

#: The beginning of all our environment variables.
PREFIX: Final = "ADCASCADE_"


@dataclass(frozen=True, slots=True)
class Option:
    """One named setting of a command.

    `help` is a noun phrase; a default that is found out at run time stands at its end, as ``(default: …)``. `parse`
    turns text into the value and raises `ValueError` with a reason. A `flag` takes no text (``--no-repeats`` turns it
    off); a `repeatable` option collects a tuple; a `positional` one has no dashes and no variable. A `secret` is never
    shown, and comes from the environment or a file only. A `table` is a table of the TOML file, and nothing else; its
    `parse` takes the table. With `pairs`, the value is a dictionary of texts: the flag is repeated (``--kafka a.b=1``)
    and `parse` reads a pair, the variable separates pairs with commas, the TOML file has a table (``[kafka]``), and a
    name that is in several places is taken from the first of them. `group` is the heading in the help, and `show`
    writes the default as it is typed.
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

    @property
    def typed(self) -> str:
        """The name on the command line, or in its help."""
        if not self.positional:
            return f"--{self.name}"
        return self.metavar or self.name.upper()

    def default_texts(self) -> list[str]:
        """Return the default as it is typed, the parts of a repeatable one separately; empty if there is none."""
        if self.default in (None, ()):
            return []
        if self.flag:
            return ["on" if self.default else "off"]
        return [*map(str, self.default)] if self.repeatable else [self.show(self.default)]


JSON = Option("json", "file for the result as JSON, or - for standard output", metavar="FILE")
CONFIG = Option("config", "TOML file with options of the same names", metavar="FILE")


def grouped(title: str, *options: Option) -> tuple[Option, ...]:
    """Return the options under a common heading in the help."""
    return tuple(replace(option, group=title) for option in options)


def defaulted(settings: type, *options: Option) -> tuple[Option, ...]:
    """Return the options with the defaults of the fields that they fill, where these settings have such fields."""
    defaults = {f.name: f.default for f in fields(settings) if f.default is not MISSING}
    return tuple(replace(option, default=defaults.get(option.attribute, option.default)) for option in options)


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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the nearest of the known words, or nothing if none is near.

    >>> did_you_mean("--catalogue", ["--catalog", "--dim"])
    '; did you mean --catalog?'
    """
    names = list(known)
    longer = [name for name in names if len(word) > 2 and (name.startswith(word) or word.startswith(name))]
    near = get_close_matches(word, names, n=1, cutoff=0.7) or longer[:1]
    return f"; did you mean {near[0]}?" if near else ""


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
    names = ["ACTION"] if command.actions else [f"[{o.typed}]" if o.optional else o.typed for o in positional]
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
        group.add_argument(option.attribute, help=text, metavar=option.typed, nargs=nargs)
        return
    if option.default is not False and (shown := option.default_texts()):
        text += f" (default: {', '.join(shown)})"
    metavar = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else "VALUE")
    how: dict[str, Any] = {"action": "append" if option.repeatable or option.pairs else "store", "metavar": metavar}
    if option.flag:
        how = {"action": argparse.BooleanOptionalAction}
    group.add_argument(f"--{option.name}", dest=option.attribute, help=text, default=None, **how)


def filled(kind: Callable[..., Settings], options: argparse.Namespace, **others: Any) -> Settings:
    """Return settings with the values of the options that have the names of its fields, and with the `others`."""
    names = inspect.signature(kind).parameters.keys() & vars(options).keys() - others.keys()
    return kind(**{name: getattr(options, name) for name in names}, **others)


def flag(name: str, value: object) -> str:
    """Return a setting as it is given on the command line.

    >>> flag("random_share", 0.1), flag("repeats", False), flag("order", ("a", "b"))
    ('--random-share 0.1', '--no-repeats', '--order a,b')
    """
    value = ",".join(map(str, value)) if isinstance(value, tuple) else value
    option = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}"
