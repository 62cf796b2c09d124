"""Child processes of `adcascade bench kafka`, with the processor time and the memory that they use."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from worker.bench.kafka.recording import LATENESS, TIMEOUT, WINDOW
from worker.bench.stream import HORIZON
from worker.child import command, environment
from worker.errors import FailedError
from worker.stream.topology import Topics


class ChildProcess:
    """Run ``python -m ARGUMENTS…`` as a child process; its output goes to a file in `folder`, read only if it fails."""

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
        self.kill()

    def kill(self) -> None:
        """Kill it; its own children end with it."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise `FailedError` if it has ended."""
        if self.process.poll() is not None:
            raise FailedError(f"{self.name} ended with {self.process.returncode}: {self.last_error()}")

    def last_line(self) -> str:
        """Return its last line of output, empty if there is none."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def last_error(self) -> str:
        """Return its last line of output, for a message."""
        return self.last_line()[:500] or "it wrote nothing"

    def processor_seconds(self) -> float:
        """Return the processor time of the process, its threads and its children."""
        return self._total(processor_seconds)

    def own_processor_seconds(self) -> float:
        """Return the processor time of the process and its threads, without its children."""
        return self._total(processor_seconds, with_children=False)

    def resident_memory(self) -> int:
        """Return the bytes of memory that the process and its children hold now."""
        pages = self._total(lambda pid: int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]))
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def children(self, module: str = "") -> list[int]:
        """Return the ids of its children, only of those that run a module if one is given."""
        pid = self.process.pid
        found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
        return [child for child in found if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]

    def _total(self, measure: Callable[[int], float], *, with_children: bool = True) -> float:
        try:
            return sum(measure(each) for each in (self.process.pid, *(self.children() if with_children else ())))
        except OSError as error:
            self.check()
            raise FailedError(f"{self.name} cannot be measured: {error}") from None


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its threads, without its children."""
    # Linux has a clock for each process, to the nanosecond; /proc/…/stat counts in steps of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


def worker_process(broker: str, names: Topics, folder: Path, **more: str) -> ChildProcess:
    """Start a worker, with `more` options. Its arms and its dimension come from the published version."""
    options = {
        "broker": broker,
        "prefix": names.prefix,
        "group": names.prefix,
        "horizon": HORIZON,
        "window": f"{WINDOW}ms",
        "session-timeout": f"{TIMEOUT}ms",
        "lateness": f"{LATENESS}ms",
        "log-level": "warning",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ChildProcess("the worker", ["worker", "worker", *flags], folder)
