"""How a command reaches Kafka: the options that say it, and the connection they lead to.

Secrets are never flags (they would be seen in the list of processes): they come from the environment, from a file that
the environment or a flag names, or from the configuration file.
"""

from __future__ import annotations

import argparse
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from worker.cli.options.parser import Option
from worker.errors import InputError
from worker.kafka.connection import Connection
from worker.secret import Secret
from worker.stream.topology import Topics

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


BROKER = Option(name="broker", help="brokers to begin with, host:port[,host:port…]", default="127.0.0.1:9092")
PREFIX = Option(name="prefix", help="of the topic names, PREFIX.arrivals and so on", default="ads")

SECURITY = (
    Option(name="tls", help="speak TLS; implied by the other --tls options", flag=True, default=False),
    Option(name="tls-ca", help="certificates to trust, PEM [those of the system]", metavar="FILE"),
    Option(name="tls-cert", help="the client's certificate, PEM", metavar="FILE"),
    Option(name="tls-key", help="the key of the client's certificate, PEM, without a passphrase", metavar="FILE"),
    Option(name="sasl-mechanism", help="how to prove who this is", choices=MECHANISMS, default="SCRAM-SHA-512"),
    Option(name="sasl-username", help="who this is; none: nobody in particular", metavar="NAME"),
    Option(name="sasl-password", help="the password of the SASL user", parse=Secret, secret=True),
    Option(name="sasl-password-file", help="a file with the password of the SASL user", metavar="FILE"),
    Option(
        name="allow-plaintext-credentials",
        help="send user name and password without TLS; on a network that is private in another way only",
        flag=True,
        default=False,
    ),
)

#: Everything about the connection; a command adds its own.
CONNECTION = (BROKER, PREFIX, *SECURITY)


def connection(options: argparse.Namespace) -> Connection:
    """Return the connection that the options describe.

    Raises `InputError` if they make no sense, among it if credentials would go over the network in clear.
    """
    password = secret(options, "sasl-password")
    if options.sasl_username is None and password is not None:
        raise InputError("there is a SASL password, but no user name: --sasl-username is missing")
    if options.sasl_username is not None and password is None:
        raise InputError(
            f"--sasl-username {options.sasl_username} needs a password: set ADCASCADE_SASL_PASSWORD, or name a file "
            "with ADCASCADE_SASL_PASSWORD_FILE"
        )
    tls = _tls(options)
    if options.sasl_username is not None and tls is None and not options.allow_plaintext_credentials:
        raise InputError(
            "the password would go over the network in clear: add --tls (or --tls-ca FILE), "
            "or allow it with --allow-plaintext-credentials"
        )
    return Connection(
        servers=tuple(server.strip() for server in options.broker.split(",") if server.strip()),
        tls=tls,
        mechanism=options.sasl_mechanism,
        username=options.sasl_username,
        password=None if password is None else password.reveal().decode(),
        clear_credentials=options.allow_plaintext_credentials,
    )


def topic_names(options: argparse.Namespace) -> Topics:
    """Return the names of the topics under the prefix."""
    return Topics(options.prefix)


def secret(options: argparse.Namespace, name: str) -> Secret | None:
    """Return a secret given by itself (variable) or in a file, not both; without the line end of the file."""
    attribute = name.replace("-", "_")
    given: Secret | None = getattr(options, attribute)
    path: str | None = getattr(options, f"{attribute}_file")
    variable = f"ADCASCADE_{attribute.upper()}"
    if given is not None and path is not None:
        raise InputError(f"{variable} and --{name}-file are both given: which one counts?")
    if path is not None:
        try:
            given = Secret(Path(path).read_text(encoding="utf-8").rstrip("\r\n"))
        except OSError as error:
            raise InputError(f"--{name}-file {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise InputError(f"--{name}-file {path}: is not UTF-8 text") from None
    if given is not None and not given.reveal():
        raise InputError(f"{variable if path is None else path} is empty")
    return given


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if key is not None and cert is None:
        raise InputError("--tls-key is given, but --tls-cert is missing")
    if not (options.tls or ca or cert):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"--tls-ca {ca}: {_reason(error)}") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--tls-cert {cert}, --tls-key {key or cert}: {_reason(error)}") from None
    return context


def _no_passphrase() -> NoReturn:
    # OpenSSL would ask on the terminal, and a service has none.
    raise InputError("--tls-key: the key has a passphrase; store it without one, readable by this user only")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not usable as PEM ({error.reason or 'nothing readable in it'})"
    return error.strerror or str(error)


def without_default(option: Option, **changes: Any) -> Option:
    """Return the option as it is where another one may take its place."""
    return replace(option, default=None, **changes)
