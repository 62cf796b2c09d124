"""TLS and SASL/SCRAM against a real broker: a worker serves through them, and says in one line when it may not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kafka.conftest import broker
from tests.kafka.fleet import Fleet
from tests.kafka.world import eventually
from tests.runners.traffic import SECOND, START, arrivals
from worker.cli import main

pytestmark = pytest.mark.slow

PASSWORD = "correct-horse-battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A broker with a plain listener for the test itself and a secured one for the worker."""

    plain: str
    secured: str
    ca: str

    @property
    def flags(self) -> list[str]:
        return ["--broker", self.secured, "--sasl-username", "ads", "--sasl-mechanism", "SCRAM-SHA-512"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    certificate, store = make_certificate(folder)
    plain, secret, controller = free_ports(3)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{secret},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{secret}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    flags = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    data = str(folder / "data")
    broker("start", "--port", str(plain), "--data-dir", data, *flags)
    try:
        add_user(f"127.0.0.1:{plain}", "ads", PASSWORD)
        yield Secured(plain=f"127.0.0.1:{plain}", secured=f"127.0.0.1:{secret}", ca=str(certificate))
    finally:
        broker("stop", "--kill", "--data-dir", data)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate that vouches for 127.0.0.1; return it, and a file with its key as Kafka wants them."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate, store = folder / "key.pem", folder / "ca.pem", folder / "store.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=True,
    )  # fmt: skip
    store.write_bytes(key.read_bytes() + certificate.read_bytes())
    return certificate, store


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def add_user(address: str, name: str, password: str) -> None:
    jars = broker("fetch")
    java = str(Path(os.environ["JAVA_HOME"]) / "bin/java") if os.environ.get("JAVA_HOME") else "java"
    subprocess.run(
        [java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{jars}/*", "kafka.admin.ConfigCommand",
         "--bootstrap-server", address, "--alter", "--entity-type", "users", "--entity-name", name,
         "--add-config", f"SCRAM-SHA-512=[iterations=4096,password={password}]"],
        capture_output=True, check=True,
    )  # fmt: skip


def test_a_worker_serves_over_tls_and_scram(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD_FILE", str(password))
    monkeypatch.setenv("ADCASCADE_TLS_CA", secured.ca)
    fleet = Fleet(secured.plain, "secured", tmp_path)
    fleet.set_clock(START + SECOND)
    try:
        assert main(["topics", "check", *secured.flags, "--prefix", "secured"]) == 0
        worker = fleet.serving(*secured.flags, "--log-level", "debug")
        fleet.send(arrivals(50, seconds=1))
        eventually(lambda: len(fleet.read(fleet.names.decisions)) >= 50)
        assert main(["parameters", "show", *secured.flags, "--prefix", "secured"]) == 0
        code, seconds = worker.terminate()
        assert (code, seconds < 10) == (0, True)
        assert PASSWORD not in worker.log.read_text(encoding="utf-8")
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("password", "trusted", "complaint"),
    [("wrong-password-here", True, "invalid credentials"), (PASSWORD, False, "CERTIFICATE_VERIFY_FAILED")],
)
def test_a_wrong_password_or_an_unknown_certificate_is_told_in_one_line(
    secured: Secured,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    password: str,
    trusted: bool,
    complaint: str,
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", password)
    trust = ["--tls-ca", secured.ca] if trusted else ["--tls"]
    assert main(["worker", *secured.flags, *trust, "--dim", "3"]) == 1
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
    assert password not in err
