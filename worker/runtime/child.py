"""A child process of this program: the modules it finds, its end, and its reports.

Its standard input is a pipe from the parent, which writes nothing. The pipe ends with the parent, however that ends,
also by `kill -9`. On its standard output the child reports, in lines of JSON.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of a child that runs a module, to be started in `environment`."""
    # -P: by itself `python -m` looks in the current folder first, which may have another package of this name.
    return sys.executable, "-P", "-m", module, *arguments


def environment() -> dict[str, str]:
    """Return the variables of a child that finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


def end_with_parent() -> None:
    """End as soon as the standard input does, and at no signal but SIGKILL."""
    ignore_signals()
    threading.Thread(target=_end_with_input, daemon=True).start()


def ignore_signals() -> None:
    """Leave the end to the parent: signals to all processes (Ctrl-C, systemd) are for it."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)


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
