"""The options of a connection to Kafka.

All settings of librdkafka pass through (`--kafka`). User name and password have options, because a password is never a
flag, which is visible in the list of processes. It comes from the environment, or from a file that the environment or
a flag names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.cli.options.parser import Option, grouped, pair
from worker.console import read_file
from worker.errors import InputError
from worker.kafka.connection import Connection, is_secret
from worker.secret import Secret

KAFKA = "connection to Kafka"


def public_setting(text: str) -> tuple[str, str]:
    """Read a setting of librdkafka from a flag; its value must not be a secret.

    >>> public_setting("client.rack=eu-1a")
    ('client.rack', 'eu-1a')
    """
    name, value = pair(text)
    if is_secret(name):
        raise ValueError(
            f"the list of processes would show the value of {name}; put it into ADCASCADE_KAFKA, or into the table "
            "[kafka] of the --config file"
        )
    return name, value


BROKER = Option(
    "broker", "bootstrap brokers, host:port[,…]", default="127.0.0.1:9092", metavar="HOST:PORT", group=KAFKA
)
PREFIX = Option(
    "prefix", "prefix of the topic names, as in PREFIX.arrivals", default="ads", metavar="TEXT", group=KAFKA
)

SECURITY = grouped(
    KAFKA,
    Option(
        "kafka",
        "setting of librdkafka, such as client.rack=eu-1a, security.protocol=ssl or ssl.ca.location=ca.pem; repeatable",
        pairs=True,
        parse=public_setting,
        metavar="NAME=VALUE",
    ),
    Option("sasl-username", "SASL user name, with TLS and SCRAM-SHA-512 (default: no authentication)", metavar="NAME"),
    Option("sasl-password", "SASL password", parse=Secret, secret=True),
    Option("sasl-password-file", "file with the SASL password", metavar="FILE"),
    Option(
        "allow-plaintext-credentials",
        "credentials without TLS, for a private network",
        flag=True,
        default=False,
    ),
)

CONNECTION = (BROKER, PREFIX, *SECURITY)


def connection(options: argparse.Namespace) -> Connection:
    """Return the connection of the options.

    Raises `InputError` if they contradict each other, if librdkafka refuses a setting, or if credentials would cross
    the network in clear text.
    """
    # librdkafka has two names for one setting.
    given = {"sasl.mechanism" if name == "sasl.mechanisms" else name: value for name, value in options.kafka.items()}
    for name, value in given.items():
        if name.startswith("ssl.") and name.endswith(".location") and not Path(value).exists():
            raise InputError(f"the Kafka setting {name}: there is no {value}")
    login = _login(options)
    if both := given.keys() & login:
        raise InputError(f"--sasl-username and the Kafka setting {both.pop()} are both given: remove one of them")
    tls = any(name.startswith("ssl.") for name in given) or (login and not options.allow_plaintext_credentials)
    if login:
        settings = {"security.protocol": "sasl_ssl" if tls else "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-512"}
    else:
        settings = {"security.protocol": "ssl"} if tls else {}
    made = Connection(
        servers=tuple(server.strip() for server in options.broker.split(",") if server.strip()),
        settings={**settings, **login, **given},
        clear_credentials=options.allow_plaintext_credentials,
    )
    made.check()
    return made


def _login(options: argparse.Namespace) -> dict[str, str]:
    user, password = options.sasl_username, secret(options, "sasl-password")
    if user is None and password is None:
        return {}
    if user is None:
        raise InputError("--sasl-username is missing: a SASL password is given without a user name")
    if password is None:
        raise InputError(
            f"--sasl-username {user} needs a password: set ADCASCADE_SASL_PASSWORD, or name a file with "
            "ADCASCADE_SASL_PASSWORD_FILE"
        )
    return {"sasl.username": user, "sasl.password": password.reveal().decode()}


def secret(options: argparse.Namespace, name: str) -> Secret | None:
    """Return a secret from its variable or from a file, without the line end of the file; None if there is neither."""
    attribute = name.replace("-", "_")
    given: Secret | None = getattr(options, attribute)
    path: str | None = getattr(options, f"{attribute}_file")
    variable = f"ADCASCADE_{attribute.upper()}"
    if given is not None and path is not None:
        raise InputError(f"{variable} and --{name}-file are both given: remove one of them")
    if path is not None:
        try:
            given = Secret(read_file(path, f"--{name}-file").decode().rstrip("\r\n"))
        except UnicodeDecodeError:
            raise InputError(f"--{name}-file {path}: not UTF-8 text") from None
    if given is not None and not given.reveal():
        raise InputError(f"{variable if path is None else path} is empty")
    return given
