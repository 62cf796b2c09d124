"""Options: one declaration, four places to set it, and one line when it is wrong."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from worker.cli.main import COMMANDS, load, main
from worker.cli.options.parser import CommandSpec, Option, boolean, build_parser, integer, number, resolve
from worker.errors import InputError

COMMAND = CommandSpec(
    name="serve",
    summary="Serve.",
    options=(
        Option("beta", "how much", parse=number(least=0), default=1.5),
        Option("session-timeout", "how long", parse=integer(least=1), default=60),
        Option("policy", "which", choices=("ucbbp", "greedy"), default="ucbbp"),
        Option("users", "how many", parse=integer(least=1), repeatable=True, default=(50,)),
        Option("repeats", "again", flag=True, default=True),
    ),
    run=lambda options: 0,
)


def resolved(*arguments: str, environ: dict[str, str] | None = None) -> Namespace:
    return resolve(build_parser(COMMAND, "adcascade serve").parse_args(list(arguments)), environ or {})


def test_without_anything_the_defaults_hold() -> None:
    assert vars(resolved()) == {
        "beta": 1.5,
        "session_timeout": 60,
        "policy": "ucbbp",
        "users": (50,),
        "repeats": True,
    }


def test_the_flag_wins_over_the_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "adcascade.toml"
    file.write_text("beta = 3\nsession_timeout = 30\n[serve]\nusers = [1, 2]\nrepeats = false\n")
    environ = {"ADCASCADE_BETA": "2", "ADCASCADE_SESSION_TIMEOUT": "20", "ADCASCADE_CONFIG": str(file)}
    options = resolved("--beta", "1", environ=environ)
    assert (options.beta, options.session_timeout, options.users, options.repeats) == (1.0, 20, (1, 2), False)


def test_a_repeatable_option_collects_and_a_variable_lists_with_commas() -> None:
    assert resolved("--users", "3", "--users", "4").users == (3, 4)
    assert resolved(environ={"ADCASCADE_USERS": "5, 6"}).users == (5, 6)


def test_a_flag_can_be_turned_off() -> None:
    assert resolved("--no-repeats").repeats is False
    assert resolved(environ={"ADCASCADE_REPEATS": "off"}).repeats is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--beta", "much"], "--beta: must be a number"),
        (["--beta", "nan"], "--beta: must be finite"),
        (["--beta", "inf"], "--beta: must be finite"),
        (["--beta", "-1"], "--beta: must be at least 0"),
        (["--session-timeout", "1.5"], "--session-timeout: must be a whole number"),
        (["--policy", "best"], "one of ucbbp, greedy"),
        (["--users", "0"], "--users: must be at least 1"),
        (["--unheard-of"], "see adcascade serve --help"),
    ],
)
def test_the_error_of_a_wrong_value_names_the_allowed_ones(arguments: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolved(*arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta = [", "not valid TOML"),
        ("[serve]\nbeat = 1\n", "has no option 'beat'"),
        ("beta = 'x'", "in the config"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "adcascade.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=says):
        resolved("--config", str(file))


def test_a_boolean_has_several_spellings() -> None:
    assert [boolean(text) for text in ("1", "True", "yes", "ON")] == [True] * 4
    with pytest.raises(ValueError, match="true or false"):
        boolean("perhaps")


# ── every command ────────────────────────────────────────────────────────────────────────────────────────────────────


def leaves(command: CommandSpec, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], CommandSpec]]:
    path = (*path, command.name)
    if not command.actions:
        return [(path, command)]
    return [leaf for action in command.actions for leaf in leaves(action, path)]


EVERY = [leaf for name in COMMANDS for leaf in leaves(load(name))]


def test_the_help_shows_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    build_parser(COMMAND, "adcascade serve").print_help()
    shown = capsys.readouterr().out
    assert all(f"(default: {text})" in shown for text in ("1.5", "60", "ucbbp", "50", "on"))


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(path) for path, _ in EVERY])
def test_every_command_has_a_summary_examples_and_options_with_help(path, command, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*path, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert command.summary
    for option in command.options:
        assert not option.help.startswith(("of ", "how ", "what ", "who ")), "a noun phrase"
        assert option.positional or option.secret or f"--{option.name}" in shown
    for example in re.split(r"[&|;\\\n]+", "\n".join(command.examples)):
        if "adcascade" in (words := shlex.split(example, comments=True)):
            name, *arguments = words[words.index("adcascade") + 1 :]
            build_parser(load(name), name).parse_args(arguments)


def test_one_variable_means_the_same_kind_of_thing_in_every_command() -> None:
    kinds: dict[str, set[str]] = {}
    for _, command in EVERY:
        for option in command.options:
            if not option.positional:
                shape = "flag" if option.flag else "file" if option.metavar in ("FILE", "DIR") else "value"
                kinds.setdefault(option.variable, set()).add(shape)
    assert {name: sorted(shapes) for name, shapes in kinds.items() if len(shapes) > 1} == {}


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("adcascade ")
    assert main(["serve-me"]) == 2
    assert "unknown command" in capsys.readouterr().err
