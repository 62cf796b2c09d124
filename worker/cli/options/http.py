"""Options of the HTTP interface, for `adcascade serve` and `adcascade gateway`."""

from __future__ import annotations

import argparse

from worker.cli.options.parser import Option, count, grouped
from worker.cli.options.times import time_option
from worker.http.settings import ApiKeys, HttpSettings, read_keys

_DEFAULT = HttpSettings()


def _seconds(name: str, text: str) -> Option:
    return time_option(name, text, round(1000 * getattr(_DEFAULT, name.replace("-", "_"))), least=1)


HTTP = grouped(
    "HTTP",
    Option("host", "address to listen on", default=_DEFAULT.host),
    count("port", "port to listen on; 0: a free one", _DEFAULT.port, least=0, most=65535),
    _seconds("deadline", "longest time to an answer; then fallback ads are answered"),
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
    count(
        "max-body-bytes",
        "largest body of a request, in bytes; a batch may have 16 times as many",
        _DEFAULT.max_body_bytes,
    ),
    count(
        "max-connections",
        "most connections; one more closes the one without an answer for longest",
        _DEFAULT.max_connections,
    ),
    _seconds("request-timeout", "longest time for a request to come in"),
    _seconds("idle-timeout", "time after which a connection without requests is closed"),
)


def http_settings(options: argparse.Namespace) -> HttpSettings:
    """Return the settings of the options; read the keys."""
    return HttpSettings(
        host=options.host,
        port=options.port,
        deadline=options.deadline / 1000,
        keys=None if options.api_keys is None else ApiKeys(read_keys(options.api_keys)),
        max_sessions_per_key=options.max_sessions_per_key,
        allowed_hosts=options.allow_host,
        max_connections=options.max_connections,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout / 1000,
        idle_timeout=options.idle_timeout / 1000,
    )
