"""Names that are like each other, and the environment variables with our prefix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

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


def check_variables(variables: Iterable[str], known: Iterable[str]) -> None:
    """Raise `InputError` for a variable that no command has."""
    names = {*known}
    for name in sorted({*variables} - names - OTHER_VARIABLES):
        raise InputError(f"unknown variable {name}{did_you_mean(name, sorted(names))}")


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
