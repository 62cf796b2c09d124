"""The options of a connection to Kafka.

All settings of librdkafka pass through (`--kafka`). The flags of TLS and SASL are short forms of the usual ones.

A secret is never a flag, because flags are visible in the list of processes. It comes from the environment, from a file
that the environment or a flag names, or from the configuration file.
"""

from __future__ import annotations

import argparse
import ssl
from typing import NoReturn, TypeAlias

from worker.cli.options.parser import Option, grouped
from worker.console import read_file
from worker.errors import InputError
from worker.kafka.connection import Connection, is_secret
from worker.secret import Secret
from worker.stream.topology import Topics

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
KAFKA = "connection to Kafka"

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
        "setting of librdkafka, such as client.rack=eu-1a; repeatable",
        pairs=True,
        hidden=is_secret,
        metavar="NAME=VALUE",
    ),
    Option("tls", "TLS connection; implied by the other --tls options", flag=True, default=False),
    Option("tls-ca", "trusted certificates, PEM (default: those of the system)", metavar="FILE"),
    Option("tls-cert", "client certificate, PEM", metavar="FILE"),
    Option("tls-key", "key of the client certificate, PEM, without a passphrase", metavar="FILE"),
    Option("sasl-mechanism", "SASL mechanism", choices=MECHANISMS, default="SCRAM-SHA-512"),
    Option("sasl-username", "SASL user name (default: no authentication)", metavar="NAME"),
    Option("sasl-password", "SASL password", parse=Secret, secret=True),
    Option("sasl-password-file", "file with the SASL password", metavar="FILE"),
    Option(
        "allow-plaintext-credentials",
        "permission to send credentials without TLS, for a private network",
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
    settings = {"sasl.mechanism" if name == "sasl.mechanisms" else name: value for name, value in options.kafka.items()}
    for flag, name, value in (*_tls(options), *_sasl(options)):
        if name in settings:
            raise InputError(f"{flag} and the Kafka setting {name} are both given: remove one of them")
        settings[name] = value
    made = Connection(
        servers=tuple(server.strip() for server in options.broker.split(",") if server.strip()),
        settings=settings,
        clear_credentials=options.allow_plaintext_credentials,
    )
    made.check()
    return made


def topic_names(options: argparse.Namespace) -> Topics:
    """Return the topic names under the prefix."""
    return Topics(options.prefix)


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


#: A short form: its flag, and the setting of librdkafka with its value.
_Short: TypeAlias = tuple[str, str, str]


def _sasl(options: argparse.Namespace) -> list[_Short]:
    user, password = options.sasl_username, secret(options, "sasl-password")
    if user is None and password is None:
        return []
    if user is None:
        raise InputError("--sasl-username is missing: a SASL password is given without a user name")
    if password is None:
        raise InputError(
            f"--sasl-username {user} needs a password: set ADCASCADE_SASL_PASSWORD, or name a file with "
            "ADCASCADE_SASL_PASSWORD_FILE"
        )
    tls = _wants_tls(options)
    if not tls and not options.allow_plaintext_credentials:
        raise InputError(
            "the password would cross the network in clear text: add --tls (or --tls-ca FILE), "
            "or allow it with --allow-plaintext-credentials"
        )
    return [
        ("--sasl-username", "security.protocol", "sasl_ssl" if tls else "sasl_plaintext"),
        ("--sasl-mechanism", "sasl.mechanism", options.sasl_mechanism),
        ("--sasl-username", "sasl.username", user),
        ("ADCASCADE_SASL_PASSWORD", "sasl.password", password.reveal().decode()),
    ]


def _wants_tls(options: argparse.Namespace) -> bool:
    return bool(options.tls or options.tls_ca or options.tls_cert)


def _tls(options: argparse.Namespace) -> list[_Short]:
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if key is not None and cert is None:
        raise InputError("--tls-key is given, but --tls-cert is missing")
    if not _wants_tls(options):
        return []
    # Python's errors name what is wrong with a file; those of librdkafka do not.
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"--tls-ca {ca}: {_reason(error)}") from None
    settings = [("--tls", "security.protocol", "ssl")] if options.sasl_username is None else []
    if ca is not None:
        settings.append(("--tls-ca", "ssl.ca.location", ca))
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--tls-cert {cert}, --tls-key {key or cert}: {_reason(error)}") from None
        settings.append(("--tls-cert", "ssl.certificate.location", cert))
        settings.append(("--tls-key", "ssl.key.location", key or cert))
    return settings


def _no_passphrase() -> NoReturn:
    # Without this callback OpenSSL would prompt on the terminal, and a service has none.
    raise InputError("--tls-key: the key has a passphrase; store it without one, readable by this user only")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not usable as PEM ({error.reason or 'no readable content'})"
    return error.strerror or str(error)
