"""The JSON record of a version: written, hashed, and bounded in size.

Rules that hold in this file:

- The same version gives the same bytes. The hash covers everything but the time and position at which it was made.
- The size has an upper bound that follows from the number of arms, their ids and features, the shape of the model and
  the sessions that may be pending. No reward and no estimate changes it, so a version whose bound fits can be
  published whatever is learned. This limits the number of arms.
- Only what adds arms is refused. What else a version holds has the `RESERVE`: settings, thresholds, progress.
"""

from __future__ import annotations

import hashlib
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from worker.bandit.arrays import Floats
from worker.stream.chance import ALL
from worker.stream.features import Features
from worker.stream.settings import LATER_SETTINGS, SETTINGS, Arm

if TYPE_CHECKING:  # a version's hash is that of its record: the value imports this file
    from worker.stream.parameters import Parameters


from typing import Final

from worker.bandit.click_model import ClickModel
from worker.errors import InputError
from worker.stream.contexts import LEAST_SESSIONS
from worker.stream.settings import LearningSettings

#: Bytes of base64 that are converted at once; a multiple of 4. Between two steps, other threads get their turn.
STEP = 1 << 14

Block = bytes | memoryview

_OPEN = b'"data":"'
_PLACE = re.compile(rb'"data":"@(\d{1,6})"')


def cut(record: bytes) -> tuple[bytes, list[Block]]:
    """Return the skeleton of a record and its blocks of base64, which are views of the record.

    >>> skeleton, blocks = cut(b'{"data":"AAAA","shape":[0]}')
    >>> skeleton, [bytes(block) for block in blocks]
    (b'{"data":"@0","shape":[0]}', [b'AAAA'])
    """
    view = memoryview(record)
    parts: list[Block] = []
    blocks: list[Block] = []
    done = 0
    while (found := record.find(_OPEN, done)) >= 0:
        start = found + len(_OPEN)
        end = record.find(b'"', start)
        if end < 0 or record.startswith(b"@", start):
            raise ValueError("data is not base64")
        parts += [view[done:start], b"@%d" % len(blocks)]
        blocks.append(view[start:end])
        done = end
    return b"".join([*parts, view[done:]]), blocks


def pieces(skeleton: bytes, blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield the record again, piece by piece.

    >>> b"".join(pieces(b'{"data":"@0","shape":[0]}', [b"AAAA"]))
    b'{"data":"AAAA","shape":[0]}'
    """
    done = 0
    for place in _PLACE.finditer(skeleton):
        yield skeleton[done : place.start()]
        yield _OPEN
        yield blocks[int(place[1])]
        done = place.end() - 1
    yield skeleton[done:]


def to_base64(array: Floats) -> bytes:
    """Return an array as base64 of little-endian float64."""
    data = np.ascontiguousarray(array, dtype="<f8").reshape(-1).view(np.uint8).data
    step = STEP // 4 * 3
    return b"".join(b2a_base64(data[at : at + step], newline=False) for at in range(0, len(data), step))


def from_base64(block: Block) -> Floats:
    """Return the flat array of a block; raise `ValueError` if it is not base64 of whole numbers."""
    view, end = memoryview(block), 0
    data = np.empty(len(view) // 4 * 3, dtype=np.uint8)
    room = data.data
    for at in range(0, len(view), STEP):
        part = a2b_base64(view[at : at + STEP], strict_mode=True)
        room[end : end + len(part)] = part
        end += len(part)
    return data[:end].view("<f8")


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
    ["sha256", "made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress"]
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


#: Bytes of the largest record of a version; the topic `parameters` takes it.
VERSION_BYTES: Final = 16 << 20
#: Bytes for everything but arms and model: the progress of 10,000 partitions, for instance.
RESERVE: Final = 256 << 10
#: Bytes of an arm beside its id: names, marks, and the longest number.
_PER_ARM: Final = len(b'{"active":false,"arm":,"reward":},') + 24
_PER_ARRAY: Final = 128
#: Bytes for the features of an arm, beside themselves; numbers may be written longer than they are given.
_PER_FEATURES: Final = len(b'"features":,')


def largest_size(arms: Sequence[Arm], model: ClickModel, settings: LearningSettings | None = None) -> int:
    """Return the most bytes that the record of a version with these arms, this model and these settings can have."""
    ids = len(orjson.dumps([arm.arm for arm in arms]))
    features = sum(_PER_FEATURES + len(orjson.dumps(dict(arm.features))) for arm in arms if arm.features)
    packed = sum(_PER_ARRAY + 4 * (array.nbytes // 3 + 1) for array in model.pack().values())
    return (
        RESERVE
        + ids
        + _PER_ARM * len(arms)
        + features
        + packed
        + _of_answers(len(arms), settings)
        + _of_contexts(settings)
    )


def _of_answers(arms: int, settings: LearningSettings | None) -> int:
    """Return the bytes of the counts of answers."""
    if settings is None or settings.answers == "all":
        return 0
    return 2 * (_PER_ARRAY + 4 * (8 * arms * settings.horizon // 3 + 1))


def _of_contexts(settings: LearningSettings | None) -> int:
    """Return the most bytes for declared features, for centre and scale of contexts, and for pending sessions."""
    if settings is None:
        return 0
    declared = 0 if settings.features is None else len(orjson.dumps(settings.features.document()))
    if not settings.standardise:
        return declared
    numbers = (LEAST_SESSIONS - 1) * (settings.dim + 4 * settings.horizon) + 2 * settings.dim
    return declared + 7 * _PER_ARRAY + 4 * (8 * numbers // 3 + 1)


def too_large(
    arms: Sequence[Arm], model: ClickModel, most: int = VERSION_BYTES, *, settings: LearningSettings | None = None
) -> str | None:
    """Return why a version with these arms and this model does not fit into a record; None if it does.

    >>> from worker.bandit.additive import AdditiveModel
    >>> arms = [Arm(arm=str(n), reward=1.0) for n in range(60_000)]
    >>> too_large(arms, AdditiveModel.prior(dim=32, arms=60_000, ridge=1.0))
    '60,000 arms of 32 features take up to 24.8 MiB, more than the 16 MiB of a record: 38,515 such arms fit'
    """
    size = largest_size(arms, model, settings)
    if size <= most:
        return None
    return (
        f"{len(arms):,} arms of {model.dim} features take up to {size / 2**20:.1f} MiB, more than the "
        f"{most / 2**20:g} MiB of a record: {_room(arms, model, size, most, settings):,} such arms fit"
    )


def check_size(
    arms: Sequence[Arm], model: ClickModel, most: int = VERSION_BYTES, *, settings: LearningSettings | None = None
) -> None:
    """Raise `InputError` if a version with these arms and this model does not fit into a record."""
    if reason := too_large(arms, model, most, settings=settings):
        raise InputError(f"the catalogue is too large: {reason}")


def _room(arms: Sequence[Arm], model: ClickModel, size: int, most: int, settings: LearningSettings | None) -> int:
    """Return how many arms fit, with ids as long as these have on average."""
    columns = 0 if settings is None or settings.features is None else settings.features.ad_dim
    fixed = largest_size(
        (), type(model).prior(dim=model.dim, arms=0, ridge=1.0, features=np.zeros((0, columns))), settings
    )
    return max(0, int((most - fixed) * len(arms) / max(1, size - fixed)))
