"""The processes of a worker: child processes, the protocol between the learner and its parent, and the interpreter.

Rules that hold in this file:

- The child's standard input is a pipe from the parent, which writes nothing. The pipe ends with the parent, however
  that ends, also by `kill -9`, and the child ends with the pipe. Signals are for the parent.
- On its standard output the child reports, in lines of JSON. A report with a `failure` is the last one.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from worker.errors import AdcascadeError

log = logging.getLogger(__name__)

#: Seconds that another thread may keep the interpreter while the loop waits for it (5 ms by default).
TURN: Final = 0.0005


# ── the parent ───────────────────────────────────────────────────────────────────────────────────────────────────────


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of a child that runs a module, to be started in `environment`."""
    # -P: by itself `python -m` looks in the current folder first, which may have another package of this name.
    return sys.executable, "-P", "-m", module, *arguments


def environment() -> dict[str, str]:
    """Return the variables of a child that finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


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
    report({"failure": failure})
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


# ── the interpreter ──────────────────────────────────────────────────────────────────────────────────────────────────


def collect_garbage_rarely() -> None:
    """Search for reference cycles rarely; there are few.

    Every record creates a few containers, and Python searches all of memory after some thousands of them. With 100,000
    open sessions that was 12 of 27 µs per event.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def let_the_loop_go_first() -> None:
    """Give the interpreter back to the loop soon while another thread polls, prepares a version or answers a page.

    A batch gives the interpreter up several times, and each time it waits for a whole turn of the other thread.
    """
    sys.setswitchinterval(TURN)
