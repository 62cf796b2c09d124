"""The size of a version's record, and with it the limit on the number of arms.

Rules that hold in this file:

- The size is an upper bound that follows from the number of arms, their ids and features, the shape of the model and
  the sessions that may be pending. No reward and no estimate changes it, so a version whose bound fits can be
  published whatever is learned.
- Only what adds arms is refused. What else a version holds has the `RESERVE`: settings, thresholds, progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import orjson

from worker.bandit.click_model import ClickModel
from worker.errors import InputError
from worker.stream.settings import Arm, LearningSettings
from worker.stream.standardising import LEAST_SESSIONS

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
