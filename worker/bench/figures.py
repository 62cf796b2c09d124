"""Shared by the benchmarks: measuring time and memory, and showing figures.

Absolute times depend on the machine, so a figure with a target is a ratio of two measurements, taken in turn within one
run. Time is processor time, which other processes do not add to.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from worker.console import table
from worker.errors import FailedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `least` or `most` is its target, if it has one."""

    name: str
    value: float
    unit: str
    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if there is none.

        >>> Figure("speed", 120.0, "×", least=100).met
        True
        """
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def record(self) -> dict[str, Any]:
        """Return the figure as it is written to JSON."""
        target = {"least": self.least, "most": self.most, "met": self.met}
        return {"name": self.name, "value": self.value, "unit": self.unit, **target, "detail": self.detail}


def medians(work: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each piece of work, run in turn; a first round does not count."""
    return {name: statistics.median(times) for name, times in _measured(work, rounds).items()}


def fastest(work: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the least processor seconds of each piece of work, run in turn: what other processes slow down least."""
    return {name: min(times) for name, times in _measured(work, rounds).items()}


def _measured(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for done in range(rounds + 1):
        for name, call in work.items():
            began = time.process_time()
            call()
            if done:
                seconds[name].append(time.process_time() - began)
    return seconds


def in_process(work: Callable[..., T], *arguments: object) -> T:
    """Run work in a process of its own, so that the memory of this one does not count."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@contextmanager
def one_blas_thread() -> Iterator[str]:
    """Limit BLAS to one thread and yield its name; raise `FailedError` if it cannot be limited."""
    with threadpool_limits(limits=1, user_api="blas"):
        libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        for pool in libraries:
            if pool["num_threads"] != 1:
                raise FailedError(
                    f"{pool['internal_api']} uses {pool['num_threads']} threads and cannot be limited to one"
                )
        yield ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in libraries) or "an unknown BLAS"


def peak_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    # A child inherits the peak of getrusage from its parent, so it is the second choice.
    peak = _process_status("VmHWM:")
    if peak is not None:
        return peak
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


def resident_memory() -> int:
    """Return the memory of this process now, in bytes; its peak where there is no /proc."""
    now = _process_status("VmRSS:")
    return peak_memory() if now is None else now


def _process_status(field: str) -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def machine() -> dict[str, str]:
    """Return the machine and the versions that the figures belong to."""
    return {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "cpu": _cpu()}


def busy() -> str | None:
    """Return a warning if other processes keep the processors busy, else None.

    They share caches and arithmetic units, which slows the planning kernel more than a loop in Python, so even ratios
    of processor time are blurred.
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
