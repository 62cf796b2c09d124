"""Many runs, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from worker.errors import FailedError
from worker.simulation.experiment.results import Run
from worker.simulation.experiment.run import run_task
from worker.simulation.experiment.settings import ExperimentSettings, ExperimentTask


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(settings: ExperimentSettings, tasks: Sequence[ExperimentTask], *, jobs: int) -> Iterator[Run]:
    """Make all runs in up to `jobs` processes; yield them as they finish."""
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from (run_task(settings, task) for task in tasks)
        return
    # Spawned, not forked: a fork would copy locked locks of other threads. The children take the number of BLAS threads
    # from the environment when they import numpy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt) as pool:
        try:
            for future in as_completed([pool.submit(run_task, settings, task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool:
            raise FailedError("a process of the experiment died, perhaps out of memory; try fewer --jobs") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ignore_interrupt() -> None:
    # Ctrl-C reaches the whole process group; the parent alone reports it and stops the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
