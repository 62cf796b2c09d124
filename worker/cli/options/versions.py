"""Versions of the parameters by number, by tag, or from a file."""

from __future__ import annotations

from pathlib import Path

from worker.console import read_file
from worker.embedded.control import LearnerControl
from worker.errors import InputError, ParametersError
from worker.stream.history import not_kept, slot_of, tag_slot, tags
from worker.stream.parameters import Parameters, decode_parameters


def pick(target: LearnerControl, reference: str | None, noun: str = "tag") -> Parameters:
    """Return the version with this number or tag, the newest without one; the last 8 and the history are searched."""
    history = target.history()
    if reference is None:
        return history[-1]
    number = int(reference) if reference.isdecimal() else None
    for parameters in history:
        if parameters.version == number:
            return parameters
    held = target.slots()
    slot = tag_slot(reference) if number is None else slot_of(held, number)
    found = target.load(slot) if slot is not None and slot in held else None
    if found is not None:
        return found
    if number is not None:
        kept = {kept.version for kept in held.values()} | {parameters.version for parameters in history}
        raise not_kept(number, kept - {number})
    names = ", ".join(tags(held))
    raise InputError(
        f"there is no {noun} {reference!r}; " + (f"the tags are {names}" if names else "there are no tags")
    )


def pick_or_read(target: LearnerControl, reference: str) -> Parameters:
    """Return the version with this number or tag, or the one in the file of this name."""
    is_file = not reference.isdecimal() and Path(reference).is_file()
    if is_file and reference not in tags(target.slots()):
        return read_version(reference)
    return pick(target, reference, "tag or file")


def read_version(path: str) -> Parameters:
    """Return the version in a file that `parameters export` wrote."""
    try:
        return decode_parameters(read_file(path, "FILE"))
    except ParametersError as error:
        raise ParametersError(f"{path}: {error}") from None
