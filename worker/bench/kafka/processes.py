"""What `adcascade bench kafka` needs around the measuring: a broker, processes, and how much a process has used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import worker
from worker.errors import FailedError, InputError

BROKER = Path(worker.__file__).parents[1] / "deploy/kafka/broker"


@contextmanager
def broker(given: str | None) -> Iterator[str]:
    """Yield the address of the broker that was given, else of one that runs for as long as this.

    Its compiler is the one that brokers in production have.
    """
    if given is not None:
        yield given
        return
    if not BROKER.exists():
        raise InputError(f"there is no {BROKER} to start a broker with: say where one runs (--broker host:port)")
    folder = tempfile.mkdtemp(prefix="adcascade-bench-")
    try:
        yield _run(str(BROKER), "start", "--port", "0", "--data-dir", f"{folder}/kafka", "--compiler", "full")
    finally:
        _run(str(BROKER), "stop", "--kill", "--data-dir", f"{folder}/kafka")
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"no Kafka broker: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


class Child:
    """A Python process of ours; what it writes goes to a file that is read only if it fails.

    Parameters
    ----------
    name : what to call it in messages
    arguments : after ``python -m``
    folder : where its log goes
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        # One BLAS thread, as the worker itself has it: more of them only fight for the same core.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """End it at once: nothing of it is needed any more. Its own children end with it."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise `FailedError` if it has ended."""
        if self.process.poll() is not None:
            raise FailedError(f"{self.name} ended with {self.process.returncode}: {self.last_words()}")

    def last_line(self) -> str:
        """Return the last line it wrote, empty if there is none."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def last_words(self) -> str:
        """Return the last line it wrote, for people."""
        return self.last_line()[:500] or "it wrote nothing"

    def processor_seconds(self) -> float:
        """Return the processor time that it has used, its threads and its own children included."""
        try:
            # The clock that Linux keeps for each process, to the nanosecond; /proc/…/stat counts in steps of 10 ms.
            return sum(time.clock_gettime(~pid << 3 | 2) for pid in self._family())
        except OSError:
            self.check()
            raise FailedError("this needs Linux: the processor time of another process is asked for") from None

    def resident_memory(self) -> int:
        """Return the bytes that it and its own children have in memory now."""
        try:
            pages = [Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1] for pid in self._family()]
        except FileNotFoundError:
            self.check()
            raise FailedError("this needs Linux: the memory of another process is read from /proc") from None
        return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")

    def _family(self) -> list[int]:
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())]
