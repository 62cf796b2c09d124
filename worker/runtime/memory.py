"""Garbage collection and threads of the processes of a worker, and how many sessions fit into its memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: Seconds that another thread may keep the interpreter while the loop waits for it (5 ms by default).
TURN = 0.0005

#: Memory of a worker and its learner without sessions.
_IDLE = 256 << 20
#: The part of the rest that sessions may take. The learner holds them too, in less memory but for longer, and a table
#: that is taken over is there twice for a moment.
_SHARE = 0.5
#: Sessions that fit where the memory is not known.
_UNKNOWN = 100_000
_LEAST = 10_000


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


def sessions_that_fit(dim: int, horizon: int, memory: int | None) -> int:
    """Return how many open sessions a worker with `memory` bytes can hold.

    Measured: 2.1 KB for a session with d = 16 and H = 10, 3.4 KB with d = 128, with ids of 36 characters.

    >>> sessions_that_fit(16, 10, 2 << 30)
    353204
    """
    if memory is None:
        return _UNKNOWN
    session = 1_000 + 10 * dim + 150 * horizon
    return max(_LEAST, int((memory - _IDLE) * _SHARE) // session)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process and its children may use: of the machine, or of its control group."""
    limits = [*_available_on_machine(root), *_control_group_limits(root)]
    return min(limits, default=None)


def _available_on_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            yield int(amount.split()[0]) * 1024


def _control_group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the control group and of all groups that it belongs to, of version 2 and version 1."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        group = PurePosixPath(path).relative_to("/")
        for one in (group, *group.parents):
            yield from (int(limit) for limit in _lines(mount / one / file) if limit.isdecimal())  # not "max"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
