"""Options of the commands: one declaration gives the flag, the environment variable and the name in the TOML file.

An option `session-timeout` is the flag ``--session-timeout``, the variable ``ADCASCADE_SESSION_TIMEOUT`` and, in the
file given with ``--config``, the name ``session_timeout`` (at the top, or in a table named after the command, which
wins). The flag wins over the variable, the variable over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.errors import InputError

Parser = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One named setting of a command.

    `parse` turns text into the value and raises `ValueError` with a reason on text that makes no sense. A `flag` takes
    no text (``--no-repeats`` turns it off); a `repeatable` option collects a tuple; with `positional` it has no dashes
    and no variable. `secret` values are never shown, and come from the environment or a file only.
    """

    name: str
    help: str
    parse: Parser = str
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    flag: bool = False
    repeatable: bool = False
    positional: bool = False
    optional: bool = False
    secret: bool = False

    @property
    def attribute(self) -> str:
        """The name in Python and in the TOML file."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return "ADCASCADE_" + self.attribute.upper()


#: The option of every command that has a result for machines.
JSON = Option(name="json", help="write the result as JSON to FILE, or - for standard output", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command: what it takes, what it does, and how people use it.

    `run` gets one attribute per option and returns the exit code. A command with `actions` (``parameters show``) has no
    `run` of its own.
    """

    name: str
    summary: str
    examples: Sequence[str] = ()
    options: Sequence[Option] = ()
    run: Callable[[argparse.Namespace], int] | None = None
    actions: Sequence[CommandSpec] = field(default=())


# ── parsing values ───────────────────────────────────────────────────────────────────────────────────────────────────


def integer(*, least: int | None = None, most: int | None = None) -> Parser:
    """Return a parser of whole numbers within bounds.

    >>> integer(least=1)("5")
    5
    """
    return _bounded(int, "a whole number", least, most)


def number(*, least: float | None = None, most: float | None = None, above: float | None = None) -> Parser:
    """Return a parser of finite numbers within bounds; `above` is a bound that itself is not allowed.

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
    """Read a yes or no as it stands in a variable.

    >>> boolean("yes"), boolean("0")
    (True, False)
    """
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be true or false, not {text!r}") from None


# ── the parser of a command line ─────────────────────────────────────────────────────────────────────────────────────


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors that say what to do."""

    def error(self, message: str) -> Any:
        """Raise what was wrong, instead of printing the usage."""
        raise InputError(f"{message} (see {self.prog} --help)")


CONFIG = Option(name="config", help="TOML file with options of the same names", metavar="FILE")

_UNSET: Any = object()


def build_parser(command: CommandSpec, prog: str) -> ArgumentParser:
    """Return the parser of one command, with its actions as sub-commands."""
    examples = "\n".join(f"  {line}" for line in command.examples)
    parser = ArgumentParser(
        prog=prog,
        description=command.summary,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.actions:
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=ArgumentParser)
        for action in command.actions:
            sub = build_parser(action, f"{prog} {action.name}")
            actions._name_parser_map[action.name] = sub
            actions._choices_actions.append(actions._ChoicesPseudoAction(action.name, [], action.summary))
            sub.set_defaults(_command=action)
        return parser
    parser.set_defaults(_command=command)
    for option in (*command.options, CONFIG):
        _add(parser, option)
    return parser


def _add(parser: ArgumentParser, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.positional:
        parser.add_argument(
            option.attribute,
            help=text,
            metavar=option.metavar or option.name.upper(),
            nargs="?" if option.optional else None,
            default=_UNSET,
        )
        return
    shown = "" if option.default in (None, ()) else f" [{_display(option)}]"
    text = f"{text}{shown}"
    if option.secret:
        parser.epilog = (parser.epilog or "") + f"\nsecret, never a flag: {option.variable}  {option.help}"
        return
    if option.flag:
        parser.add_argument(
            f"--{option.name}",
            dest=option.attribute,
            action=argparse.BooleanOptionalAction,
            help=text,
            default=_UNSET,
        )
        return
    parser.add_argument(
        f"--{option.name}",
        dest=option.attribute,
        action="append" if option.repeatable else "store",
        metavar=option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else "VALUE"),
        help=text,
        default=_UNSET if not option.repeatable else None,
    )


def _display(option: Option) -> str:
    if option.repeatable:
        return ", ".join(str(value) for value in option.default)
    return str(option.default)


def resolve(parsed: argparse.Namespace, environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Fill in variables, file and defaults; check every value; raise `InputError` on the first that is wrong."""
    environ = os.environ if environ is None else environ
    command: CommandSpec = parsed._command
    file = _config(parsed, environ, command)
    values = {}
    for option in command.options:
        given = getattr(parsed, option.attribute, _UNSET)
        if given is not _UNSET and given is not None:
            shown = (option.metavar or option.name.upper()) if option.positional else f"--{option.name}"
            values[option.attribute] = _parse(option, given, shown)
        elif not option.positional and option.variable in environ:
            text: Any = environ[option.variable]
            text = [part.strip() for part in text.split(",")] if option.repeatable else text
            values[option.attribute] = _parse(option, text, option.variable)
        elif option.attribute in file and not option.positional:
            values[option.attribute] = _parse(option, file[option.attribute], f"{option.attribute} in the config file")
        elif option.positional and not option.optional:
            raise InputError(f"{option.metavar or option.name.upper()} is missing: {option.help}")
        else:
            values[option.attribute] = option.default
    return argparse.Namespace(**values)


def _parse(option: Option, given: Any, where: str) -> Any:
    if option.repeatable:
        given = given if isinstance(given, list) else [given]
        return tuple(_parse_one(option, part, where) for part in given)
    return _parse_one(option, given, where)


def _parse_one(option: Option, given: Any, where: str) -> Any:
    if option.flag:
        if isinstance(given, bool):
            return given
        parse: Parser = boolean
    else:
        parse = option.parse
    text = given if isinstance(given, str) else str(given)
    if option.choices and text not in option.choices:
        raise InputError(f"{where}: unknown value {text!r}; one of {', '.join(option.choices)}")
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _config(parsed: argparse.Namespace, environ: Mapping[str, str], command: CommandSpec) -> dict[str, Any]:
    given = getattr(parsed, "config", _UNSET)
    path = environ.get(CONFIG.variable) if given is _UNSET else given
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from None
    table = content.get(command.name)
    merged = {name: value for name, value in content.items() if not isinstance(value, dict)}
    own = table if isinstance(table, dict) else {}
    unknown = set(own) - {option.attribute for option in command.options}
    if unknown:
        raise InputError(f"--config {path}: [{command.name}] has no option {sorted(unknown)[0]!r}")
    return merged | own
