"""Child processes: they find the same modules, and end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import worker
from worker.runtime.process import command, environment

CHILD = """
from worker.runtime.process import report, run_child
def work():
    while True:
        report([{value}])
run_child(work)
"""


def test_a_child_finds_the_package_of_its_parent_wherever_it_is_started(tmp_path: Path):
    for name in ("worker", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "found.py").write_text("import json, worker; print(worker.__file__)")
    variables = environment()
    variables["PYTHONPATH"] += f":{tmp_path}"  # last: where only `found` is found first
    found = subprocess.run(command("found"), env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == worker.__file__


def test_a_child_ignores_signals_and_ends_when_its_input_does():
    with child("1") as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"[1]\n"
        for ignored in (signal.SIGINT, signal.SIGTERM):
            running.send_signal(ignored)
        assert [running.stdout.readline() for _ in range(100_000)][-1] == b"[1]\n"
        running.stdin.close()
        assert running.wait(timeout=300) == 0


def test_a_child_whose_reports_nobody_reads_ends_without_a_word():
    with child("1") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.wait(timeout=300) == 0
        assert running.stderr.read() == b""


def child(value: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    script = CHILD.format(value=value)
    return subprocess.Popen((sys.executable, "-c", script), env=environment(), stdin=pipe, stdout=pipe, stderr=pipe)
