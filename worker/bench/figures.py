"""What benchmarks share: how time and memory are measured, and how a figure is told.

Absolute times say more about the machine than about the code, so a figure that has a target is a ratio of two things
measured in turn within one run. Time is that of the processor, which does not run on while other processes do.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from worker.console import table
from worker.errors import FailedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number; `least` or `most` is its target, if it has one."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if there is none.

        >>> Figure(name="speed", value=120.0, unit="×", least=100).met
        True
        """
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def record(self) -> dict[str, Any]:
        """Return it for JSON."""
        target = {"least": self.least, "most": self.most, "met": self.met}
        return {"name": self.name, "value": self.value, "unit": self.unit, **target, "detail": self.detail}


def medians(work: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each piece of work, done in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for done in range(rounds + 1):
        for name, call in work.items():
            began = time.process_time()
            call()
            if done:
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


@contextmanager
def one_blas_thread() -> Iterator[str]:
    """Hold BLAS to one thread, see that it obeys, and yield what it is."""
    with threadpool_limits(limits=1, user_api="blas"):
        libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        for pool in libraries:
            if pool["num_threads"] != 1:
                raise FailedError(
                    f"{pool['internal_api']} uses {pool['num_threads']} threads and cannot be held to one"
                )
        yield ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in libraries) or "a BLAS that is not known"


def peak_memory() -> int:
    """Return the most memory, in bytes, that this process has had at once."""
    # Not getrusage first: its peak is inherited by a child, so it would count what the parent once had.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory() -> int:
    """Return the memory, in bytes, that this process has now; its peak where that cannot be told."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return peak_memory()


def machine() -> dict[str, str]:
    """Return what the figures were measured on."""
    return {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "cpu": _cpu()}


def busy() -> str | None:
    """Say so if others keep the processors busy; None if not.

    They share caches and arithmetic units with us, which slows the kernel more than a loop in Python, and so blurs
    even ratios of processor time.
    """
    waiting = os.getloadavg()[0]
    processors = os.cpu_count() or 1
    if waiting <= processors:
        return None
    return f"the machine is busy (load {waiting:.1f} on {processors} processors): the figures are blurred"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def figures_table(figures: Sequence[Figure]) -> str:
    """Lay out figures with their targets."""
    rows = [[one.name, f"{_number(one.value)} {one.unit}", _target(one), one.detail] for one in figures]
    return table(["", "measured", "target", ""], rows)


def _target(figure: Figure) -> str:
    if figure.met is None:
        return ""
    bound = f"≥ {_number(figure.least)}" if figure.least is not None else f"≤ {_number(figure.most)}"
    return f"{bound}, {'met' if figure.met else 'MISSED'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
