"""Servers in processes of their own, with the processor time and the memory that they use."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from worker.bench.kafka.processes import processor_seconds
from worker.errors import FailedError
from worker.runtime.child import command, environment

T = TypeVar("T")

_START: Final = 60.0  # seconds for a server to start


class ServerProcess:
    """A server in a process of its own; its URL is in its output."""

    def __init__(self, name: str, folder: Path, arguments: list[str]) -> None:
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command(*arguments), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.url = ""

    def __enter__(self) -> ServerProcess:
        deadline = time.monotonic() + _START
        while not self.url:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            self.url = next((word.strip(",") for word in text.split() if word.startswith("http://")), "")
            if not self.url and (self._process.poll() is not None or time.monotonic() > deadline):
                self._process.kill()
                raise FailedError(f"{self._name} did not start: {text[-500:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def processor_seconds(self) -> float:
        """Return the processor time of the process and its threads, without its children."""
        return processor_seconds(self._process.pid)

    def resident_memory(self) -> int:
        """Return the bytes that the process and its children hold."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        pages = sum(
            int(Path(f"/proc/{one}/statm").read_text(encoding="ascii").split()[1]) for one in (str(pid), *children)
        )
        return pages * 4096


@contextmanager
def idle_connections(url: str, count: int) -> Iterator[int]:
    """Hold connections to a server while the context is open; yield how many the system allows."""
    idle = command("worker.bench.http.idle", url, str(count))
    with subprocess.Popen(idle, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            if not line.strip().isdigit():
                raise FailedError("the idle connections could not be opened")
            yield int(line)
        finally:
            process.stdin.close()


def played(kind: type[T], seconds: float, module: str, *arguments: str) -> T:
    """Run a client in a process of its own, for so many seconds; return its result."""
    ended = subprocess.run(
        command(module, *arguments), env=environment(), capture_output=True, check=False, timeout=seconds + 60
    )
    if ended.returncode:
        raise FailedError(f"the client failed: {ended.stderr.decode(errors='replace')[-500:]}")
    return msgspec.json.decode(ended.stdout, type=kind)
