"""`adcascade simulate`: the paper's experiment."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields

from worker import __version__
from worker.cli.options.learning import setting, with_defaults
from worker.cli.options.parser import JSON, CommandSpec, Option, count, integer
from worker.cli.options.world import world
from worker.console import check_writable, note, progress, table, write_file, write_result
from worker.errors import InputError
from worker.simulation.experiment import LAST, ExperimentSettings, Run, cores, run_all

DEFAULTS = ExperimentSettings()

OPTIONS = (
    setting("policy", help="policies to compare; repeatable", repeatable=True, default=DEFAULTS.policy),
    *world(DEFAULTS),
    *with_defaults(DEFAULTS, "estimator", "bonus", "beta", "epsilon", "ridge"),
    setting("warmup", help="number of round-robin episodes at the start", default=DEFAULTS.warmup),
    Option(
        "users", "sessions N per episode; repeatable", parse=integer(least=1), repeatable=True, default=DEFAULTS.users
    ),
    count("episodes", "number of episodes T", DEFAULTS.episodes, least=2),
    count("seeds", "number of seeds", DEFAULTS.seeds),
    count("seed", "first seed", DEFAULTS.seed, least=0),
    count("jobs", "number of processes (default: all processors)"),
    JSON,
    Option("plot", "plot of the regret over time and users: .png, .svg or .pdf", metavar="FILE"),
    Option("plot-structure", "plot of Q over arms and steps: .png, .svg or .pdf", metavar="FILE"),
)


def run(options: argparse.Namespace) -> int:
    """Make all runs; print a table, write JSON and plots."""
    chosen = {field.name: getattr(options, field.name) for field in fields(ExperimentSettings) if field.name != "model"}
    settings = ExperimentSettings(**chosen)
    _check_files(options, settings)
    runs = _make(settings, options.jobs or cores())
    runs.sort(key=lambda r: (settings.policy.index(r.policy), settings.users.index(r.users), r.seed))
    _draw(options, settings, runs)
    record = {"runs": [asdict(one) for one in runs], "settings": {"version": __version__, **chosen}}
    write_result(options.json, record, f"{_title(settings)}\n\n{summary(runs)}")
    return 0


def _check_files(options: argparse.Namespace, settings: ExperimentSettings) -> None:
    """Refuse, before any work, files that could not be written."""
    files = [path for path in (options.json, options.plot, options.plot_structure) if path is not None]
    if len(set(files)) < len(files):
        raise InputError("--json, --plot and --plot-structure must be different files")
    check_writable(*files)
    plots = [path for path in (options.plot, options.plot_structure) if path is not None]
    if not plots:
        return
    from worker.simulation.plots import check_plot, check_structure

    for path in plots:
        check_plot(path)
    if options.plot_structure is not None:
        check_structure(settings)


def _make(settings: ExperimentSettings, jobs: int) -> list[Run]:
    runs, tasks = [], settings.tasks()
    with progress("simulating", len(tasks)) as bar:
        for one in run_all(settings, tasks, jobs=jobs):
            runs.append(one)
            bar.describe(f"simulating {one.policy}, {one.users} users, seed {one.seed}")
            bar.advance()
    return runs


def _draw(options: argparse.Namespace, settings: ExperimentSettings, runs: Sequence[Run]) -> None:
    if options.plot is None and options.plot_structure is None:
        return
    from worker.simulation.plots import plot_regret, plot_structure

    if options.plot is not None:
        write_file(options.plot, plot_regret(runs, settings, options.plot))
        note(f"wrote {options.plot}")
        if len(options.users) == 1:
            note("give --users several times to plot the regret over users too")
    if options.plot_structure is not None:
        write_file(options.plot_structure, plot_structure(settings, options.plot_structure))
        note(f"wrote {options.plot_structure}")


def _title(settings: ExperimentSettings) -> str:
    explored = f"{settings.bonus} bonus, β = {settings.beta}" if settings.repeats else f"β = {settings.beta}"
    return (
        f"{settings.environment}: d = {settings.dim}, K = {settings.arms}, H = {settings.horizon}, "
        f"T = {settings.episodes}, {settings.seeds} seeds from {settings.seed}\n"
        f"{settings.estimator} estimator, {explored}, ridge {settings.ridge:g}, warm-up {settings.warmup}"
        f"{'' if settings.repeats else ', no repeats'}"
    )


def summary(runs: Sequence[Run]) -> str:
    """Return a table with a line per policy and number of users."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for one in runs:
        groups.setdefault((one.policy, one.users), []).append(one)
    rows = []
    for (policy, users), group in groups.items():
        totals = [one.cumulative for one in group]
        spread = statistics.stdev(totals) if len(totals) > 1 else 0.0
        rows.append(
            [
                policy,
                users,
                f"{statistics.fmean(totals):.1f}",
                f"± {spread:.1f}",
                f"{statistics.fmean(one.final for one in group):.3f}",
                f"{sum(one.stuck for one in group)} of {len(group)}",
                f"{statistics.fmean(statistics.fmean(one.explored) for one in group):.0%}",
                f"{statistics.fmean(one.seconds for one in group):.2f}",
            ]
        )
    last = min(LAST, len(runs[0].regret))
    header = ["policy", "users", "regret", "sd", f"per episode, last {last}", "stuck", "explored", "seconds/run"]
    return table(header, rows)


COMMAND = CommandSpec(
    name="simulate",
    summary="The paper's experiment: the regret of policies that learn from simulated users.",
    examples=(
        "adcascade simulate",
        "adcascade simulate --environment rare --policy ucbbp --policy greedy --seeds 30",
        "adcascade simulate --users 10 --users 50 --users 200 --plot regret.png",
        "adcascade simulate --policy ucbbp --estimator paper --json -",
        "adcascade simulate --plot-structure structure.svg --seeds 1",
    ),
    options=OPTIONS,
    run=run,
)
