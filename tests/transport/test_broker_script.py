"""How deploy/kafka/broker fails: with one line that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKER = Path(__file__).parents[2] / "deploy/kafka/broker"


def script(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BROKER, *arguments],
        env={"HOME": str(home), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


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
    done = script(tmp_path, "fetch", **{variable: str(folder if variable == "PATH" else tmp_path)})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert complaint in done.stderr


def test_the_status_of_no_broker_is_3(tmp_path: Path) -> None:
    done = script(tmp_path, "status", "--data-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (3, "")
