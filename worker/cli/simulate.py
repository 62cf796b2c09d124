"""`adcascade simulate`: the paper's experiments, policies × users × seeds."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from worker import __version__
from worker.bandit.estimators import ESTIMATORS
from worker.bandit.policies import BONUSES, POLICIES
from worker.cli.options.learning import beta
from worker.cli.options.parser import JSON, CommandSpec, Option, integer, number
from worker.console import check_writable, note, progress, say, table, write_file, write_json
from worker.errors import InputError
from worker.simulation.environments import ENVIRONMENTS
from worker.simulation.experiment import LAST, ExperimentTask, Run, Settings, cores, run_all

DEFAULTS = Settings()


OPTIONS = (
    Option(
        name="policy",
        help="policy to compare; repeatable",
        choices=POLICIES,
        repeatable=True,
        default=("ucbbp", "aucbbp", "epsilon-greedy"),
    ),
    Option(
        name="environment",
        help="the simulated world",
        choices=ENVIRONMENTS,
        default=DEFAULTS.environment,
    ),
    Option(name="estimator", help="how an episode is folded", choices=ESTIMATORS, default=DEFAULTS.estimator),
    Option(name="bonus", help="what is added to Q to explore", choices=BONUSES, default=DEFAULTS.bonus),
    Option(
        name="beta",
        help="exploration: a number of standard deviations, or theory",
        parse=beta,
        default=DEFAULTS.beta,
    ),
    Option(name="epsilon", help="share that epsilon-greedy explores [0.1]", parse=number(least=0, most=1)),
    Option(name="dim", help="context features d", parse=integer(least=1), default=DEFAULTS.dim),
    Option(name="arms", help="arms K", parse=integer(least=1), default=DEFAULTS.arms),
    Option(name="horizon", help="most displays H in a session", parse=integer(least=1), default=DEFAULTS.horizon),
    Option(
        name="users", help="sessions N per episode; repeatable", parse=integer(least=1), repeatable=True, default=(50,)
    ),
    Option(name="episodes", help="episodes T", parse=integer(least=2), default=DEFAULTS.episodes),
    Option(name="warmup", help="round-robin episodes at first", parse=integer(least=0), default=DEFAULTS.warmup),
    Option(name="seeds", help="how many seeds", parse=integer(least=1), default=10),
    Option(name="seed", help="the first seed", parse=integer(least=0), default=0),
    Option(name="ridge", help="prior precision λ", parse=number(above=0), default=DEFAULTS.ridge),
    Option(name="repeats", help="whether a session may show an arm twice", flag=True, default=DEFAULTS.repeats),
    Option(name="jobs", help="processes to use [all processors]", parse=integer(least=1)),
    JSON,
    Option(name="plot", help="draw the regret over time and users: .png, .svg or .pdf", metavar="FILE"),
    Option(name="plot-structure", help="draw Q over arms and steps: .png, .svg or .pdf", metavar="FILE"),
)


def run(options: argparse.Namespace) -> int:
    """Make all runs; print a table, and what else was asked for."""
    _check(options)
    settings = Settings(
        **{name: getattr(options, name) for name in asdict(DEFAULTS) if name != "epsilon"},
        epsilon=DEFAULTS.epsilon if options.epsilon is None else options.epsilon,
    )
    seeds = range(options.seed, options.seed + options.seeds)
    # Seeds outermost: when some runs are done, they are runs of all policies.
    tasks = [
        ExperimentTask(policy=p, users=n, seed=seed) for seed in seeds for n in options.users for p in options.policy
    ]
    runs = _make(settings, tasks, options.jobs or cores())
    runs.sort(key=lambda r: (options.policy.index(r.policy), options.users.index(r.users), r.seed))
    _draw(options, settings, runs)
    write_json(options.json, {"runs": [asdict(one) for one in runs], "settings": _settings(options, settings)})
    if options.json != "-":
        say(_title(settings, options))
        say()
        say(summary(runs))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse, before anything is computed or written, what cannot be meant."""
    for name in ("policy", "users"):
        given = getattr(options, name)
        twice = next((value for i, value in enumerate(given) if value in given[:i]), None)
        if twice is not None:
            raise InputError(f"--{name} {twice} is given twice")
    if options.warmup >= options.episodes:
        raise InputError(
            f"--warmup {options.warmup} leaves no episode of --episodes {options.episodes} to the policies"
        )
    if options.epsilon is not None and "epsilon-greedy" not in options.policy:
        raise InputError("--epsilon is for --policy epsilon-greedy only")
    if options.bonus == "paper" and not options.repeats and {"ucbbp", "aucbbp"} & set(options.policy):
        raise InputError("--bonus paper contradicts --no-repeats: there, exploring means optimistic probabilities")
    if options.plot_structure is not None and not options.repeats:
        raise InputError("--plot-structure draws plans with repeats; leave out --no-repeats")
    if options.plot_structure is not None and min(options.arms, options.horizon) < 2:
        raise InputError("--plot-structure needs at least two arms and two displays")
    files = [path for path in (options.json, options.plot, options.plot_structure) if path is not None]
    if len(set(files)) < len(files):
        raise InputError("--json, --plot and --plot-structure must be different files")
    check_writable(*files)
    for path in (options.plot, options.plot_structure):
        if path is not None:
            from worker.simulation.plots import check_plot

            check_plot(path)


def _make(settings: Settings, tasks: Sequence[ExperimentTask], jobs: int) -> list[Run]:
    runs = []
    with progress("simulating", len(tasks)) as bar:
        for one in run_all(settings, tasks, jobs=jobs):
            runs.append(one)
            bar.describe(f"simulating {one.policy}, {one.users} users, seed {one.seed}")
            bar.advance()
    return runs


def _draw(options: argparse.Namespace, settings: Settings, runs: Sequence[Run]) -> None:
    if options.plot is None and options.plot_structure is None:
        return
    from worker.simulation.plots import plot_regret, plot_structure

    if options.plot is not None:
        write_file(options.plot, plot_regret(runs, settings, options.plot))
        note(f"wrote {options.plot}")
        if len(options.users) == 1:
            note("regret over users is drawn when --users is given several times")
    if options.plot_structure is not None:
        write_file(options.plot_structure, plot_structure(settings, options.seed, options.plot_structure))
        note(f"wrote {options.plot_structure}")


def _settings(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    asked = {name: list(getattr(options, name)) for name in ("policy", "users")}
    return {"version": __version__, **asked, "seed": options.seed, "seeds": options.seeds, **asdict(settings)}


def _title(settings: Settings, options: argparse.Namespace) -> str:
    explored = f"{settings.bonus} bonus, β = {settings.beta}" if settings.repeats else f"β = {settings.beta}"
    return (
        f"{settings.environment}: d = {settings.dim}, K = {settings.arms}, H = {settings.horizon}, "
        f"T = {settings.episodes}, {options.seeds} seeds from {options.seed}\n"
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
    header = ["policy", "users", "regret", "sd", f"last {last}, each", "stuck", "explored", "seconds/run"]
    return table(header, rows)


COMMAND = CommandSpec(
    name="simulate",
    summary="The paper's experiments: policies learn from simulated users, and what they lose to the best is counted.",
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
