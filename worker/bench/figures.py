"""Shared by the benchmarks: measuring time, and showing figures.

Absolute times depend on the machine, so most figures with a target are ratios of two measurements, taken in turn within
one run. Time is processor time where that is possible: other processes do not add to it.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from worker.console import table
from worker.runtime.process import collect_garbage_rarely


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


def fastest(work: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the processor seconds of each piece of work, run in turn: those of the round that others slowed least.

    A first round does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, call in work.items():
            began = time.process_time()
            call()
            if turn:
                seconds[name].append(time.process_time() - began)
    return {name: min(times) for name, times in seconds.items()}


@contextmanager
def measuring() -> Iterator[str]:
    """Limit BLAS to one thread and yield its name; collect garbage as rarely as the worker and its learner do."""
    threshold = gc.get_threshold()
    collect_garbage_rarely()
    try:
        with threadpool_limits(limits=1, user_api="blas"):
            libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
            yield ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in libraries) or "an unknown BLAS"
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


def machine() -> dict[str, str]:
    """Return the machine and the versions that the figures belong to."""
    return {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "cpu": _cpu()}


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
