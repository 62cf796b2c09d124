"""A broker with TLS, SCRAM and access rules; the certificates are made for the test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from tests.kafka.conftest import broker
from tests.programs import needs
from worker.kafka.clients import admin_client
from worker.kafka.connection import Connection

# By the names that Strimzi gives them.
_PATTERNS = {"literal": ResourcePatternType.LITERAL, "prefix": ResourcePatternType.PREFIXED}
_OPERATIONS = {operation.name.replace("_", ""): operation for operation in AclOperation}

#: Only the anonymous user (the test itself, on the plain listener) and the client certificate have rights.
RULES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:CN=client",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """Addresses by protocol (`PLAINTEXT` is for the test itself), and the files that a client needs."""

    addresses: Mapping[str, str]
    ca: Path
    certificate: Path
    key: Path

    def allow(self, user: str, rules: Sequence[Mapping[str, Any]]) -> None:
        """Grant rights to a user, written as in a KafkaUser of Strimzi."""
        bindings = [
            AclBinding(
                *(ResourceType[rule["resource"]["type"].upper()], rule["resource"]["name"]),
                *(_PATTERNS[rule["resource"]["patternType"]], f"User:{user}", "*"),
                *(_OPERATIONS[operation.upper()], AclPermissionType.ALLOW),
            )
            for rule in rules
            for operation in rule["operations"]
        ]
        admin = admin_client(Connection(servers=(self.addresses["PLAINTEXT"],)))
        for future in admin.create_acls(bindings).values():
            future.result()


@contextmanager
def guarded_broker(folder: Path, users: Mapping[str, str]) -> Iterator[Guarded]:
    """Run a broker with guarded listeners for these users (name to password) in a folder."""
    ca = _authority(folder)
    server_certificate, server_key = _certificate(folder, "127.0.0.1", "subjectAltName=IP:127.0.0.1")
    certificate, key = _certificate(folder, "client", "extendedKeyUsage=clientAuth")
    pem, names = folder / "broker.pem", folder / "users.txt"
    pem.write_bytes(server_key.read_bytes() + server_certificate.read_bytes())
    names.write_text("".join(f"{user}:{password}\n" for user, password in users.items()), encoding="utf-8")
    data = str(folder / "data")
    listeners = [text for protocol in ("SASL_SSL", "SASL_PLAINTEXT", "SSL") for text in ("--listen", protocol)]
    rules = [text for name, value in RULES.items() for text in ("--set", f"{name}={value}")]
    output = broker(
        *("start", "--port", "0", "--data-dir", data, *listeners, *rules),
        *("--tls-pem", str(pem), "--tls-ca", str(ca), "--sasl-users", str(names)),
    )
    first, *others = output.splitlines()
    addresses = {"PLAINTEXT": first, **dict(line.split() for line in others)}
    try:
        yield Guarded(addresses=addresses, ca=ca, certificate=certificate, key=key)
    finally:
        broker("stop", "--kill", "--data-dir", data)


def _authority(folder: Path) -> Path:
    certificate = folder / "ca.pem"
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test authority", "-days", "2",
             "-keyout", str(folder / "ca.key"), "-out", str(certificate))  # fmt: skip
    return certificate


def _certificate(folder: Path, name: str, extension: str) -> tuple[Path, Path]:
    """Return certificate and key of a name, signed by the authority."""
    key, request, certificate, extensions = (folder / f"{name}.{end}" for end in ("key", "csr", "pem", "ext"))
    extensions.write_text(extension + "\n", encoding="ascii")
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
    _openssl("x509", "-req", "-in", str(request), "-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key"),
             "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(certificate))  # fmt: skip
    return certificate, key


def _openssl(*arguments: str) -> None:
    subprocess.run([needs("openssl", package="openssl"), *arguments], capture_output=True, check=True)
