"""`--start-from` and `--trust`: the history that version 0 starts from, a version or a log."""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from pathlib import Path

from worker.cli.options.parser import Option, number
from worker.cli.options.target import read_version
from worker.console import progress
from worker.errors import InputError
from worker.logs.format import BadLineError, LogReader
from worker.replay.relearn import relearn
from worker.stream.parameters import Parameters
from worker.stream.starting import TRUST_IMPORTED, TRUST_OWN, Start
from worker.stream.topology import Topics

STARTING = (
    Option(
        "start-from",
        "history that version 0 starts from: a version, from `replay --relearn --output` or `parameters export`, or "
        "a log, which is learned from first; ignored where there are versions",
        metavar="FILE",
    ),
    Option(
        "trust",
        f"share of the history's information that counts, above 0 and at most 1 (default: {TRUST_OWN:g}, or "
        f"{TRUST_IMPORTED:g} for sessions of another system)",
        parse=number(above=0, most=1),
    ),
)


def start_of(options: argparse.Namespace) -> Start | None:
    """Return the start that the options name; nothing is read yet."""
    path = options.start_from
    if path == "-":
        raise InputError("--start-from takes no standard input: a restart could not tell what it was")
    if path is None:
        if options.trust is not None:
            raise InputError("--trust is for --start-from FILE, which is missing")
        return None
    return Start(path=path, trust=options.trust, read=partial(_read, path), digest=partial(_digest, path))


def _read(path: str) -> Parameters:
    """Return the version in a file, or the newest one that a log teaches; the first line tells which of both it is."""
    with LogReader(path) as log:
        try:
            line = next(iter(log), None)
        except BadLineError:
            line = None
    if line is not None:
        topics = Topics(line.record.topic.rpartition(".")[0])
        learned = relearn(path, topics=topics, stage=partial(progress, unit="lines")).learned
        if learned is not None:
            return learned
    elif not Path(path).read_bytes().endswith((b"}", b"}\n")):
        raise InputError(
            f"{path}: neither a version nor a log, or damaged (a table of another system: adcascade import)"
        )
    return read_version(path)


def _digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
