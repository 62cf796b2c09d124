"""`adcascade bench`: the benchmarks of this machine, as ratios within one run."""

from __future__ import annotations

import argparse

from worker.console import JSON, check_writable, progress, say, write_json
from worker.lab.bench import figures_table, machine, one_blas_thread
from worker.settings import Command


def run_core(options: argparse.Namespace) -> int:
    """Measure the decision core."""
    from worker.lab.bench_core import FIGURES, measure

    check_writable(options.json)
    figures = []
    with one_blas_thread() as blas:
        where = {**machine(), "blas": blas, "blas_threads": 1}
    with progress("measuring the core", FIGURES) as bar:
        for figure in measure():
            figures.append(figure)
            bar.describe(figure.name)
            bar.advance()
    write_json(options.json, {"bench": "core", "machine": where, "figures": [one.record() for one in figures]})
    if options.json != "-":
        say(f"{where['cpu']}, Python {where['python']}, numpy {where['numpy']}, {blas} on one thread")
        say()
        say(figures_table(figures))
    return 0


CORE = Command(
    name="core",
    summary="The decision core: planning and closing episodes against a plain dense loop, growth with K, memory.",
    examples=("adcascade bench core", "adcascade bench core --json core.json"),
    options=(JSON,),
    run=run_core,
)

COMMAND = Command(
    name="bench",
    summary="Benchmarks of this machine, as ratios within one run.",
    examples=("adcascade bench core",),
    actions=(CORE,),
)
