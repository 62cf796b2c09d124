"""Processes that are measured: the broker, and servers with the processor time that they use."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import worker
from worker.errors import FailedError, InputError
from worker.kafka.clients import admin_client, readable_errors
from worker.kafka.connection import Connection
from worker.runtime.process import command, environment

PREFIX: Final = "adcascade-bench-"  # of temporary folders
START: Final = 300.0  # seconds for a server to start


def broker_script() -> Path:
    """Return the script that starts a broker: a wheel carries it inside the package, a checkout beside it."""
    package = Path(worker.__file__).parent
    packaged = package / "deploy/kafka/broker"
    return packaged if packaged.exists() else package.parent / "deploy/kafka/broker"


@contextmanager
def running_broker(given: str | None, folder: Path) -> Iterator[Connection]:
    """Yield a connection to the given broker, else to one that is started in the folder and killed at the end.

    Raises `InputError` or `FailedError` before any work if something is missing on this machine.
    """
    if not Path("/proc/self/task").exists():
        raise FailedError("this benchmark needs Linux: it reads the processor time of other processes")
    if given is not None:
        connection = Connection(servers=(given,))
        with readable_errors(connection):
            admin_client(connection)
        yield connection
        return
    if not (script := broker_script()).exists():
        raise InputError(f"{script} is missing, so no broker can be started: name a running one (--broker HOST:PORT)")
    data = ("--data-dir", str(folder / "kafka"))
    try:
        # The compiler of brokers in production.
        yield Connection(servers=(_run("start", "--port", "0", *data, "--compiler", "full"),))
    finally:
        _run("stop", "--kill", *data)


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(broker_script()), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).removeprefix("broker: ")
        raise FailedError(f"no broker could be started: {reason} (or name a running one: --broker HOST:PORT)")
    return done.stdout.strip()


class ChildProcess:
    """Run ``python -m ARGUMENTS…`` as a child process; its output goes to a file in `folder`."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command(*arguments), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()  # its own children end with it
        self.process.wait()

    def url(self) -> str:
        """Wait for the URL of an HTTP server in its output."""
        deadline = time.monotonic() + START
        while True:
            words = self._log.read_text(encoding="utf-8", errors="replace").split()
            if url := next((word.strip(",") for word in words if word.startswith("http://")), ""):
                return url
            self.check()
            if time.monotonic() > deadline:
                raise FailedError(f"{self.name} did not start: {self.last_error()}")
            time.sleep(0.05)

    def check(self) -> None:
        """Raise `FailedError` if it has ended."""
        if self.process.poll() is not None:
            raise FailedError(f"{self.name} ended with {self.process.returncode}: {self.last_error()}")

    def last_error(self) -> str:
        """Return its last line of output, for a message."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "it wrote nothing")

    def processor_seconds(self) -> tuple[float, float]:
        """Return the processor time of the process with its threads: without its children, and with them."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            own = _processor_seconds(pid)
            return own, own + sum(_processor_seconds(int(child)) for child in children)
        except OSError as error:
            self.check()
            raise FailedError(f"{self.name} cannot be measured: {error}") from None


def _processor_seconds(pid: int) -> float:
    # Linux has a clock for each process, to the nanosecond; /proc/…/stat counts in steps of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)
