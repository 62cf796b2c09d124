"""The brokers and the credentials that every Kafka client of a worker uses."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any

from worker.errors import InputError

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Brokers and credentials.

    Credentials need TLS: aiokafka (and Faust) would send them in clear without a warning. `clear_credentials` allows
    that, for a network that is private in another way.

    >>> Connection(servers=("kafka:9092",), username="me", password="secret")
    Traceback (most recent call last):
    ...
    worker.errors.InputError: credentials would go over the network in clear: turn on TLS, or allow it expressly
    """

    servers: tuple[str, ...]
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    mechanism: str = "SCRAM-SHA-512"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    clear_credentials: bool = False

    def __post_init__(self) -> None:
        if not self.servers:
            raise InputError("no broker given")
        for server in self.servers:
            host, colon, port = server.rpartition(":")
            if not colon or not host or not port.isdigit():
                raise InputError(f"{server!r} is not a broker address such as 127.0.0.1:9092")
        if (self.username is None) != (self.password is None):
            raise InputError("a user name needs a password, and a password a user name")
        if self.mechanism not in _MECHANISMS:
            raise InputError(f"unknown SASL mechanism {self.mechanism!r}; one of {', '.join(_MECHANISMS)}")
        if self.username is not None and self.tls is None and not self.clear_credentials:
            raise InputError("credentials would go over the network in clear: turn on TLS, or allow it expressly")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of an aiokafka client.

        >>> Connection(servers=("127.0.0.1:9092",)).arguments()
        {'bootstrap_servers': ['127.0.0.1:9092'], 'security_protocol': 'PLAINTEXT', 'ssl_context': None}
        """
        channel = "PLAINTEXT" if self.tls is None else "SSL"
        arguments: dict[str, Any] = {
            "bootstrap_servers": list(self.servers),
            "security_protocol": channel,
            "ssl_context": self.tls,
        }
        if self.username is not None:
            arguments |= {
                "security_protocol": f"SASL_{channel}",
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        return arguments
