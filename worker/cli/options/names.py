"""Unknown names: of options, of variables with our prefix, and of tables and names in the settings file.

Rules that hold in this file:

- An unknown name is an error, with the nearest known one: a setting that is misspelt must not be ignored.
- Variables and the settings file are shared by all commands, so a name of another command is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from worker.errors import InputError

PREFIX: Final = "ADCASCADE_"

#: Variables with our prefix that are no options: of the tests, and of deploy/kafka/broker.
OTHER_VARIABLES: Final = frozenset(
    {
        "ADCASCADE_FUZZ",
        "ADCASCADE_FUZZED_REQUESTS",
        "ADCASCADE_FUZZ_SEED",
        "ADCASCADE_HOSTILE",
        "ADCASCADE_HOSTILE_ONLY",
        "ADCASCADE_HOSTILE_SEED",
        "ADCASCADE_KAFKA_CACHE",
        "ADCASCADE_KILLS",
        "ADCASCADE_SCHEDULES",
        "ADCASCADE_TEST_CLOCK",
        "ADCASCADE_TEST_KAFKA",
        "ADCASCADE_THOROUGH",
    }
)

# Kubernetes adds variables for a service, such as ADCASCADE_SERVICE_HOST and ADCASCADE_PORT=tcp://10.0.0.1:80.
_SERVICE: Final = re.compile(
    r"ADCASCADE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the nearest of the known words, or nothing if none is near.

    >>> did_you_mean("--catalogue", ["--catalog", "--dim"])
    '; did you mean --catalog?'
    """
    names = list(known)
    longer = [name for name in names if len(word) > 2 and (name.startswith(word) or word.startswith(name))]
    near = get_close_matches(word, names, n=1, cutoff=0.7) or longer[:1]
    return f"; did you mean {near[0]}?" if near else ""


def check_variables(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise `InputError` for a variable with our prefix that no command has."""
    names = {*known, *OTHER_VARIABLES}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in names and not of_kubernetes(name, environ[name]):
            raise InputError(f"unknown variable {name}{did_you_mean(name, sorted(names - OTHER_VARIABLES))}")


def of_kubernetes(name: str, value: str) -> bool:
    """Return whether a variable is one that Kubernetes adds for a service.

    >>> of_kubernetes("ADCASCADE_PORT", "tcp://10.0.0.1:80"), of_kubernetes("ADCASCADE_PORT", "8080")
    (True, False)
    """
    return bool(_SERVICE.fullmatch(name) or (name.endswith("_PORT") and _ADDRESS.match(value)))


def check_file(content: Mapping[str, Any], commands: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
    """Raise `InputError` for a table or a name of a settings file that no command has.

    `commands` has the options of every action of every command; a command without actions has them under its own name.
    """
    for place, name, known in _unknown(content, commands):
        raise InputError(f"{place}{name!r}{did_you_mean(name, sorted(known))}")


def _unknown(
    content: Mapping[str, Any], commands: Mapping[str, Mapping[str, Iterable[str]]]
) -> Iterator[tuple[str, str, set[str]]]:
    every = {option for actions in commands.values() for options in actions.values() for option in options}
    for name, value in content.items():
        if not isinstance(value, Mapping):
            if name not in every:
                yield "no command has an option ", name, every
        elif name not in commands:
            yield "there is no command for the table ", name, set(commands)
        else:
            own = {option for options in commands[name].values() for option in options}
            for inner, entry in value.items():
                if not isinstance(entry, Mapping):
                    if inner not in own:
                        yield f"[{name}] has no option ", inner, own
                elif inner not in commands[name]:
                    yield f"[{name}] has no action for the table ", inner, set(commands[name])
                else:
                    options = set(commands[name][inner])
                    yield from (
                        (f"[{name}.{inner}] has no option ", one, options) for one in entry if one not in options
                    )
