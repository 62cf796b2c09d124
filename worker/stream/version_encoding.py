"""Write a version as its JSON record, and compute the hash over it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import orjson

from worker.bandit.arrays import Floats
from worker.stream.budget import ALL
from worker.stream.features import Features
from worker.stream.packing import Block, pieces, to_base64
from worker.stream.settings import LATER_SETTINGS, SETTINGS, Arm

if TYPE_CHECKING:  # a version's hash is that of its record: the value imports this file
    from worker.stream.parameters import Parameters

#: Fields that are written as they are, and what they must be when they are read.
PLAIN: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("version", "effective_at", "made_at", "journal_offset", "resume_offset"), (int,)),
    **dict.fromkeys(("folds", "observations", "expected_sessions", "explore_budget"), (int,)),
    "window_end": (int, NoneType),
    "parent_sha256": (str,),
    "frozen": (bool,),
    "thresholds": (list, tuple),
    "radius": (int, float),
}
COUNTS = ("displayed", "answered")
_UNCOVERED = frozenset(
    ["sha256", "made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress", "kernels"]
)


def encode_parameters(parameters: Parameters) -> bytes:
    """Return the record of a version, its hash included; the same version gives the same bytes."""
    record, blocks = record_of(parameters)
    record["sha256"] = parameters.known_sha256 or digest_of(record, blocks)
    return b"".join(pieces(orjson.dumps(record, option=orjson.OPT_SORT_KEYS), blocks))


def parameters_document(parameters: Parameters) -> dict[str, Any]:
    """Return the record of a version as a document, to put it into another record."""
    document: dict[str, Any] = orjson.loads(encode_parameters(parameters))
    return document


def record_of(parameters: Parameters) -> tuple[dict[str, Any], list[Block]]:
    """Return the record without its arrays, and these as blocks (see `packing.py`)."""
    settings, arrays = parameters.settings, arrays_of(parameters)
    record: dict[str, Any] = {
        **{name: getattr(parameters, name) for name in PLAIN},
        **{name: getattr(settings, name) for name in SETTINGS},
        "progress": {str(partition): time for partition, time in sorted(parameters.progress.items())},
        "arms": [_arm_document(arm) for arm in parameters.arms],
    }
    for name, first in LATER_SETTINGS.items():
        if (value := getattr(settings, name)) != first:
            record[name] = value.document() if isinstance(value, Features) else value
    if parameters.ties:
        record["ties"] = parameters.ties
    if parameters.kernels:
        record["kernels"] = parameters.kernels
    if parameters.shares != ALL:
        record["learn_shares"] = parameters.shares._asdict()
    for number, (name, array) in enumerate(arrays.items()):
        *outer, last = name.split(".")
        target = record
        for part in outer:
            target = target.setdefault(part, {})
        target[last] = {"shape": list(array.shape), "data": f"@{number}"}
    return record, [to_base64(array) for array in arrays.values()]


def _arm_document(arm: Arm) -> dict[str, Any]:
    document: dict[str, Any] = {"arm": arm.arm, "reward": arm.reward, "active": arm.active}
    if arm.features:
        document["features"] = dict(arm.features)
    return document


def arrays_of(parameters: Parameters) -> dict[str, Floats]:
    """Return all arrays of a version; a dot nests them in the record."""
    arrays = dict(parameters.model.pack())
    if (counts := parameters.answers) is not None:
        arrays |= {f"answer_counts.{name}": getattr(counts, name) for name in COUNTS}
    if (known := parameters.standardisation) is not None:
        arrays |= {"standardisation.centre": known.centre, "standardisation.scale": known.scale}
    if parameters.pending is not None:
        arrays |= {f"pending.{name}": array for name, array in parameters.pending.pack().items()}
    return arrays


def digest_of(record: Mapping[str, Any], blocks: Sequence[Block]) -> str:
    """Return the hash of a record over all that it covers."""
    covered = {name: value for name, value in record.items() if name not in _UNCOVERED}
    digest = hashlib.sha256()
    for piece in pieces(orjson.dumps(covered, option=orjson.OPT_SORT_KEYS), blocks):
        digest.update(piece)
    return digest.hexdigest()
