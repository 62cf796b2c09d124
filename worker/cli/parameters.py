"""`adcascade parameters`: show and tag versions, and order the learner to freeze, to roll back or to import."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from worker.cli.description import (
    describe,
    difference_report,
    differences,
    profile_document,
    profile_report,
    report,
)
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.target import TARGET, control, in_force, pick, pick_or_read, read_version, version_facts
from worker.console import check_writable, note, table, write_file, write_result
from worker.errors import InputError
from worker.stream.events import TAG_PATTERN, Action, Command, Import, Order, Tag
from worker.stream.history import tags
from worker.stream.parameters import Parameters
from worker.stream.tastes import ad_profile
from worker.stream.version_records import encode_parameters, parameters_document
from worker.stream.versions import KEPT

VERSION = Option("version", "version, by number or tag (default: the newest)", metavar="VERSION")


ARM = Option("arm", "ad, by its id: for whom it works, instead of the whole version", metavar="ARM")


def show(options: argparse.Namespace) -> int:
    """Show a version and which others are kept, or one ad of it."""
    target = control(options)
    version = pick(target, options.version)
    if options.arm is not None:
        return _show_arm(options, version)
    details = describe(version)
    kept = [parameters.version for parameters in target.history()]
    write_result(options.json, {**details, "kept": kept}, report(version, details, kept))
    return 0


def _show_arm(options: argparse.Namespace, version: Parameters) -> int:
    index = version.indices.get(options.arm)
    if index is None:
        raise InputError(f"--arm {options.arm}: version {version.version} has no such arm (see adcascade arms list)")
    profile = ad_profile(version, index)
    record = {"version": version.version, "model": version.settings.model, **profile_document(profile)}
    write_result(options.json, record, profile_report(version, profile))
    return 0


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
    target = control(options)
    old, new = pick(target, options.old), pick(target, options.new)
    changes = differences(old, new)
    write_result(options.json, changes, difference_report(changes))
    return 0


def listing(options: argparse.Namespace) -> int:
    """Show all versions that are kept, with their tags."""
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
        "adcascade parameters show --arm winter-coat --state /var/lib/adcascade",
        "adcascade parameters tag before-sale --state /var/lib/adcascade",
        "adcascade parameters export --state /var/lib/adcascade --version before-sale --output v41.json",
        "adcascade parameters rollback before-sale --state /var/lib/adcascade",
        "adcascade parameters freeze --broker kafka:9092     # workers on Kafka",
    ),
    actions=(
        _action("list", listing, "Show all versions that are kept, with their tags.", ""),
        _action(
            "show",
            show,
            "Show a version: model, arms, estimates, uncertainty, settings; or for whom one ad works.",
            "--arm coat ",
            VERSION,
            ARM,
        ),
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
