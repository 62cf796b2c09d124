"""The size of a version's record, and with it the limit on the number of arms.

Rules that hold in this file:

- The size is an upper bound that follows from the number of arms, their ids and the shape of the model. No reward and
  no estimate changes it, so a version whose bound fits can be published whatever is learned.
- Only what adds arms is refused. What else a version holds has the `RESERVE`: settings, thresholds, progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from worker.bandit.click_model import ClickModel
from worker.errors import InputError
from worker.stream.settings import Arm

#: Bytes of the largest record of a version; the topic `parameters` takes it.
VERSION_BYTES: Final = 16 << 20
#: Bytes for everything but arms and model: the progress of 10,000 partitions, for instance.
RESERVE: Final = 256 << 10
#: Bytes of an arm beside its id: names, marks, and the longest number.
_PER_ARM: Final = len(b'{"active":false,"arm":,"reward":},') + 24
_PER_ARRAY: Final = 128


def largest_size(arms: Sequence[Arm], model: ClickModel) -> int:
    """Return the most bytes that the record of a version with these arms and this model can have."""
    ids = len(orjson.dumps([arm.arm for arm in arms]))
    packed = sum(_PER_ARRAY + 4 * (array.nbytes // 3 + 1) for array in model.pack().values())
    return RESERVE + ids + _PER_ARM * len(arms) + packed


def too_large(arms: Sequence[Arm], model: ClickModel, most: int = VERSION_BYTES) -> str | None:
    """Return why a version with these arms and this model does not fit into a record; None if it does.

    >>> from worker.bandit.additive import AdditiveModel
    >>> arms = [Arm(arm=str(n), reward=1.0) for n in range(60_000)]
    >>> too_large(arms, AdditiveModel.prior(dim=32, arms=60_000, ridge=1.0))
    '60,000 arms of 32 features take up to 24.8 MiB, more than the 16 MiB of a record: 38,515 such arms fit'
    """
    size = largest_size(arms, model)
    if size <= most:
        return None
    return (
        f"{len(arms):,} arms of {model.dim} features take up to {size / 2**20:.1f} MiB, more than the "
        f"{most / 2**20:g} MiB of a record: {_room(arms, model, size, most):,} such arms fit"
    )


def check_size(arms: Sequence[Arm], model: ClickModel, most: int = VERSION_BYTES) -> None:
    """Raise `InputError` if a version with these arms and this model does not fit into a record."""
    if reason := too_large(arms, model, most):
        raise InputError(f"the catalogue is too large: {reason}")


def _room(arms: Sequence[Arm], model: ClickModel, size: int, most: int) -> int:
    """Return how many arms fit, with ids as long as these have on average."""
    fixed = largest_size((), type(model).prior(dim=model.dim, arms=0, ridge=1.0))
    return max(0, int((most - fixed) * len(arms) / max(1, size - fixed)))
