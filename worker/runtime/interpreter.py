"""Garbage collection and turns of threads in the processes of a worker."""

from __future__ import annotations

import gc
import sys

#: Seconds that another thread may keep the interpreter while the loop waits for it (5 ms by default).
TURN = 0.0005


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
