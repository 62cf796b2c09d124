"""Options of the HTTP interface, for `adcascade serve` and `adcascade gateway`."""

from __future__ import annotations

import argparse

from worker.cli.options.parser import Option, count, filled, grouped, port
from worker.cli.options.times import seconds_option
from worker.http.settings import ApiKeys, HttpSettings, read_keys

_DEFAULT = HttpSettings()

HTTP = grouped(
    "HTTP",
    Option("host", "address to listen on", default=_DEFAULT.host),
    port("port", "port to listen on; 0: a free one", _DEFAULT.port),
    seconds_option("deadline", "longest wait for a decision; then fallback ads come", _DEFAULT.deadline, least=1),
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
        "max-connections",
        "most connections; one more closes the one without an answer for longest",
        _DEFAULT.max_connections,
    ),
)


def http_settings(options: argparse.Namespace) -> HttpSettings:
    """Return the settings of the options; read the keys."""
    keys = None if options.api_keys is None else ApiKeys(read_keys(options.api_keys))
    return filled(HttpSettings, options, keys=keys, allowed_hosts=options.allow_host)
