"""deploy/kafka/broker: two brokers at the same time, and one line that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.conftest import BROKER, OwnBroker


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    command = [sys.executable, str(BROKER), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_brokers_run_side_by_side(address: str, own_broker: OwnBroker, tmp_path: Path) -> None:
    assert own_broker.address != address
    assert own_broker.address in script("status", *own_broker.data).stdout
    again = script("start", *own_broker.data)
    assert (again.returncode, "already running" in again.stderr) == (1, True)
    assert script("stop", *own_broker.data).returncode == 0
    for data in (own_broker.data, ("--data-dir", str(tmp_path / "none"))):
        status = script("status", *data)
        assert (status.returncode, status.stderr) == (3, "")


@pytest.mark.parametrize(
    ("java", "variable", "complaint"),
    [(None, "PATH", "install Java 17"), ("11.0.2", "JAVA_HOME", "version 11"), ("21.0.1", "PATH", "apt install maven")],
)
def test_without_java_or_maven_the_script_says_so_in_one_line(
    tmp_path: Path, java: str | None, variable: str, complaint: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if java is not None:
        (folder / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{java}\"' >&2\n")
        (folder / "java").chmod(0o755)
    elsewhere = {"HOME": str(tmp_path), "JAVA_HOME": "", "ADCASCADE_KAFKA_CACHE": ""}
    done = script("fetch", **{**elsewhere, variable: str(folder if variable == "PATH" else tmp_path)})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert complaint in done.stderr
