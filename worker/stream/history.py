"""The thinned history of the versions: what it keeps, and under which keys.

Rules that hold in this file:

- A key is a slot. The history is a compacted topic, or a table with the same keys. `recent/<version>` holds every
  version of the last hour. `week/<version>` holds for a week the first version of every hour, and each that is neither
  a fold nor a change of arms, or has other settings. `tag/<name>` holds a version with a name, for ever. So a version
  of the last week that is not held comes out again of the one before it that is, and of the journal.
- Time is `made_at` of the newest version. There is no clock. A version made before any progress has no time: the first
  of these is not dropped after a week.
- The record of a slot is that of the version, as on the parameters topic. A slot that has expired is deleted.
- Writing a version again changes nothing. So a learner repeats what the one before it may not have written, and two
  learners write the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from worker.errors import InputError
from worker.stream.parameters import Parameters

HOUR: Final = 3_600_000
WEEK_HOURS: Final = 170  # and the hours in which a week begins and ends
_TAG: Final = "tag/"
_RECENT: Final = "recent/"
_WEEK: Final = "week/"


class KeptVersion(NamedTuple):
    """What a slot holds; `offset` is that of its record on the topic."""

    version: int
    made_at: int
    offset: int = 0


def tag_slot(name: str) -> str:
    """Return the slot of a name."""
    return f"{_TAG}{name}"


def is_slot(key: str) -> bool:
    """Return whether a record of this key holds a version."""
    return key.startswith((_RECENT, _WEEK, _TAG))


# ── thinning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def changes(held: Mapping[str, KeptVersion], versions: Iterable[Parameters]) -> tuple[dict[str, Parameters], list[str]]:
    """Return the slots to write with their versions, and the slots to delete.

    `versions` are the last ones. Those that the history has already are not written again.
    """
    ordered = sorted(versions, key=lambda parameters: parameters.version)
    now = max((parameters.made_at for parameters in ordered), default=0)
    hours = {kept.made_at // HOUR for slot, kept in held.items() if slot.startswith(_WEEK)}
    written: dict[str, Parameters] = {}
    for before, parameters in zip([None, *ordered], ordered, strict=False):
        wanted, hour = [f"{_RECENT}{parameters.version}"], parameters.made_at // HOUR
        if hour not in hours or (before is not None and _is_jump(before, parameters)):
            wanted.append(f"{_WEEK}{parameters.version}")
            hours.add(hour)
        for slot in wanted:
            if slot not in held and not _is_expired(slot, parameters.made_at, now):
                written[slot] = parameters
    return written, [slot for slot, kept in held.items() if _is_expired(slot, kept.made_at, now)]


def _is_expired(slot: str, made_at: int, now: int) -> bool:
    if slot.startswith(_RECENT):
        return made_at <= now - HOUR
    return slot.startswith(_WEEK) and 0 < made_at // HOUR <= now // HOUR - WEEK_HOURS


def _is_jump(before: Parameters, parameters: Parameters) -> bool:
    """Return whether the journal alone does not give a version from the one before it."""
    if parameters.version != before.version + 1:
        return False
    is_fold = parameters.folds == before.folds + 1 or parameters.pending is not None
    return parameters.settings != before.settings or not (is_fold or parameters.arms != before.arms)


# ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tags(held: Mapping[str, KeptVersion]) -> dict[str, int]:
    """Return the versions by their names."""
    return {slot.removeprefix(_TAG): held[slot].version for slot in sorted(held) if slot.startswith(_TAG)}


def slot_of(held: Mapping[str, KeptVersion], version: int) -> str | None:
    """Return a slot that holds a version."""
    return next((slot for slot, kept in held.items() if kept.version == version), None)


def no_tag(name: str, held: Mapping[str, KeptVersion], noun: str = "tag") -> InputError:
    """Return the error for a tag that is not there, with those that are."""
    names = ", ".join(tags(held))
    return InputError(f"there is no {noun} {name!r}; " + (f"the tags are {names}" if names else "there are no tags"))


def not_kept(version: int, kept: Collection[int]) -> InputError:
    """Return the error for a version that is not there, with those next to it.

    >>> str(not_kept(12, [3, 9, 20, 30]))
    'version 12 is not kept; the nearest are 9 and 20'
    """
    before = max((one for one in kept if one < version), default=None)
    after = min((one for one in kept if one > version), default=None)
    near = [str(one) for one in (before, after) if one is not None]
    text = f"the nearest {'are' if len(near) > 1 else 'is'} {' and '.join(near)}" if near else "none is"
    return InputError(f"version {version} is not kept; {text}")
