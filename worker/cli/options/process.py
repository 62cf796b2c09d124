"""Options of the processes that answer, `worker`, `serve` and `gateway`: log, HTTP, the history to start from."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from worker.cli import log_format
from worker.cli.options.brokers import secret
from worker.cli.options.catalog import read_arms
from worker.cli.options.learning import check_fixed, context_dim, declared_ads
from worker.cli.options.parser import Option, Settings, count, defaulted, filled, grouped, number, port
from worker.cli.options.target import read_version
from worker.cli.options.times import seconds_option
from worker.errors import InputError, OtherFeaturesError
from worker.http.settings import ApiKeys, HttpSettings, read_keys
from worker.logs.format import BadLineError, LogReader
from worker.replay.relearn import relearn
from worker.runtime.clock import clock_of
from worker.runtime.process import command
from worker.runtime.settings import ProcessSettings
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.feedback import token_secret
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, check_order
from worker.stream.starting import TRUST_IMPORTED, TRUST_OWN, Start
from worker.stream.topology import Topics

#: For tests: a file with the time, in place of the machine's clock (see `clock_of`).
CLOCK = "ADCASCADE_TEST_CLOCK"

LOG = (
    Option(
        "log-format",
        "format of the log, json or text (default: text on a terminal, else json)",
        choices=log_format.FORMATS,
    ),
    Option("log-level", "lowest level in the log", choices=log_format.LEVELS, default="info"),
)

#: Options of a process that answers arrivals, `worker` or `serve`.
PROCESS = defaulted(
    ProcessSettings,
    count("max-open-sessions", "maximum sessions in memory; further arrivals get fallback ads"),
    Option("token-secret", "secret that signs the tokens of decisions, at least 16 bytes", parse=Secret, secret=True),
    Option("token-secret-file", "file with the secret that signs the tokens", metavar="FILE"),
    *LOG,
)


def process_settings(
    kind: Callable[..., Settings], name: str, options: argparse.Namespace, secrets: Sequence[str] = (), **own: Any
) -> Settings:
    """Return the settings of `worker` or `serve` and of its learner process, some its `own`; start the log."""
    signing = secret(options, "token-secret")
    dim = context_dim(options)
    check_fixed(options)
    arms, unfit = tuple[Arm, ...](), None
    try:
        arms = read_arms(options.catalog, declared=declared_ads(options))
    except OtherFeaturesError as error:
        unfit = error
    check_order(options.order, arms)
    settings = filled(
        kind,
        options,
        learner=command("worker", f"{name}-learner", *getattr(options, "arguments", ())),
        learning=filled(LearningSettings, options, dim=dim or 1),
        dim=dim,
        arms=arms,
        unfit=unfit,
        limits=filled(Limits, options),
        secret=None if signing is None else token_secret(signing),
        start=start_of(options),
        clock=clock_of(os.environ.get(CLOCK)),
        **own,
    )
    hidden = [*secrets, signing.reveal().decode() if signing is not None else ""]
    log_format.configure(format=options.log_format, level=options.log_level, secrets=hidden)
    return settings


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_HTTP = grouped(
    "HTTP",
    Option("host", "address to listen on"),
    port("port", "port to listen on; 0: a free one"),
    seconds_option("deadline", "longest wait for a decision; then fallback ads come", least=1),
    Option(
        "api-keys",
        "file with a name and a key on each line; requests need one of the keys (default: none)",
        metavar="FILE",
    ),
    Option(
        "allow-host",
        "host name that requests may be for, besides localhost and IP addresses, if there are no API keys; repeatable",
        repeatable=True,
        default=(),
        metavar="NAME",
    ),
    count("max-sessions-per-key", "most sessions that a key may open in a minute (default: no limit)"),
    count("max-connections", "most connections; one more closes the one without an answer for longest"),
)
HTTP = defaulted(HttpSettings, *_HTTP)


def http_settings(options: argparse.Namespace) -> HttpSettings:
    """Return the settings of the options; read the keys."""
    keys = None if options.api_keys is None else ApiKeys(read_keys(options.api_keys))
    return filled(HttpSettings, options, keys=keys, allowed_hosts=options.allow_host)


# ── the history to start from ────────────────────────────────────────────────────────────────────────────────────────

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
        learned = relearn(path, topics=topics).learned
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
