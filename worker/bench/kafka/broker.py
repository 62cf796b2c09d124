"""The broker that `adcascade bench kafka` measures on: the given one, or one that runs for the benchmark only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import worker
from worker.errors import FailedError, InputError
from worker.kafka.clients import admin_client, run_client
from worker.kafka.connection import Connection


def broker_script() -> Path:
    """Return the script that starts a broker: a wheel carries it inside the package, a checkout beside it."""
    package = Path(worker.__file__).parent
    packaged = package / "deploy/kafka/broker"
    return packaged if packaged.exists() else package.parent / "deploy/kafka/broker"


@contextmanager
def running_broker(given: str | None) -> Iterator[Connection]:
    """Yield a connection to the given broker, else to one that is started now and killed at the end.

    Raises `InputError` or `FailedError` before any work if something is missing on this machine.
    """
    if not Path("/proc/self/statm").exists():
        raise FailedError("bench kafka needs Linux: it reads the processor time and the memory of other processes")
    if given is not None:
        connection = Connection(servers=(given,))
        run_client(connection, _answers(connection))
        yield connection
        return
    if not (script := broker_script()).exists():
        raise InputError(f"{script} is missing, so no broker can be started: name a running one (--broker HOST:PORT)")
    try:
        folder = tempfile.mkdtemp(prefix="adcascade-bench-")
    except OSError:
        raise InputError("no folder for temporary files can be written: set TMPDIR to one that can") from None
    data = ("--data-dir", f"{folder}/kafka")
    try:
        # The compiler of brokers in production.
        yield Connection(servers=(_run("start", "--port", "0", *data, "--compiler", "full"),))
    finally:
        _run("stop", "--kill", *data)
        shutil.rmtree(folder, ignore_errors=True)


async def _answers(connection: Connection) -> None:
    async with admin_client(connection) as admin:
        await admin.list_topics()


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(broker_script()), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).removeprefix("broker: ")
        raise FailedError(f"no broker could be started: {reason} (or name a running one: --broker HOST:PORT)")
    return done.stdout.strip()
