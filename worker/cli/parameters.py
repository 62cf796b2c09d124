"""`adcascade parameters`: show versions, and order the learner to freeze or to roll back."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from worker.cli.options.parser import JSON, CommandSpec, Option, count, integer
from worker.cli.options.target import TARGET, control
from worker.console import check_writable, note, table, write_file, write_result
from worker.errors import InputError
from worker.stream.events import Command
from worker.stream.parameters import Parameters, encode_parameters
from worker.stream.settings import SETTINGS

TOP = 15  # arms in a table; --json has all

VERSION = count("version", "version (default: the newest)", least=0)


def pick(history: list[Parameters], version: int | None) -> Parameters:
    """Return the version with this number, the newest without one."""
    if version is None:
        return history[-1]
    for parameters in history:
        if parameters.version == version:
            return parameters
    kept = ", ".join(str(parameters.version) for parameters in history)
    raise InputError(f"version {version} is not kept; available: {kept}")


def describe(parameters: Parameters) -> dict[str, Any]:
    """Return a version as the commands show it."""
    model = parameters.model
    deviations = model.bias_deviations if parameters.arms else np.zeros(0)
    return {
        "version": parameters.version,
        "sha256": parameters.sha256,
        "parent_sha256": parameters.parent_sha256,
        "effective_at": parameters.effective_at,
        "made_at": parameters.made_at,
        "window_end": parameters.window_end,
        "frozen": parameters.frozen,
        "folds": parameters.folds,
        "observations": parameters.observations,
        "explore_budget": parameters.explore_budget,
        "parameter_norm": model.norm,
        "smallest_eigenvalue": model.smallest_eigenvalue if parameters.arms else None,
        "settings": {name: getattr(parameters.settings, name) for name in SETTINGS},
        "theta_context": model.effects.tolist(),
        "arms": [
            {
                "arm": arm.arm,
                "reward": arm.reward,
                "active": arm.active,
                "log_odds": float(bias),
                "deviation": float(deviation),
                "probability": float(1 / (1 + np.exp(-bias))),
            }
            for arm, bias, deviation in zip(parameters.arms, model.biases, deviations, strict=True)
        ],
    }


def show(options: argparse.Namespace) -> int:
    """Show a version, and which others are kept."""
    check_writable(options.json)
    history = control(options).history()
    details = describe(pick(history, options.version))
    kept = [parameters.version for parameters in history]
    write_result(options.json, {**details, "kept": kept}, _report(details, kept))
    return 0


def _report(details: dict[str, Any], kept: list[int]) -> str:
    settings, smallest = details["settings"], details["smallest_eigenvalue"]
    span = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    best = sorted(details["arms"], key=lambda arm: -arm["probability"] * arm["reward"])
    rows = [
        [
            arm["arm"],
            f"{arm['reward']:.4g}",
            "yes" if arm["active"] else "retired",
            f"{arm['probability']:.4f}",
            f"{arm['log_odds']:+.3f}",
            f"{arm['deviation']:.3f}",
        ]
        for arm in best[:TOP]
    ]
    lines = [
        f"version {details['version']}  {details['sha256'][:16]}…  {'frozen' if details['frozen'] else 'learning'}",
        f"  {details['folds']} folds, {details['observations']} observations; kept: {span}",
        f"  policy {settings['policy']}, bonus {settings['bonus']}, β {settings['beta']}, {settings['estimator']}",
        f"  ‖θ‖ {details['parameter_norm']:.4g}, smallest eigenvalue {'–' if smallest is None else f'{smallest:.4g}'}",
        "",
        table(["arm", "reward", "active", "click at x=0", "log-odds", "± deviation"], rows),
    ]
    more = [f"… and {len(best) - TOP} more (--json - has all)"] if len(best) > TOP else []
    return "\n".join([*lines, *more])


def export(options: argparse.Namespace) -> int:
    """Write the record of a version, as on its topic."""
    output = options.output
    check_writable(output)
    record = encode_parameters(pick(control(options).history(), options.version))
    if output == "-":
        sys.stdout.buffer.write(record + b"\n")
        sys.stdout.buffer.flush()
    else:
        write_file(output, record + b"\n")
        note(f"wrote {output} ({len(record):,} bytes)")
    return 0


def diff(options: argparse.Namespace) -> int:
    """Show the changes from one version to another."""
    check_writable(options.json)
    history = control(options).history()
    old, new = pick(history, options.old), pick(history, options.new)
    changes = differences(old, new)
    moved = sorted(changes["arms"], key=lambda arm: -abs(arm["log_odds_moved"]))
    rows = [
        [one["arm"], one["change"], f"{one['log_odds_moved']:+.4f}"]
        + [f"{one[name]:.3f}" for name in ("deviation_before", "deviation_after")]
        for one in moved[:TOP]
    ]
    lines = [
        f"version {old.version} → {new.version}: {changes['observations']:+} observations, {changes['folds']:+} folds",
        *(f"  {name}: {before} → {after}" for name, (before, after) in changes["settings"].items()),
        f"  context: moved by {changes['context_moved']:.4g}",
        table(["arm", "change", "log-odds", "± before", "± after"], rows) if rows else "  the arms are the same",
    ]
    write_result(options.json, changes, "\n".join(lines))
    return 0


def differences(old: Parameters, new: Parameters) -> dict[str, Any]:
    """Return the differences between two versions."""
    one, other = describe(old), describe(new)
    before = {arm["arm"]: arm for arm in one["arms"]}
    arms = []
    for arm in other["arms"]:
        was = before.get(arm["arm"])
        if was is None:
            change = "added"
        elif was["active"] != arm["active"]:
            change = "brought back" if arm["active"] else "retired"
        elif was["reward"] != arm["reward"]:
            change = f"priced {was['reward']:g} → {arm['reward']:g}"
        else:
            change = ""
        log_odds = 0.0 if was is None else was["log_odds"]
        deviation = arm["deviation"] if was is None else was["deviation"]
        if change or log_odds != arm["log_odds"] or deviation != arm["deviation"]:
            arms.append(
                {
                    "arm": arm["arm"],
                    "change": change,
                    "log_odds_moved": arm["log_odds"] - log_odds,
                    "deviation_before": deviation,
                    "deviation_after": arm["deviation"],
                }
            )
    return {
        "from": old.version,
        "to": new.version,
        "observations": new.observations - old.observations,
        "folds": new.folds - old.folds,
        "settings": {
            name: [one["settings"][name], other["settings"][name]]
            for name in SETTINGS
            if one["settings"][name] != other["settings"][name]
        },
        "context_moved": float(np.linalg.norm(new.model.effects - old.model.effects)),
        "arms": arms,
    }


def _ordering(action: str, done: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        check_writable(options.json)
        target = control(options)
        before = target.history()[-1]
        order = Command(action=action, version=getattr(options, "to", None))  # type: ignore[arg-type]
        after = target.order(order)
        changed = after.version != before.version
        text = f"{done}: version {after.version} is in force" if changed else f"nothing to do: already {done}"
        record = {"version": after.version, "sha256": after.sha256, "frozen": after.frozen}
        write_result(options.json, record, text)
        return 0

    return run


def _action(name: str, run: Any, summary: str, example: str, *options: Option, json: bool = True) -> CommandSpec:
    every = (*options, *TARGET, JSON) if json else (*options, *TARGET)
    example = f"adcascade parameters {name} {example}--state demo-state"
    return CommandSpec(name=name, summary=summary, examples=(example,), options=every, run=run)


def _version(name: str, help: str, *, optional: bool = False) -> Option:
    return Option(name, help, parse=integer(least=0), positional=True, optional=optional)


COMMAND = CommandSpec(
    name="parameters",
    summary="Show, export and compare versions of the parameters; freeze learning, or roll back.",
    examples=(
        "adcascade parameters show --state /var/lib/adcascade",
        "adcascade parameters export --state /var/lib/adcascade --version 41 --output v41.json",
        "adcascade parameters rollback 41 --state /var/lib/adcascade",
        "adcascade parameters freeze --broker kafka:9092     # workers on Kafka",
    ),
    actions=(
        _action("show", show, "Show a version: arms, estimates, uncertainty, settings.", "--json - ", VERSION),
        _action(
            "export",
            export,
            "Write the record of a version, for `adcascade explain --parameters`.",
            "--output now.json ",
            VERSION,
            Option("output", "output file, or - for standard output", default="-", metavar="FILE"),
            json=False,
        ),
        _action(
            "diff",
            diff,
            "Show the changes between two versions.",
            "40 41 ",
            _version("old", "earlier version"),
            _version("new", "later version (default: the newest)", optional=True),
        ),
        _action(
            "rollback",
            _ordering("rollback", "rolled back"),
            "Go back to the estimate of one of the last 8 versions, with the present arms.",
            "39 ",
            _version("to", "version to go back to"),
        ),
        _action(
            "freeze",
            _ordering("freeze", "frozen"),
            "Stop learning: windows close without a new version; serving continues.",
            "",
        ),
        _action("unfreeze", _ordering("unfreeze", "learning"), "Resume learning.", ""),
    ),
)
