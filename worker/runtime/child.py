"""Child processes of this program: one protocol for the learner of a worker, of `serve`, and the run beside a demo.

Rules that hold in this file:

- The child's standard input is a pipe from the parent, which writes nothing. The pipe ends with the parent, however
  that ends, also by `kill -9`, and the child ends with the pipe. Signals are for the parent.
- On its standard output the child reports, in lines of JSON. A report with a `failure` is the last one.
- A parent that does not read makes its child wait: a pipe holds 64 KB.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from worker.errors import AdcascadeError

log = logging.getLogger(__name__)

#: Bytes that are read from a pipe in one call.
_CHUNK: Final = 1 << 16
#: Bytes of the longest line that a child may write: a few versions of the largest model.
LONGEST: Final = 64 << 20


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every report of a child may have: the failure that ends it."""

    failure: str = ""


ReportT = TypeVar("ReportT", bound=Report)


class ChildError(Exception):
    """A child has ended, or has to be ended; the text continues a sentence that begins with its name."""


# ── the parent ───────────────────────────────────────────────────────────────────────────────────────────────────────


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of a child that runs a module, to be started in `environment`."""
    # -P: by itself `python -m` looks in the current folder first, which may have another package of this name.
    return sys.executable, "-P", "-m", module, *arguments


def environment() -> dict[str, str]:
    """Return the variables of a child that finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


class Child(Generic[ReportT]):
    """A child process as its parent sees it.

    Parameters
    ----------
    arguments : its command line
    kind : the type of its reports
    apart : whether signals to the parent's process group, such as Ctrl-C on a terminal, do not reach it
    longest : bytes of the longest line that it may write
    """

    def __init__(
        self, arguments: Sequence[str], kind: type[ReportT], *, apart: bool = False, longest: int = LONGEST
    ) -> None:
        self._process = subprocess.Popen(
            arguments,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0 if apart else None,
        )
        self._decode = msgspec.json.Decoder(kind).decode
        self._longest = longest
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._readable = select.poll()
        self._readable.register(self._output, select.POLLIN)
        self._parts: list[bytes] = []  # of a line that has not ended

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def receive(self, wait: float = 0.0) -> Iterator[ReportT]:
        """Yield reports that have come; if there are none, wait at most so many seconds for the first.

        Raises `ChildError` if the child has ended, has failed, or has written what cannot be read.
        """
        if not self._readable.poll(1000 * wait):
            return
        data = os.read(self._output, _CHUNK)
        if not data:
            raise ChildError(self._ending())
        begun, *lines = data.split(b"\n")
        self._parts.append(begun)
        if sum(map(len, self._parts)) > self._longest:
            raise ChildError(f"wrote a line of more than {self._longest} bytes")
        if lines:
            whole, self._parts = b"".join(self._parts), [lines.pop()]
            for line in (whole, *lines):
                yield self._report(line)

    def _report(self, line: bytes) -> ReportT:
        try:
            report = self._decode(line)
        except msgspec.MsgspecError as error:
            raise ChildError(f"wrote a report that cannot be read: {error}") from None
        if report.failure:
            raise ChildError(f"failed: {report.failure}")
        return report

    async def readable(self) -> None:
        """Wait until `receive` has something to read."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._output, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._output)

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass

    async def end_soon(self) -> None:
        """Kill the process and wait until it has ended, also if that is cancelled meanwhile."""
        ending = asyncio.ensure_future(asyncio.to_thread(self.end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    def _ending(self) -> str:
        code = self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_child(work: Callable[[], None]) -> int:
    """Do the work of a child process: it ends with its parent, and reports its failure; return the exit code."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        work()
    except AdcascadeError as error:
        failure = str(error)
    except Exception as error:
        log.exception("a child process failed")
        failure = f"{type(error).__name__}: {error}"
    else:
        return 0
    report(Report(failure=failure))
    return 1


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def report(message: Any) -> None:
    """Write a line to the parent; if the parent has ended, end."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)
