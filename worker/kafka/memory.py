"""How the processes of a worker treat their memory."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

#: Seconds between two times that what is free is given back to the system.
GIVE_BACK = 2.0


def collect_garbage_rarely() -> None:
    """Look for cycles rarely; there are few.

    Every record makes a few containers, and Python goes through all of memory after some thousands of them. With
    100,000 sessions open that was 12 of 27 µs per event.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def return_memory_periodically() -> None:
    """Give free memory back to the system every few seconds, where the C library can (glibc).

    It keeps what a process once needed, for the next time: after a worker was far behind that is a lot.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def give_back() -> None:
        while True:
            time.sleep(GIVE_BACK)
            trim(0)

    threading.Thread(target=give_back, name="give-back", daemon=True).start()
