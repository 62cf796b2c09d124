"""Read a version from its JSON record, and check it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import orjson

from worker.bandit import MODELS
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import Floats
from worker.bandit.click_model import ClickModel
from worker.errors import InputError, ParametersError
from worker.stream.budget import Shares
from worker.stream.features import Features
from worker.stream.observed import ARRAYS, ObservedSessions
from worker.stream.packing import Block, cut, from_base64
from worker.stream.parameters import Parameters
from worker.stream.settings import LATER_SETTINGS, SETTINGS, Arm, LearningSettings, is_whole
from worker.stream.standardising import Standardisation
from worker.stream.version_encoding import COUNTS, PLAIN, digest_of

#: Returns an array of a version by its name.
ReadArray = Callable[[str], Floats]


def decode_parameters(value: bytes, *, complete: bool = True) -> Parameters:
    """Decode a version and check its hash.

    With `complete` false (a file written by hand for `explain`), fields not needed for planning may be missing and
    arrays may be nested lists; a hash is then checked only if there is one.
    """
    record, blocks = _opened(value)
    given = record.get("sha256")
    if complete and not isinstance(given, str):
        raise ParametersError("there is no sha256")
    try:
        if given is not None and digest_of(record, blocks) != given:
            raise ParametersError("its sha256 does not fit its content: it was changed or damaged")
        return _parameters(record, lambda name: _array(record, name, blocks), complete)
    except ParametersError:
        raise
    except InputError as error:
        raise ParametersError(str(error)) from None
    except KeyError as error:
        raise ParametersError(f"the field {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise ParametersError(f"a field has the wrong type: {error}") from None


def _opened(value: bytes) -> tuple[dict[str, Any], list[Block]]:
    try:
        skeleton, blocks = cut(value)
        record = orjson.loads(skeleton)
    except ValueError as error:  # JSONDecodeError is one
        raise ParametersError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ParametersError("not a JSON object")
    return record, blocks


def parameters_of(document: Mapping[str, Any]) -> Parameters:
    """Return the version in a document and check its hash."""
    try:
        value = orjson.dumps(document)
    except orjson.JSONEncodeError as error:  # nested too deeply, or an integer of more than 64 bits
        raise ParametersError(str(error)) from None
    return decode_parameters(value)


def _parameters(record: Mapping[str, Any], read: ReadArray, complete: bool) -> Parameters:
    later = _later_settings(record)
    model = _model(later["model"], read, intercept=later["intercept"] is True)
    known = {**({} if complete else _planning_defaults(record, model)), **record}
    named = {name: known[name] for name in SETTINGS if complete or name in known}
    settings = LearningSettings(**named, **later)
    listed = _checked(known, "arms", (list,))
    if not complete:
        listed = [{"active": True, **arm} for arm in listed]
    arms = _arms(listed)
    progress = {int(partition): time for partition, time in _checked(known, "progress", (dict,)).items()}
    if not all(map(is_whole, progress.values())):
        raise ParametersError("progress must be whole numbers")
    plain = {name: _checked(known, name, kinds) for name, kinds in PLAIN.items()}
    plain["thresholds"] = tuple(plain["thresholds"])
    plain["ties"] = tuple(_checked({"ties": [], **known}, "ties", (list, tuple)))
    return Parameters(
        settings=settings,
        arms=arms,
        model=model,
        progress=progress,
        answers=_answers(known, read),
        standardisation=_standardisation(known, read),
        pending=_pending(known, read, dim=settings.dim, arms=len(arms)),
        kernels=_checked({"kernels": "", **known}, "kernels", (str,)),
        shares=Shares.of_document(_checked({"learn_shares": {}, **known}, "learn_shares", (dict,))),
        **plain,
    )


def _arms(documents: Iterable[Mapping[str, Any]]) -> tuple[Arm, ...]:
    return tuple(
        [
            Arm(arm=arm["arm"], reward=arm["reward"], active=arm["active"], features=arm.get("features", ()))
            for arm in documents
        ]
    )


def _later_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    later = {name: record.get(name, first) for name, first in LATER_SETTINGS.items()}
    if later["features"] is not None:
        later["features"] = Features.of_document(later["features"])
    return later


def _answers(record: Mapping[str, Any], read: ReadArray) -> AnswerCounts | None:
    if record.get("answer_counts") is None:
        return None
    displayed, answered = (read(f"answer_counts.{name}") for name in COUNTS)
    return AnswerCounts(displayed=displayed, answered=answered)


def _standardisation(record: Mapping[str, Any], read: ReadArray) -> Standardisation | None:
    if record.get("standardisation") is None:
        return None
    centre, scale = (read(f"standardisation.{name}") for name in ("centre", "scale"))
    return Standardisation(centre=centre, scale=scale)


def _pending(record: Mapping[str, Any], read: ReadArray, *, dim: int, arms: int) -> ObservedSessions | None:
    if record.get("pending") is None:
        return None
    arrays = {name: read(f"pending.{name}") for name in ARRAYS}
    return ObservedSessions.unpack(arrays, dim=dim, arms=arms)


def _checked(record: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = record[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ParametersError(f"{name} has the wrong type: {value!r}")
    return value


def _planning_defaults(record: Mapping[str, Any], model: ClickModel) -> dict[str, Any]:
    """Return what a hand-written file may leave out."""
    beta = record.get("beta")
    return {
        **{f.name: f.default for f in fields(Parameters) if f.default is not MISSING},
        "version": 0,
        "progress": {},
        "radius": beta if isinstance(beta, int | float) else 0.0,
        "warmup": 0,
        "dim": model.dim,
    }


def _model(kind: Any, read: ReadArray, *, intercept: bool) -> ClickModel:
    if kind not in tuple(MODELS):
        raise ParametersError(f"unknown model {kind!r}; one of {', '.join(MODELS)}")
    arrays = {name: read(name) for name in MODELS[kind].fields}
    return MODELS[kind].unpack(arrays, intercept=intercept)


def _array(record: Mapping[str, Any], name: str, blocks: Sequence[Block]) -> Floats:
    value: Any = record
    for part in name.split("."):
        value = value[part]
    try:
        if isinstance(value, Mapping):
            data = value["data"]
            block = blocks[int(data[1:])] if data.startswith("@") else data.encode("ascii")
            return from_base64(block).astype(np.float64, copy=False).reshape(value["shape"])
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ParametersError(f"{name} is not an array of numbers: {error}") from None
