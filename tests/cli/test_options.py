"""Options: one declaration, four places to set it, and one line when it is wrong."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from worker.cli.main import COMMANDS, load, main
from worker.cli.options.parser import CommandSpec, Option, build_parser, integer, number
from worker.cli.options.places import OTHER_VARIABLES, resolve
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


OTHER = CommandSpec(
    name="ads",
    summary="Ads.",
    actions=(CommandSpec(name="add", summary="Add.", options=(Option("reward", "how much", parse=number()),)),),
)


def resolved(*arguments: str, environ: dict[str, str] | None = None) -> Namespace:
    parsed = build_parser(COMMAND, "adcascade serve").parse_args(list(arguments))
    return resolve(parsed, environ or {}, load_all=lambda: (COMMAND, OTHER))


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
    with pytest.raises(InputError, match="ADCASCADE_REPEATS: must be true or false, not 'perhaps'"):
        resolved(environ={"ADCASCADE_REPEATS": "perhaps"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta = [", "not valid TOML"),
        ("[worker]\nbeat = 1\n", "unknown name 'worker.beat'; did you mean worker.beta?"),
        ("[wroker]\nbeta = 1\n", "unknown name 'wroker.beta'; did you mean worker.beta?"),
        ("betaa = 1\n", "unknown name 'betaa'; did you mean beta?"),
        ("[arms]\nreword = 1\n", "unknown name 'arms.reword'; did you mean arms.reward?"),
        ("[arms.add]\nbeta = 1\n", "unknown name 'arms.add.beta'"),
        ("beta = 'x'", "in the config"),
        ("features = 3\n", "features must be a table, [features]"),
        ("[features.user]\nage = 'number'\n", "[features] has no table 'user'"),
        ("[features.context]\nage = 'years'\n", "age must be"),
        ("[features.context]\nage = 'number'\nage = 'number'\n", "not valid TOML"),
        ("[features]\ncrosses = 'all'\n", "there is none of contexts"),
        ("[features]\ncrosses = [['a', 'sex']]\n[features.context]\na = 'number'\n", "'sex' is no declared feature"),
        ("[feature.context]\nage = 'number'\n", "unknown name 'feature.context.age'; did you mean features?"),
        (None, "--config file.toml: No such file"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(adcascade, tmp_path, monkeypatch, text: str | None, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "file.toml").write_text(text)
    ended = adcascade("worker --dim 2 --config file.toml")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert says in ended.err


def test_a_file_and_variables_are_shared_by_all_commands(tmp_path: Path) -> None:
    file = tmp_path / "adcascade.toml"
    file.write_text("reward = 2\n[ads]\nreward = 3\n[ads.add]\nreward = 4\n[serve]\nbeta = 3\n")
    assert resolved("--config", str(file), environ={"ADCASCADE_REWARD": "5"}).beta == 3
    add = build_parser(OTHER, "adcascade ads").parse_args(["add", "--config", str(file)])
    assert resolve(add, {}, load_all=lambda: (COMMAND, OTHER)).reward == 4


def test_an_unknown_variable_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"ADCASCADE_BETAA; did you mean ADCASCADE_BETA\?"):
        resolved(environ={"ADCASCADE_BETAA": "1"})
    with pytest.raises(InputError, match="ADCASCADE_BETA_PORT"):
        resolved(environ={"ADCASCADE_BETA_PORT": "80"})


def test_variables_of_tests_and_of_kubernetes_services_are_no_options() -> None:
    service = {
        "ADCASCADE_PORT": "tcp://10.0.0.1:80",
        "ADCASCADE_SERVICE_HOST": "10.0.0.1",
        "ADCASCADE_PORT_80_TCP": "x",
    }
    assert resolved(environ=dict.fromkeys(OTHER_VARIABLES, "1") | service | {"OTHER": "1"}).beta == 1.5


def test_every_variable_that_the_project_names_is_an_option_or_listed() -> None:
    root = Path(__file__).parents[2]
    files = [file for folder in ("deploy", "docs", "tests", "worker") for file in (root / folder).rglob("*")]
    files = [file for file in files if file.suffix in (".py", ".md", ".yaml", ".yml", ".sh", "") and file.is_file()]
    texts = [file.read_text(errors="ignore") for file in (*files, root / "README.md") if file != Path(__file__)]
    named = {name for text in texts for name in re.findall(r"ADCASCADE_[A-Z_]*[A-Z]", text)}
    options = {option.variable for _, command in EVERY for option in command.options} | {"ADCASCADE_CONFIG"}
    invented = {"ADCASCADE_SERVICE_HOST", "ADCASCADE_PORT", "ADCASCADE_BETAA"}
    assert named - options - invented <= OTHER_VARIABLES


# ── every command ────────────────────────────────────────────────────────────────────────────────────────────────────


#: Every command and action, with its words on the command line.
EVERY = [((name,), load(name)) for name in COMMANDS if not load(name).actions]
EVERY += [((name, action.name), action) for name in COMMANDS for action in load(name).actions]


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
    assert not re.search(r"[(\[]'|<\w+[ .]|\bNone\b|Duration\(", shown), "the repr of a Python value"
    assert command.summary
    for option in command.options:
        assert not option.help.startswith(("of ", "how ", "what ", "who ")), "a noun phrase"
        assert (
            option.positional or option.secret or (f"[{option.name}]" if option.table else f"--{option.name}") in shown
        )
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
    assert main(["wroker"]) == 2
    assert "did you mean worker?" in capsys.readouterr().err
    assert main(["arms", "retier", "a"]) == 2
    assert "unknown action 'retier'; did you mean retire?" in capsys.readouterr().err
