"""The command line: find the command, resolve its options, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import keyword
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from worker import __version__
from worker.cli.options.parser import CommandSpec, build_parser, did_you_mean
from worker.cli.options.places import resolve
from worker.console import check_writable
from worker.errors import AdcascadeError, InputError
from worker.runtime.process import run_child

#: Options that name files to read, and files to write.
READ = ("log", "file", "parameters", "catalog", "config")
WRITTEN = ("json", "html", "output", "plot", "record", "report", "write_arms")

#: Commands by name with their one-line summaries; each lives in `worker.cli.<name>` as `COMMAND` and is imported
#: only when called, so that `--help` is quick.
COMMANDS = {
    "demo": "run everything in one process: simulated users, live view, metrics, report",
    "serve": "serve over HTTP on this machine, without Kafka, durable in a state folder",
    "worker": "serve and learn on Kafka, with any number of workers",
    "gateway": "answer HTTP requests for ads, in front of Kafka",
    "traffic": "send simulated users to the workers, and measure pseudo-regret and delays",
    "topics": "create the topics on Kafka, or check existing ones",
    "simulate": "repeat the experiments of the paper: policies, numbers of users, seeds",
    "explain": "show why a slate is chosen: probability, Q, width and bonus of every arm",
    "parameters": "show, export, tag, roll back, freeze and unfreeze parameters",
    "arms": "add, price, retire and list ads, or make them those of a file",
    "features": "change the declared features while serving and learning go on",
    "record": "write the topics of Kafka to a log file",
    "import": "turn a table of displays of another system into a log",
    "export": "write the sessions of a log as a table for other tools",
    "forget": "find what is kept of a person, and delete what can be deleted",
    "replay": "repeat a recorded log, and report the first difference",
    "report": "say what was earned in a day or a week, by which ads and users, and what changed",
    "evaluate": "estimate from a recorded log what another policy would have earned",
    "bench": "measure this machine, as ratios within one run",
}
#: The learner processes of commands, which the commands start themselves, with their own options and variables.
LEARNERS = {"worker-learner": "worker.kafka.learner", "serve-learner": "worker.serve.learner"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 failed, 2 wrong input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except InputError as error:
        return _report(error, 2)
    except AdcascadeError as error:
        return _report(error, 1)
    except KeyboardInterrupt:
        sys.stderr.write("\nadcascade: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of the output has ended (`… | head`): not a failure. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"adcascade {__version__}\n")
        return 0
    if arguments[0] in LEARNERS:
        return run_child(partial(_learn, *arguments))
    command = load(arguments[0])
    parsed = build_parser(command, f"adcascade {command.name}").parse_args(arguments[1:])
    options = resolve(parsed, load_all=lambda: [load(name) for name in COMMANDS])
    options.arguments = tuple(arguments[1:])
    check_writable(*(getattr(options, name, None) for name in WRITTEN))
    for name in ("html", "output", "report"):
        if getattr(options, name, None) == "-" and command.name != "parameters":  # its export is alone there
            raise InputError(f"--{name} needs the name of a file")
    read, written = (_paths(options, names) for names in (READ, WRITTEN))
    if both := read & written:
        raise InputError(f"{both.pop()} is named twice: an output needs another file")
    return int(parsed.command_spec.run(options) or 0)


def _learn(learner: str, *arguments: str) -> None:
    """Run the learner of a command under the command's settings."""
    name = learner.removesuffix("-learner")
    options = resolve(build_parser(load(name), f"adcascade {name}").parse_args(arguments))
    settings = importlib.import_module(f"worker.cli.{name}").read(options)
    importlib.import_module(LEARNERS[learner]).run_learner(settings)


def _paths(options: argparse.Namespace, names: Iterable[str]) -> set[Path]:
    """Return the paths that the options of these names have."""
    given = (getattr(options, name, None) for name in names)
    return {Path(path).absolute() for path in given if path not in (None, "-")}


def load(name: str) -> CommandSpec:
    """Import the command called `name`."""
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or ";"
        raise InputError(f"unknown command {name!r}{near} one of {', '.join(COMMANDS)} (see adcascade --help)")
    module = f"{name}_" if keyword.iskeyword(name) else name
    command: CommandSpec = importlib.import_module(f"worker.cli.{module}").COMMAND
    return command


def overview() -> str:
    """Return the help of `adcascade` itself."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: adcascade COMMAND [OPTIONS]\n\n"
        "Serve the ads of a session one after another, planned backwards over the whole session.\n\n"
        f"commands:\n{lines}\n\n"
        "Every option can also be set by a variable (ADCASCADE_BETA for --beta) or in a TOML file (--config).\n"
        "Options and examples: adcascade COMMAND --help\n"
    )


def _report(error: Exception, code: int) -> int:
    sys.stderr.write(f"adcascade: {' '.join(str(error).split())}\n")
    return code
