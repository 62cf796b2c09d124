"""Memory of a process: what it no longer needs goes back to the system, and what it has bounds its sessions."""

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
    monkeypatch.setattr(memory, "KEPT", 1 << 40)
    assert not memory.return_memory(ctypes.CDLL(None)), "a version may need it soon"
    assert full - resident() < 50e6
    monkeypatch.setattr(memory, "KEPT", 40 << 20)
    monkeypatch.setattr(memory, "RETURN_INTERVAL", 0.01)
    memory.reuse_memory()
    deadline = time.monotonic() + 20
    while full - resident() < 50e6:
        assert time.monotonic() < deadline, f"only {(full - resident()) / 1e6:.0f} MB went back"
        time.sleep(0.01)
    assert len(kept) == 50


GB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine with these files of the system, and 8 GB available."""
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GB}\n"}, 2 * GB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * GB),
        ({"proc/self/cgroup": "0::/pod/c\n", "sys/fs/cgroup/pod/memory.max": f"{GB}\n"}, GB),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n3:memory:/docker/c\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GB}\n",
            },
            3 * GB,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/docker/c\n0::/\n",
                "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8 * GB,
        ),
    ],
)
def test_the_memory_is_that_of_the_machine_or_of_the_control_group(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert memory.available_memory(machine(tmp_path, files)) == expected


def test_memory_that_is_not_known_has_a_default(tmp_path: Path) -> None:
    assert memory.available_memory(tmp_path) is None
    assert memory.sessions_that_fit(16, 10, None) == 100_000
    assert memory.sessions_that_fit(16, 10, GB // 8) == 10_000
