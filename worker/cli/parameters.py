"""`adcascade parameters`: show and tag versions, and order the learner to freeze, to roll back or to import."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from typing import Any

from worker.cli.description import describe, profile_document, profile_report, report
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.target import action, control, in_force, pick, pick_or_read, read_version, version_facts
from worker.console import moment, note, table, write_file, write_result
from worker.errors import InputError
from worker.stream.events import TAG_PATTERN, Command, Import, Order, Tag
from worker.stream.history import tags
from worker.stream.parameters import Parameters
from worker.stream.tastes import ad_profile
from worker.stream.version_records import encode_parameters, parameters_document
from worker.stream.versions import KEPT

VERSION = Option("version", "version, by number or tag (default: the newest)", metavar="VERSION")
ARM = Option("arm", "id of an ad, to see for whom it works instead of the whole version", metavar="ARM")
OUTPUT = Option("output", "output file, or - for standard output", default="-", metavar="FILE")
NAME = Option("name", "tag: a letter, then letters, digits, '.', '_' and '-'", positional=True)
OF = Option("of", "version, by number or tag (default: the newest)", positional=True, optional=True)
REMOVE = Option("remove", "removal of the tag", flag=True, default=False)
TO = Option("to", "version to roll back to: number, tag, or file from `export`", positional=True)
FILE = Option("file", "file from `adcascade parameters export`", positional=True)


def show(options: argparse.Namespace) -> None:
    """Show a version: model, arms, estimates, uncertainty, settings; or for whom one ad works."""
    target = control(options)
    version = pick(target, options.version)
    if options.arm is not None:
        _show_arm(options, version)
    else:
        details = describe(version)
        kept = [parameters.version for parameters in target.history()]
        write_result(options.json, {**details, "kept": kept}, report(version, details, kept))


def _show_arm(options: argparse.Namespace, version: Parameters) -> None:
    index = version.indices.get(options.arm)
    if index is None:
        raise InputError(f"--arm {options.arm}: version {version.version} has no such arm (see adcascade arms list)")
    profile = ad_profile(version, index)
    record = {"version": version.version, "model": version.settings.model, **profile_document(profile)}
    write_result(options.json, record, profile_report(version, profile))


def export(options: argparse.Namespace) -> None:
    """Write the record of a version, for `import` and `adcascade explain --parameters`."""
    output = options.output
    record = encode_parameters(pick(control(options), options.version))
    if output == "-":
        sys.stdout.buffer.write(record + b"\n")
        sys.stdout.buffer.flush()
    else:
        write_file(output, record + b"\n")
        note(f"wrote {output} ({len(record):,} bytes)")


def listing(options: argparse.Namespace) -> None:
    """Show all versions that are kept, with their tags."""
    target = control(options)
    slots = target.slots()
    times = {kept.version: kept.made_at for kept in slots.values()}
    last = {parameters.version: parameters.made_at for parameters in target.history()}
    named: dict[int, list[str]] = {}
    for name, version in tags(slots).items():
        named.setdefault(version, []).append(name)
    versions: list[dict[str, Any]] = [
        {"version": version, "made_at": made_at, "served": version in last, "tags": named.get(version, [])}
        for version, made_at in sorted((times | last).items())
    ]
    rows = [
        [str(one["version"]), moment(one["made_at"]), "last 8" if one["served"] else "history", ", ".join(one["tags"])]
        for one in versions
    ]
    write_result(options.json, {"versions": versions}, table(["version", "made at", "kept in", "tags"], rows))


def tag(options: argparse.Namespace) -> None:
    """Tag a version, which is then kept for ever; an existing tag is moved."""
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


def rollback(options: argparse.Namespace) -> None:
    """Roll back to the estimate of an earlier version, or of a file; the present arms stay."""
    target = control(options)
    newest = target.history()[-1].version
    # By number only if it is well within the last 8: it must still be there when the learner reads the order.
    if options.to.isdecimal() and newest - KEPT // 2 < int(options.to) <= newest:
        order: Order = Command(action="rollback", version=int(options.to))
    else:
        order = Import(parameters=parameters_document(pick_or_read(target, options.to)), arms=False)
    _give(options, order, "rolled back")


def import_(options: argparse.Namespace) -> None:
    """Import the estimate of an exported version, and its arms that the catalogue lacks."""
    _give(options, Import(parameters=parameters_document(read_version(options.file)), arms=True), "imported")


def freeze(options: argparse.Namespace) -> None:
    """Stop learning: windows close without a new version; serving continues."""
    _give(options, Command(action="freeze"), "frozen")


def unfreeze(options: argparse.Namespace) -> None:
    """Resume learning."""
    _give(options, Command(action="unfreeze"), "learning")


def _give(options: argparse.Namespace, order: Order, done: str) -> None:
    target = control(options)
    before = target.history()[-1]
    after = target.order(order)
    changed = after.version != before.version
    text = f"{done}: {in_force(after)}" if changed else f"nothing to do: already {done}"
    write_result(options.json, {**version_facts(after), "frozen": after.frozen}, text)


_action = partial(action, "parameters")


COMMAND = CommandSpec(
    name="parameters",
    summary=(
        "Show and export versions of the parameters; tag them; freeze learning, roll back, or import.\n"
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
        _action("list", listing, "", JSON),
        _action("show", show, "--arm coat", VERSION, ARM, JSON),
        _action("export", export, "--output now.json", VERSION, OUTPUT),
        _action("tag", tag, "before-sale 41", NAME, OF, REMOVE, JSON),
        _action("rollback", rollback, "39", TO, JSON),
        _action("import", import_, "v41.json", FILE, JSON),
        _action("freeze", freeze, "", JSON),
        _action("unfreeze", unfreeze, "", JSON),
    ),
)
