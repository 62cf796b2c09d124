"""Options of the HTTP interface, for `adcascade serve` and `adcascade gateway`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from worker.cli.options.parser import Option, count, grouped
from worker.cli.options.times import time_option
from worker.errors import InputError
from worker.http.keys import ApiKeys, read_keys

if TYPE_CHECKING:
    from worker.http.api import ApiSettings

HTTP = grouped(
    "HTTP",
    Option("host", "address to listen on", default="127.0.0.1"),
    count("port", "port to listen on; 0: a free one", 8080, least=0, most=65535),
    time_option("deadline", "longest time to an answer; then fallback ads are answered", 50),
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
    count("max-body-bytes", "largest body of a request, in bytes; a batch may have 16 times as many", 65_536),
    count("max-connections", "most connections; one more closes the one without an answer for longest", 10_000),
    time_option("request-timeout", "longest time for a request to come in", 10_000),
    time_option("idle-timeout", "time after which a connection without requests is closed", 300_000),
)


def api_settings(options: argparse.Namespace) -> ApiSettings:
    """Return the settings of the options; read the keys."""
    for name in ("deadline", "request_timeout", "idle_timeout"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1ms")
    # aiohttp takes a while to import; --help and wrong options need not wait for it.
    from worker.http.api import ApiSettings
    from worker.http.connections import ConnectionLimits

    return ApiSettings(
        deadline=options.deadline / 1000,
        keys=None if options.api_keys is None else ApiKeys(read_keys(options.api_keys)),
        max_sessions_per_key=options.max_sessions_per_key,
        allowed_hosts=options.allow_host,
        connections=ConnectionLimits(
            max_connections=options.max_connections,
            max_body_bytes=options.max_body_bytes,
            request_timeout=options.request_timeout / 1000,
            idle_timeout=options.idle_timeout / 1000,
        ),
    )
