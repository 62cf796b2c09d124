"""`adcascade parameters`: show and tag versions, and order the learner to freeze, to roll back or to import."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from worker.cli.options.orders import in_force, version_facts
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.target import TARGET, control
from worker.cli.options.versions import pick, pick_or_read, read_version
from worker.console import check_writable, note, table, write_file, write_result
from worker.errors import InputError
from worker.stream.events import TAG_PATTERN, Action, Command, Import, Order, Tag
from worker.stream.history import tags
from worker.stream.parameters import Parameters, encode_parameters, parameters_document
from worker.stream.settings import SETTINGS
from worker.stream.versions import KEPT

TOP = 15  # arms in a table; --json has all

VERSION = Option("version", "version, by number or tag (default: the newest)", metavar="VERSION")


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
        "settings": _settings(parameters),
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


def _settings(parameters: Parameters) -> dict[str, Any]:
    settings = parameters.settings
    features = None if settings.features is None else settings.features.document()
    plain = {name: getattr(settings, name) for name in (*SETTINGS, "standardise")}
    return {**plain, "features": features}


def show(options: argparse.Namespace) -> int:
    """Show a version, and which others are kept."""
    check_writable(options.json)
    target = control(options)
    details = describe(pick(target, options.version))
    kept = [parameters.version for parameters in target.history()]
    write_result(options.json, {**details, "kept": kept}, _report(details, kept))
    return 0


def _report(details: dict[str, Any], kept: list[int]) -> str:
    settings = details["settings"]
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
        f"  {details['folds']} folds, {details['observations']} observations; the workers keep {span}",
        f"  policy {settings['policy']}, bonus {settings['bonus']}, β {settings['beta']}, {settings['estimator']}",
        f"  ‖θ‖ {details['parameter_norm']:.4g}",
        "",
        table(["arm", "reward", "active", "click at x=0", "log-odds", "± deviation"], rows),
    ]
    more = [f"… and {len(best) - TOP} more (--json - has all)"] if len(best) > TOP else []
    return "\n".join([*lines, *more])


def export(options: argparse.Namespace) -> int:
    """Write the record of a version, as on its topic."""
    output = options.output
    check_writable(output)
    record = encode_parameters(pick(control(options), options.version))
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
    target = control(options)
    old, new = pick(target, options.old), pick(target, options.new)
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
            for name in one["settings"]
            if one["settings"][name] != other["settings"][name]
        },
        "context_moved": float(np.linalg.norm(new.model.effects - old.model.effects)),
        "arms": arms,
    }


def listing(options: argparse.Namespace) -> int:
    """Show all versions that are kept, with their tags."""
    check_writable(options.json)
    target = control(options)
    held = target.slots()
    times = {kept.version: kept.made_at for kept in held.values()}
    last = {parameters.version: parameters.made_at for parameters in target.history()}
    named: dict[int, list[str]] = {}
    for name, version in tags(held).items():
        named.setdefault(version, []).append(name)
    versions: list[dict[str, Any]] = [
        {"version": version, "made_at": made_at, "served": version in last, "tags": named.get(version, [])}
        for version, made_at in sorted((times | last).items())
    ]
    rows = [
        [str(one["version"]), _moment(one["made_at"]), "last 8" if one["served"] else "history", ", ".join(one["tags"])]
        for one in versions
    ]
    write_result(options.json, {"versions": versions}, table(["version", "made at", "kept in", "tags"], rows))
    return 0


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") if milliseconds else "–"


def tag(options: argparse.Namespace) -> int:
    """Give a version a name, under which it is kept for ever; or remove the name."""
    check_writable(options.json)
    if not re.fullmatch(TAG_PATTERN, options.name):
        raise InputError("a tag begins with a letter and has 1 to 64 letters, digits, '.', '_' and '-'")
    target = control(options)
    if options.remove:
        if options.of is not None:
            raise InputError("--remove takes no version")
        if options.name not in tags(target.slots()):
            raise InputError(f"there is no tag {options.name!r}")
        version, text = None, f"the tag {options.name} is removed"
    else:
        version = pick(target, options.of).version
        text = f"version {version} is kept as {options.name}"
    target.order(Tag(name=options.name, version=version))
    write_result(options.json, {"tag": options.name, "version": version}, text)
    return 0


def rollback(options: argparse.Namespace) -> int:
    """Go back to an estimate of the past: a new version with it, under the present arms."""
    target = control(options)
    newest = target.history()[-1].version
    # By its number while it is well among the last 8: it must be there when the learner reads the order.
    if options.to.isdecimal() and newest - KEPT // 2 < int(options.to) <= newest:
        return _give(options, Command(action="rollback", version=int(options.to)), "rolled back")
    record = parameters_document(pick_or_read(target, options.to))
    return _give(options, Import(parameters=record, arms=False), "rolled back")


def import_(options: argparse.Namespace) -> int:
    """Take the estimate of an exported version, and its arms that the catalogue lacks."""
    return _give(options, Import(parameters=parameters_document(read_version(options.file)), arms=True), "imported")


def _ordering(action: Action, done: str) -> Callable[[argparse.Namespace], int]:
    return lambda options: _give(options, Command(action=action), done)


def _give(options: argparse.Namespace, order: Order, done: str) -> int:
    check_writable(options.json)
    target = control(options)
    before = target.history()[-1]
    after = target.order(order)
    changed = after.version != before.version
    text = f"{done}: {in_force(after)}" if changed else f"nothing to do: already {done}"
    write_result(options.json, {**version_facts(after), "frozen": after.frozen}, text)
    return 0


def _action(name: str, run: Any, summary: str, example: str, *options: Option, json: bool = True) -> CommandSpec:
    every = (*options, *TARGET, JSON) if json else (*options, *TARGET)
    example = f"adcascade parameters {name} {example}--state demo-state"
    return CommandSpec(name=name, summary=summary, examples=(example,), options=every, run=run)


def _version(name: str, help: str, *, optional: bool = False) -> Option:
    return Option(name, help, positional=True, optional=optional)


COMMAND = CommandSpec(
    name="parameters",
    summary=(
        "Show, export and compare versions of the parameters; tag them; freeze learning, roll back, or import.\n"
        "All versions of the last hour, one an hour for a week, and tagged ones are kept. A version is named by its\n"
        "number or its tag."
    ),
    examples=(
        "adcascade parameters show --state /var/lib/adcascade",
        "adcascade parameters tag before-sale --state /var/lib/adcascade",
        "adcascade parameters export --state /var/lib/adcascade --version before-sale --output v41.json",
        "adcascade parameters rollback before-sale --state /var/lib/adcascade",
        "adcascade parameters freeze --broker kafka:9092     # workers on Kafka",
    ),
    actions=(
        _action("list", listing, "Show all versions that are kept, with their tags.", ""),
        _action("show", show, "Show a version: arms, estimates, uncertainty, settings.", "--json - ", VERSION),
        _action(
            "export",
            export,
            "Write the record of a version, for `import` and `adcascade explain --parameters`.",
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
            _version("old", "earlier version, by number or tag"),
            _version("new", "later version (default: the newest)", optional=True),
        ),
        _action(
            "tag",
            tag,
            "Give a version a name, under which it is kept for ever; a name that exists moves.",
            "before-sale 41 ",
            Option("name", "tag: a letter, then letters, digits, '.', '_' and '-'", positional=True),
            _version("of", "version, by number or tag (default: the newest)", optional=True),
            Option("remove", "removal of the tag", flag=True, default=False),
        ),
        _action(
            "rollback",
            rollback,
            "Go back to the estimate of a version that is kept or in a file, with the present arms.",
            "39 ",
            _version("to", "version to go back to: number, tag, or file from `export`"),
        ),
        _action(
            "import",
            import_,
            "Take the estimate of an exported version; add its arms that the catalogue lacks.",
            "v41.json ",
            Option("file", "file from `adcascade parameters export`", positional=True),
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
