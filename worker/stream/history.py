"""The thinned history of the versions: what it keeps, and under which keys.

Rules that hold in this file:

- A key is a slot. The history is a compacted topic, or a table with the same keys: a new record of a slot replaces the
  old one. `recent/<version>` holds a version made within the last hour, `hour/<hour mod 170>` the first version of an
  hour of the last week, `jump/<version>` for a week one that is neither a fold nor a change of arms, or has other
  settings, `tag/<name>` a version with a name, for ever. So a version of the last week that is not held comes out again
  of the one before it that is, and of the journal.
- Time is `made_at` of the newest version. There is no clock. A version made before any progress has no time; it ages
  from the first version that has one.
- The record of a slot is that of the version, as on the parameters topic. A slot that has expired is deleted.
- Writing a version again changes nothing. So a learner repeats what the one before it may not have written, and two
  learners write the same.
- The index, under the key `index`, is written last. It saves reading the other records: it holds version, time and
  offset of every slot. The log of the topic is the truth: records from the offset `through` on are not in the index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from worker.errors import InputError
from worker.stream.events import Count
from worker.stream.parameters import Parameters

HOUR: Final = 3_600_000
WEEK_HOURS: Final = 170  # and the hours in which a week begins and ends
INDEX_KEY: Final = b"index"
_TAG: Final = "tag/"
_RECENT: Final = "recent/"
_JUMP: Final = "jump/"


class KeptVersion(NamedTuple):
    """What a slot holds; `offset` is that of its record on the topic."""

    version: Count
    made_at: Count
    offset: Count = 0

    @classmethod
    def of(cls, parameters: Parameters) -> KeptVersion:
        """Return what a slot with a version holds."""
        return cls(parameters.version, parameters.made_at)


class HistoryIndex(Struct, frozen=True, kw_only=True):
    """The slots of the history, as of the offset `through`."""

    through: Count
    slots: dict[str, KeptVersion]


encode_index: Final = msgspec.json.Encoder().encode
decode_index: Final = msgspec.json.Decoder(HistoryIndex).decode


def tag_slot(name: str) -> str:
    """Return the slot of a name."""
    return f"{_TAG}{name}"


def is_slot(key: str) -> bool:
    """Return whether a record of this key holds a version."""
    return key.startswith((_RECENT, "hour/", _JUMP, _TAG))


# ── thinning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def changes(
    held: Mapping[str, KeptVersion], versions: Iterable[Parameters]
) -> tuple[dict[str, Parameters], list[str], dict[str, KeptVersion]]:
    """Return the slots to write with their versions, the slots to delete, and the slots that are held then.

    `versions` are the last ones. Those that the history has already are not written again.
    """
    ordered = sorted(versions, key=lambda parameters: parameters.version)
    now = max((parameters.made_at for parameters in ordered), default=0)
    since = first_time(ordered)
    then = {slot: kept if kept.made_at else kept._replace(made_at=since) for slot, kept in held.items()}
    written: dict[str, Parameters] = {}
    for before, parameters in zip([None, *ordered], ordered, strict=False):
        kept = KeptVersion(parameters.version, parameters.made_at or since)
        for slot in wanted_slots(then, kept, now, is_jump=before is not None and _is_jump(before, parameters)):
            written[slot] = parameters
            then[slot] = kept
    gone = [slot for slot, kept in then.items() if _is_expired(slot, kept, now)]
    return written, gone, {slot: kept for slot, kept in then.items() if slot not in gone}


def first_time(versions: Iterable[Parameters]) -> int:
    """Return the time from which versions without a time age: that of the first one that has one, 0 without."""
    return min((parameters.made_at for parameters in versions if parameters.made_at), default=0)


def _is_jump(before: Parameters, parameters: Parameters) -> bool:
    """Return whether the journal alone does not give a version from the one before it."""
    if parameters.version != before.version + 1:
        return False
    is_fold = parameters.folds == before.folds + 1 or parameters.pending is not None
    return parameters.settings != before.settings or not (is_fold or parameters.arms != before.arms)


def wanted_slots(held: Mapping[str, KeptVersion], new: KeptVersion, now: int, *, is_jump: bool = False) -> list[str]:
    """Return the slots that a version is to be written to, given those that are held.

    >>> wanted_slots({}, KeptVersion(7, 5 * HOUR), 5 * HOUR)
    ['recent/7', 'hour/5']
    >>> wanted_slots({"hour/5": KeptVersion(7, 5 * HOUR)}, KeptVersion(8, 5 * HOUR + 60_000), 5 * HOUR + 60_000)
    ['recent/8']
    """
    slots = []
    begun = new.made_at // HOUR  # hours since the epoch
    recent, hour = f"{_RECENT}{new.version}", f"hour/{begun % WEEK_HOURS}"
    if not _is_expired(recent, new, now) and recent not in held:
        slots.append(recent)
    there = held.get(hour)
    if new.made_at and not _is_expired(hour, new, now) and (there is None or there.made_at < begun * HOUR):
        slots.append(hour)
    jump = f"{_JUMP}{new.version}"
    if is_jump and jump not in held and not _is_expired(jump, new, now):
        slots.append(jump)
    return slots


def _is_expired(slot: str, kept: KeptVersion, now: int) -> bool:
    if slot.startswith(_TAG):
        return False
    if slot.startswith(_RECENT):
        return 0 < kept.made_at <= now - HOUR
    return kept.made_at // HOUR <= now // HOUR - WEEK_HOURS


# ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tags(held: Mapping[str, KeptVersion]) -> dict[str, int]:
    """Return the versions by their names."""
    return {slot.removeprefix(_TAG): held[slot].version for slot in sorted(held) if slot.startswith(_TAG)}


def slot_of(held: Mapping[str, KeptVersion], version: int) -> str | None:
    """Return a slot that holds a version."""
    return next((slot for slot, kept in held.items() if kept.version == version), None)


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
