"""`adcascade simulate`: experiments as in the paper, on simulated worlds."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from worker import __version__
from worker.bandit import MODELS
from worker.cli.options.learning import WORLD, check_fixed, setting
from worker.cli.options.parser import JSON, CommandSpec, Option, count, defaulted, filled, flag, integer, number
from worker.console import note, progress, table, write_file, write_result
from worker.simulation.environments import CHANGES, CROSSES, ENVIRONMENTS, PRICES
from worker.simulation.experiment.run import cores, run_all
from worker.simulation.experiment.settings import AFTER_NEW, ExperimentSettings, Run, last_episodes
from worker.simulation.plots import check_plot, plot_regret
from worker.stream.settings import ANSWERS

DEFAULTS = ExperimentSettings()

#: What is different here: all environments, and worlds without numbers.
_WIDER: dict[str, dict[str, Any]] = {
    "environment": {"choices": tuple(ENVIRONMENTS)},
    "dim": {"parse": integer(least=0)},
}

OPTIONS = defaulted(
    ExperimentSettings,
    setting("policy", help="policies to compare; repeatable", repeatable=True),
    setting("order", help="arms that the policy fixed shows first, such as ad-03,ad-01; the others follow"),
    *(replace(option, **_WIDER.get(option.name, {})) for option in WORLD),
    count(
        "features",
        "number of features of each arm, which explain most of the tastes; the revenue is then a feature, too",
        least=0,
    ),
    count("new-arms", "number of arms that are added during the run", least=0),
    count("join", "first episode with the new arms", least=2),
    Option("prices", "revenues of the ads in newcomers (default: equal)", choices=PRICES),
    Option(
        "better",
        "in newcomers, rare clicks, and for each new ad this multiple of those of the best one",
        parse=number(above=0),
    ),
    count("levels", "values of the category in categories (default: 50)", least=2),
    Option("noise", "a category that does not matter, in categories", flag=True),
    Option("reported", "probability that a pass is reported, in silent (default: 0.5)", parse=number(above=0, most=1)),
    Option("change", "part of the world that changes at half time in drift (default: tastes)", choices=CHANGES),
    Option(
        "interaction",
        "standard deviation of what products of numbers add to the log-odds, in interactions (default: 1)",
        parse=number(least=0),
    ),
    Option("crosses", "crosses that the learner is told of, in interactions (default: all)", choices=CROSSES),
    count("pairs", "pairs of numbers that matter together, in interactions (default: all)"),
    Option("model", "click model of the learner", choices=tuple(MODELS)),
    Option(
        "intercept", "shared intercept of the additive model (default: on, except with the estimator paper)", flag=True
    ),
    Option(
        "answers",
        "share of users who go on without a click: learned, or all (default: learned where users leave)",
        choices=ANSWERS,
    ),
    *map(setting, ("estimator", "bonus", "spread", "ridge", "forgetting")),
    setting(
        "beta",
        help="strength of exploration, in standard deviations, or theory: the radius of the paper's theorem",
        parse=number("theory", least=0),
    ),
    setting("warmup", help="number of round-robin episodes at the start"),
    Option("users", "sessions N per episode; repeatable", parse=integer(least=1), repeatable=True),
    count("episodes", "number of episodes T", least=2),
    count("seeds", "number of seeds"),
    count("seed", "first seed", least=0),
    count("jobs", "number of processes (default: all processors)"),
    JSON,
    Option("plot", "plot of the regret over time and users: .png, .svg or .pdf", metavar="FILE"),
)


def run(options: argparse.Namespace) -> None:
    """Make all runs; print a table, write JSON and a plot."""
    check_fixed(options)
    settings = filled(ExperimentSettings, options)
    if options.plot is not None:
        check_plot(options.plot)
    runs = _make(settings, options.jobs or cores())
    runs.sort(key=lambda r: (settings.policy.index(r.policy), settings.users.index(r.users), r.seed))
    if options.plot is not None:
        _plot(options.plot, settings, runs)
    record = {"runs": [asdict(one) for one in runs], "settings": {"version": __version__, **asdict(settings)}}
    write_result(options.json, record, f"{_title(settings)}\n\n{summary(runs, settings.join)}")


def _make(settings: ExperimentSettings, jobs: int) -> list[Run]:
    runs, tasks = [], settings.tasks()
    with progress("simulating", len(tasks)) as bar:
        for one in run_all(settings, tasks, jobs=jobs):
            runs.append(one)
            bar.describe(f"simulating {one.policy}, {one.users} users, seed {one.seed}")
            bar.advance()
    return runs


def _plot(path: str, settings: ExperimentSettings, runs: Sequence[Run]) -> None:
    write_file(path, plot_regret(runs, settings, path))
    note(f"wrote {path}")
    if len(settings.users) == 1:
        note("give --users several times to plot the regret over users too")


def _title(settings: ExperimentSettings) -> str:
    """Return the sizes of the experiment, and in a second line the settings that are not the default."""
    shown = ("environment", "dim", "arms", "horizon", "episodes", "seeds", "seed", "policy", "users")
    sizes = (
        f"{settings.environment}: d = {settings.dim}, K = {settings.arms}, H = {settings.horizon}, "
        f"T = {settings.episodes}, {settings.seeds} seeds from {settings.seed}"
    )
    chosen = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in shown}
    others = [flag(name, value) for name, value in chosen.items() if value != getattr(DEFAULTS, name)]
    return f"{sizes}\n{' '.join(others)}".rstrip()


def summary(runs: Sequence[Run], join: int | None = None) -> str:
    """Return a table with a line per policy and number of users; `join` is the episode with new arms."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for one in runs:
        groups.setdefault((one.policy, one.users), []).append(one)
    episodes = len(runs[0].regret)
    after = [] if join is None else [(join, min(join + more - 1, episodes)) for more in AFTER_NEW]
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
                f"{statistics.fmean(one.lost() for one in group):.1%}",
                f"{statistics.fmean(one.lost_at_end for one in group):.1%}",
                *(f"{statistics.fmean(one.lost(*part) for one in group):.1%}" for part in after),
                f"{sum(one.stuck for one in group)} of {len(group)}",
                f"{statistics.fmean(statistics.fmean(one.explored) for one in group):.0%}",
                f"{statistics.fmean(one.seconds for one in group):.2f}",
            ]
        )
        if found := [one.missed for one in group if one.missed is not None]:
            rows[-1] += [
                f"{sum(one.is_true for one in found)} of {len(found)}",
                f"{sum(one.alarms > 0 for one in found)} of {len(found)}",
            ]
    last = last_episodes(episodes)
    header = ["policy", "users", "regret", "sd", f"per episode, last {last}", "lost", f"lost, last {last}"]
    header += [f"lost, {first}–{end}" for first, end in after]
    header += ["stuck", "explored", "seconds/run"]
    return table([*header, *(["true pair first", "alarms"] if runs[0].missed is not None else [])], rows)


COMMAND = CommandSpec(
    name="simulate",
    summary="Repeat experiments as in the paper: the regret of policies that learn from simulated users.",
    examples=(
        "adcascade simulate",
        "adcascade simulate --environment rare --policy ucbbp --policy greedy --seeds 30",
        "adcascade simulate --users 10 --users 50 --users 200 --plot regret.png",
        "adcascade simulate --environment tastes --model personal",
        "adcascade simulate --environment leaving --model personal --episodes 200",
        "adcascade simulate --environment digits --dim 64 --horizon 3 --model personal --episodes 100 --seeds 5",
        "adcascade simulate --environment tastes --model personal --features 3 --arms 30 --new-arms 20 --join 100",
        "adcascade simulate --environment categories --model personal --dim 0 --levels 100 --users 500 --episodes 60",
        "adcascade simulate --environment silent --model personal --reported 0.1 --episodes 200",
        "adcascade simulate --environment newcomers --model personal --new-arms 10 --join 31 --spread 1 --users 2000",
        "adcascade simulate --environment drift --model personal --change tastes --forgetting auto",
        "adcascade simulate --environment interactions --model personal --crosses none --users 500 --episodes 60",
        "adcascade simulate --environment interactions --pairs 1 --crosses none --dim 6 --model personal --users 500",
        "adcascade simulate --environment skewed --model personal",
        "adcascade simulate --policy ucbbp --no-intercept --estimator paper --bonus paper --beta theory --json -",
    ),
    options=OPTIONS,
    run=run,
)
