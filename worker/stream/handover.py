"""A version that one process has decoded and prepared, taken apart for another one that serves by it.

The arrays travel as they are, in memory that both processes see, everything else as JSON. What is put together again is
the same version: every number has the same bits, so that it plans the same slates (`tests/stream/test_handover.py`).

Decoding checks a record, and so does putting it together, but not what takes long: the hash, and whether the precision
can be factorised.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import orjson

from worker.bandit.arrays import Array
from worker.bandit.click_model import ClickModel, Portable
from worker.bandit.models import MODELS
from worker.errors import AdcascadeError
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.version_decoding import arms_of, restored_parameters
from worker.stream.version_encoding import further_arrays_of, skeleton_of

#: Before the names of the arrays of the model, and of what is prepared beside it.
_MODEL, _PLANNER = "model/", "planner/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A version in parts: `record` and `arms` are JSON, and beside them there are only arrays."""

    record: bytes
    arms: bytes
    arrays: Mapping[str, Array]


def prepared(parameters: Parameters) -> SlatePlanner:
    """Return the planner of a version, with all that serving and the status page need of it: this can take a second."""
    planner = SlatePlanner(parameters)
    planner.prepare()
    if parameters.arms:
        with np.errstate(all="ignore"), suppress(AdcascadeError, ArithmeticError, ValueError):
            nobody = np.zeros((1, parameters.settings.dim))
            parameters.model.squared_widths_of(nobody, np.zeros((1, 1), dtype=np.intp))
    return planner


def take_apart(planner: SlatePlanner) -> Handover:
    """Return a version, and what is prepared of it, in parts."""
    parameters = planner.parameters
    model, further = parameters.model, further_arrays_of(parameters)
    own = model.export() if isinstance(model, Portable) else model.pack()
    record = {**skeleton_of(parameters, further), "sha256": parameters.sha256}
    arms = record.pop("arms")
    return Handover(
        record=orjson.dumps(record),
        arms=orjson.dumps(arms),
        arrays={
            **further,
            **{f"{_MODEL}{name}": array for name, array in own.items()},
            **{f"{_PLANNER}{name}": array for name, array in planner.export().items()},
        },
    )


class Assembler:
    """Puts versions together. Arms that did not change since the last version are the same objects."""

    def __init__(self) -> None:
        self._arms: tuple[bytes, tuple[Arm, ...]] = b"[]", ()

    def put_together(self, parts: Handover) -> SlatePlanner:
        """Return the planner of a version, which keeps the large arrays and goes on with what is prepared."""
        record = orjson.loads(parts.record)
        if self._arms[0] != parts.arms:
            self._arms = parts.arms, arms_of(orjson.loads(parts.arms))
        parameters = restored_parameters(
            record,
            parts.arrays.__getitem__,
            arms=self._arms[1],
            make_model=lambda settings: _model(settings, _under(_MODEL, parts.arrays)),
        )
        return SlatePlanner(parameters, _under(_PLANNER, parts.arrays))


def _model(settings: LearningSettings, arrays: Mapping[str, Array]) -> ClickModel:
    kind = MODELS[settings.model]
    if issubclass(kind, Portable):
        return kind.restore(arrays, intercept=settings.intercept)
    return kind.unpack(arrays, intercept=settings.intercept)


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
