"""What a process no longer needs goes back to the system."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from worker.kafka import memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can give memory back")
def test_free_memory_goes_back_though_what_lies_above_it_is_still_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [bytes(2000) for _ in range(50_000)]
    kept = blocks[::1000]
    full = resident()
    del blocks
    assert full - resident() < 50e6, "nothing went back by itself"
    monkeypatch.setattr(memory, "RETURN_INTERVAL", 0.01)
    memory.return_memory_periodically()
    deadline = time.monotonic() + 20
    while full - resident() < 50e6:
        assert time.monotonic() < deadline, f"only {(full - resident()) / 1e6:.0f} MB went back"
        time.sleep(0.01)
    assert len(kept) == 50
