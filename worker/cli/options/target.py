"""The target of `parameters`, `arms`, `features` and `explain`: a state folder, or the workers of a Kafka cluster.

Also the lookup of a version by number, tag or file, and the report of the version after an order.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from worker.cli.options.brokers import BROKER, PREFIX, SECURITY, connection
from worker.cli.options.parser import CommandSpec, Option, grouped
from worker.cli.options.times import seconds_option
from worker.console import note, read_input, write_result
from worker.errors import InputError, ParametersError
from worker.serve.control import StateFolderControl
from worker.stream.events import Order
from worker.stream.history import no_tag, not_kept, slot_of, tag_slot, tags
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Topics

if TYPE_CHECKING:
    from worker.kafka.control import KafkaControl

LearnerControl: TypeAlias = "StateFolderControl | KafkaControl"

#: A deployment to read from.
PLACE = grouped(
    "target",
    Option("state", "state folder of `adcascade serve`", metavar="DIR"),
    replace(BROKER, default=None, help="bootstrap brokers of running workers, host:port[,…], without --state"),
    PREFIX,
)
TARGET = (
    *PLACE,
    *grouped("target", seconds_option("wait", "maximum wait for the answer of the learner", 30)),
    *SECURITY,
)


def control(options: argparse.Namespace) -> LearnerControl:
    """Return the target of the options. A state folder comes first: variables may name a broker for all commands."""
    if options.state is not None:
        return StateFolderControl(options.state, patience=options.wait)
    if options.broker is None:
        raise InputError("--state DIR or --broker HOST:PORT is missing: it names the target of this command")
    # Importing the Kafka client takes a while, and a state folder needs none.
    from worker.kafka.control import KafkaControl

    return KafkaControl(connection(options), Topics(options.prefix), timeout=options.wait)


def action(
    command: str, name: str, run: Callable[[argparse.Namespace], None], example: str, *options: Option
) -> CommandSpec:
    """Return an action of a command that has a target; its summary is the docstring of `run`."""
    example = " ".join(["adcascade", command, name, *([example] if example else []), "--state adcascade-state"])
    summary = inspect.cleandoc(run.__doc__ or "")
    return CommandSpec(name=name, summary=summary, examples=(example,), options=(*options, *TARGET), run=run)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def pick(target: LearnerControl, reference: str | None, noun: str = "tag") -> Parameters:
    """Return the version with this number or tag, the newest without one; the last 8 and the history are searched."""
    history = target.history()
    if reference is None:
        return history[-1]
    number = int(reference) if reference.isdecimal() else None
    for parameters in history:
        if parameters.version == number:
            return parameters
    slots = target.slots()
    slot = tag_slot(reference) if number is None else slot_of(slots, number)
    found = target.load(slot) if slot is not None and slot in slots else None
    if found is not None:
        return found
    if number is not None:
        kept = {kept.version for kept in slots.values()} | {parameters.version for parameters in history}
        raise not_kept(number, kept - {number})
    raise no_tag(reference, slots, noun)


def pick_or_read(target: LearnerControl, reference: str) -> Parameters:
    """Return the version with this number or tag, or the one in the file of this name."""
    is_file = not reference.isdecimal() and Path(reference).is_file()
    if is_file and reference not in tags(target.slots()):
        return read_version(reference)
    return pick(target, reference, "tag or file")


def read_version(path: str, where: str = "FILE", *, complete: bool = True) -> Parameters:
    """Return the version in a file that `parameters export` wrote; one written by hand need not be `complete`."""
    record = read_input(path, where)
    try:
        return decode_parameters(record, complete=complete)
    except ParametersError as error:
        raise ParametersError(f"{path if where == 'FILE' else f'{where} {path}'}: {error}") from None


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────

YES = Option("yes", "publication of the changes without a confirmation", flag=True, default=False)


def version_facts(after: Parameters) -> dict[str, Any]:
    """Return the facts of the version after an order, for the JSON of a command."""
    return {"version": after.version, "sha256": after.sha256, "effective_at": after.effective_at}


def in_force(after: Parameters, now: float | None = None) -> str:
    """Return the time from which a version serves, as a sentence; `now` is in milliseconds.

    >>> from worker.stream.settings import LearningSettings
    >>> in_force(Parameters.first(LearningSettings(dim=1), ()), now=5)
    'version 0 serves sessions that arrive from now on; open sessions keep their slates'
    """
    now = time.time() * 1000 if now is None else now
    wait, start = after.effective_at - now, datetime.fromtimestamp(after.effective_at / 1000).astimezone()
    when = "now" if wait <= 0 else f"{start:%Y-%m-%d %H:%M:%S} (in {wait / 1000:.1f} s)"
    return f"version {after.version} serves sessions that arrive from {when} on; open sessions keep their slates"


def publish(
    options: argparse.Namespace,
    target: LearnerControl,
    newest: Parameters,
    order: Order | None,
    *,
    changes: list[Any],
    shown: str,
    hint: str,
) -> None:
    """Order changes that are confirmed, or need not be (--yes); write the result, which without an order is `newest`.

    `shown` are the changes for people, and `hint` is how else to see them.
    """
    if order is None:
        write_result(options.json, {"changes": changes, **version_facts(newest)}, shown, [shown] if changes else [])
        return
    if not options.yes:
        confirm(shown, hint)
    after = target.order(order)
    done = f"changes: {len(changes)}; {in_force(after)}"
    result = {"changes": changes, **version_facts(after)}
    write_result(options.json, result, f"{shown}\n{done}" if options.yes else done)


def confirm(shown: str, hint: str, question: str = "Publish these changes?") -> None:
    """Show changes and ask whether to make them; raise `InputError` unless the answer is yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"--yes is missing: without a terminal there is nobody to confirm the changes ({hint})")
    note(shown)
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("not confirmed; nothing was changed")
