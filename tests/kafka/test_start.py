"""What is refused before a worker starts, and how the broker script fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.conftest import BROKER
from worker.errors import FailedError, InputError
from worker.kafka.connection import Connection
from worker.kafka.faust import compat as pins


def test_the_installed_libraries_are_the_ones_this_was_written_against() -> None:
    pins.check()


def test_another_version_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pins.VERSIONS, "aiokafka", "9.9.9")
    with pytest.raises(FailedError, match=r"pip install aiokafka==9\.9\.9"):
        pins.check()


def test_a_library_with_the_right_number_and_another_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pins.SIGNATURES, "aiokafka.client:AIOKafkaClient._wait_on_metadata", "self topic patience")
    with pytest.raises(FailedError, match="_wait_on_metadata takes"):
        pins.check()
    monkeypatch.setitem(pins.SIGNATURES, "aiokafka.client:AIOKafkaClient._wait_on_metadata", "self topic")
    monkeypatch.setitem(pins.SIGNATURES, "aiokafka.client:AIOKafkaClient.gone", "self")
    with pytest.raises(FailedError, match="does not exist"):
        pins.check()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"servers": ()}, "no broker"),
        ({"servers": ("kafka",)}, "not a broker address"),
        ({"servers": ("k:1",), "username": "me"}, "needs a password"),
        ({"servers": ("k:1",), "username": "me", "password": "x"}, "in clear"),
        ({"servers": ("k:1",), "mechanism": "GSSAPI"}, "unknown SASL mechanism"),
    ],
)
def test_a_connection_that_makes_no_sense_is_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Connection(**arguments)  # type: ignore[arg-type]


def test_a_password_is_never_shown() -> None:
    connection = Connection(servers=("k:1",), username="me", password="hush-hush", clear_credentials=True)
    assert "hush-hush" not in repr(connection)
    assert connection.arguments()["security_protocol"] == "SASL_PLAINTEXT"


def script(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BROKER, *arguments],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_broker_script_says_in_one_line_that_java_is_missing(tmp_path: Path) -> None:
    done = script(tmp_path, "start", "--data-dir", str(tmp_path / "k"), PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install Java 17" in done.stderr


def test_the_broker_script_says_in_one_line_that_java_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "bin/java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    done = script(tmp_path, "fetch", JAVA_HOME=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "version 11" in done.stderr


def test_the_broker_script_says_in_one_line_that_maven_is_missing(tmp_path: Path) -> None:
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    java.chmod(0o755)
    done = script(tmp_path, "fetch", PATH=str(java.parent))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "apt install maven" in done.stderr


def test_the_status_of_no_broker_is_3(tmp_path: Path) -> None:
    done = script(tmp_path, "status", "--data-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (3, "")


def test_brokers_run_side_by_side_and_are_told_apart(address: str, tmp_path: Path) -> None:
    from tests.kafka.conftest import broker

    data = str(tmp_path / "second")
    second = broker("start", "--port", "0", "--data-dir", data)
    try:
        assert second != address
        assert second in broker("status", "--data-dir", data)
        again = subprocess.run([BROKER, "start", "--data-dir", data], capture_output=True, text=True, check=False)
        assert (again.returncode, "already running" in again.stderr) == (1, True)
    finally:
        broker("stop", "--data-dir", data)
    assert subprocess.run([BROKER, "status", "--data-dir", data], capture_output=True, check=False).returncode == 3
