"""The brokers, and the settings that every Kafka client of this program shares.

The settings are librdkafka's own names and values (its CONFIGURATION.md), passed through. So TLS, SASL, OAUTHBEARER and
static membership are what the documentation of librdkafka says they are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from worker.errors import InputError

#: Settings that carry a guarantee of adcascade, or have a dedicated option.
RESERVED: Final = {
    "bootstrap.servers": "--broker sets it",
    "metadata.broker.list": "--broker sets it",
    "group.id": "--group sets it",
    "session.timeout.ms": "--member-timeout sets it",
    "acks": "every write is acknowledged by all replicas",
    "request.required.acks": "every write is acknowledged by all replicas",
    "enable.idempotence": "writes are idempotent where that matters",
    "transactional.id": "adcascade uses no transactions",
    "enable.auto.commit": "offsets are committed when their results are durable",
    "enable.auto.offset.store": "offsets are committed when their results are durable",
    "auto.offset.reset": "a lost position is reported and handled",
    "isolation.level": "only committed records are read",
    "enable.partition.eof": "the ends of partitions are needed",
    "partition.assignment.strategy": "the partitions of all inputs must stay together",
    "delivery.report.only.error": "all reports are needed",
}

_CALLBACKS: Final = ("error_cb", "log_cb", "oauth_cb", "stats_cb", "throttle_cb", "on_delivery", "logger")


class _LibraryFilter(logging.Filter):
    """Drops what librdkafka repeats, as it does while a broker is down, and its remarks on settings.

    All clients share their settings, so that it finds those of producers in consumers and the reverse.
    """

    interval = 30.0

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        kind = text.rpartition("]: ")[2].translate(_NO_DIGITS)  # whichever client and thread says it
        now = monotonic()
        if "CONFWARN" in text or now < self._logged.get(kind, -inf) + self.interval:
            return False
        self._logged = {**{one: at for one, at in self._logged.items() if now < at + self.interval}, kind: now}
        return True


_NO_DIGITS: Final = str.maketrans("", "", "0123456789")

#: Log of librdkafka. Commands without a log show none of it: their errors have the cause.
LIBRARY_LOG: Final = logging.getLogger("worker.kafka.librdkafka")
LIBRARY_LOG.setLevel(logging.WARNING)
LIBRARY_LOG.addFilter(_LibraryFilter())
LIBRARY_LOG.addHandler(logging.NullHandler())

#: Log of clients whose errors are raised.
SILENT_LOG: Final = logging.getLogger("worker.kafka.silent")
SILENT_LOG.propagate = False
SILENT_LOG.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Brokers and client settings.

    Credentials need TLS: librdkafka would send them in clear without a warning. `clear_credentials` allows that, for a
    network that is private in another way.

    >>> Connection(servers=("kafka:9092",), settings={"sasl.username": "me", "sasl.password": "secret"})
    Traceback (most recent call last):
    ...
    worker.errors.InputError: credentials would go over the network in clear: turn on TLS, or allow it expressly
    """

    servers: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    clear_credentials: bool = False
    #: The last errors that clients of this connection reported; they say why a request failed.
    errors: deque[KafkaError] = field(default_factory=lambda: deque(maxlen=8), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.servers:
            raise InputError("no broker given")
        for server in self.servers:
            host, colon, port = server.rpartition(":")
            if not colon or not host or not port.isdigit():
                raise InputError(f"{server!r} is not a broker address such as 127.0.0.1:9092")
        for name in self.settings:
            if name in RESERVED:
                raise InputError(f"the Kafka setting {name} cannot be changed: {RESERVED[name]}")
            if name in _CALLBACKS:
                raise InputError(f"{name} is no setting of librdkafka")
        protocol = self.settings.get("security.protocol", "plaintext").lower()
        secret = any(name.startswith("sasl.") and is_secret(name) for name in self.settings)
        if (secret or protocol == "sasl_plaintext") and not protocol.endswith("ssl") and not self.clear_credentials:
            raise InputError("credentials would go over the network in clear: turn on TLS, or allow it expressly")

    @property
    def secrets(self) -> list[str]:
        """The values that no log may show."""
        return [value for name, value in self.settings.items() if is_secret(name)]

    def configuration(self, **own: Any) -> dict[str, Any]:
        """Return the configuration of a client: the settings, and its own with ``_`` for ``.``, which come first.

        >>> made = Connection(servers=("127.0.0.1:9092",)).configuration(group_id="ads")
        >>> made["bootstrap.servers"], made["group.id"]
        ('127.0.0.1:9092', 'ads')
        """
        report: Callable[[KafkaError], None] = self.errors.append
        return {
            # A broker that has just started does not know its topics yet: ask again soon.
            "topic.metadata.refresh.interval.ms": 10_000,
            # A broker that comes back is used within a second.
            "reconnect.backoff.max.ms": 1_000,
            **self.settings,
            "bootstrap.servers": ",".join(self.servers),
            "error_cb": report,
            "logger": LIBRARY_LOG,
            **{name.replace("_", "."): value for name, value in own.items()},
        }

    def check(self) -> None:
        """Raise `InputError` if librdkafka does not know a setting, or refuses its value. Waits for no broker."""
        try:
            Producer(self.configuration(logger=SILENT_LOG)).close()
        except (KafkaException, ValueError, TypeError) as error:
            reason = reason_of(error)
            for secret in filter(None, self.secrets):
                reason = reason.replace(secret, "…")
            raise InputError(f"Kafka settings: {reason}") from None


def is_secret(name: str) -> bool:
    """Return whether the value of a setting is a secret.

    >>> is_secret("sasl.password"), is_secret("sasl.oauthbearer.client.secret"), is_secret("sasl.username")
    (True, True, False)
    """
    return name.endswith(("password", "secret", ".pem", "passphrase", "sasl.jaas.config"))


def reason_of(error: BaseException | KafkaError) -> str:
    """Return what went wrong in one line, without the names of codes."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    text = inner.str() if isinstance(inner, KafkaError) else f"{type(error).__name__} {error}".strip()
    return " ".join(text.split())
