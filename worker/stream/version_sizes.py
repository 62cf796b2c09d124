"""A bound on the size of the record of a version.

Rules that hold in this file:

- The bound follows from the number of arms, their ids and features, the shape of the model and the sessions that may be
  pending. No reward and no estimate changes it, so a version whose bound fits can be published with any estimate. This
  limits the number of arms.
- Only what adds arms or columns is refused. Settings, thresholds and progress have the `RESERVE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import orjson

from worker.bandit.click_model import ClickModel
from worker.errors import InputError
from worker.stream.accounts import accounts_size
from worker.stream.calibration import ROWS as CALIBRATED
from worker.stream.contexts import LEAST_SESSIONS, SCALES
from worker.stream.features import widest
from worker.stream.misfit import pairs_under
from worker.stream.packing import bytes_per_number
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import COUNTS, SCORES

if TYPE_CHECKING:
    from worker.stream.parameters import Parameters

#: Bytes of the largest record of a version; the topic `parameters` takes it.
VERSION_BYTES: Final = 16 << 20
#: Bytes for everything but arms and model: the progress of 10,000 partitions, for instance.
RESERVE: Final = 256 << 10
#: Bytes of an arm without its id: names, marks, and the longest number.
_PER_ARM: Final = len(b'{"active":false,"arm":,"reward":},') + 24
_PER_ARRAY: Final = 128
#: Bytes of the index of an arm in the order by popularity.
_PER_INDEX: Final = 8
#: Bytes for the features of an arm, without themselves; numbers may be written longer than they are given.
_PER_FEATURES: Final = len(b'"features":,')


def largest_size(arms: Sequence[Arm], model: ClickModel, settings: LearningSettings) -> int:
    """Return the most bytes that the record of a version with these arms, this model and these settings can have."""
    ids = len(orjson.dumps([arm.arm for arm in arms]))
    features = sum(_PER_FEATURES + len(orjson.dumps(dict(arm.features))) for arm in arms if arm.features)
    declared = 0 if settings.features is None else len(orjson.dumps(settings.features.document()))
    declared += len(orjson.dumps(settings.order))
    if settings.tagged is not None:
        declared += len(msgspec.json.encode(settings.tagged))
    if settings.control_share and settings.control == "popular":
        declared += _PER_INDEX * len(arms)
    # Of calibration, and of misfit.
    sizes = [len(CALIBRATED) * len(arms), *[pairs_under(settings, len(arms)).firsts[-1] * len(arms)] * len(SCORES)]
    if settings.answers == "learned":
        sizes += [len(arms) * settings.horizon] * len(COUNTS)
    if settings.standardise:
        sizes += [settings.dim] * len(SCALES)
        sizes += [(LEAST_SESSIONS - 1) * settings.dim, *[(LEAST_SESSIONS - 1) * settings.horizon] * 4]  # pending
    numbers = [8 * size for size in sizes]
    counts = {name: array.size for name, array in model.pack().items()}
    if model.most_inherited:
        counts["precision.inherited"] = model.most_inherited
    numbers += [bytes_per_number(name) * size for name, size in counts.items()]
    arrays = sum(_PER_ARRAY + 4 * (size // 3 + 1) for size in numbers)
    return RESERVE + ids + accounts_size(len(arms)) + _PER_ARM * len(arms) + features + declared + arrays


def too_large(parameters: Parameters, most: int = VERSION_BYTES) -> str | None:
    """Return why a version does not fit into a record with anything that it may learn; None if it does.

    >>> from worker.stream.parameters import Parameters
    >>> arms = tuple(Arm(arm=str(n), reward=1.0) for n in range(60_000))
    >>> too_large(Parameters.first(LearningSettings(dim=32, model="additive", answers="all", standardise=False), arms))
    '60,000 arms of 32 features take up to 37.0 MiB, more than the 16 MiB of a record: 25,709 such arms fit'
    """
    arms, model, settings = parameters.arms, parameters.model, parameters.settings
    size = largest_size(arms, model, settings)
    if size <= most:
        return None
    columns = 0 if settings.features is None else settings.features.ad_dim
    nothing = type(model).prior(
        dim=model.dim, arms=0, ridge=1.0, features=np.zeros((0, columns)), horizon=settings.horizon
    )
    inherited = model.pack().get("precision.inherited", np.zeros(0))
    fixed = largest_size((), nothing, settings) + 4 * bytes_per_number("precision.inherited") * inherited.size // 3
    room = max(0, int((most - fixed) * len(arms) / max(1, size - fixed)))  # with ids as long as these on average
    reason = (
        f"{len(arms):,} arms of {model.dim} features take up to {size / 2**20:.1f} MiB, more than the "
        f"{most / 2**20:g} MiB of a record: {room:,} such arms fit"
    )
    widths = [] if settings.features is None else [*settings.features.named_widths, *settings.features.ad_widths]
    if not widths:
        return reason
    return f"{reason}; of {model.dim:,} columns of contexts and {columns:,} of ads, {widest(widths)}"


def check_size(parameters: Parameters) -> None:
    """Raise `InputError` if a version does not fit into a record."""
    if reason := too_large(parameters):
        raise InputError(f"the catalogue is too large: {reason}")
