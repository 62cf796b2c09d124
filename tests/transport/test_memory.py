"""The memory of a process bounds its sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.runtime import memory

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
