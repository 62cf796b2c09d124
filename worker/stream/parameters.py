"""One version of everything that serving needs: the estimate, the arms, and the settings it was made under.

The learner publishes versions, workers plan by them, `replay --verify` makes them again. A version's `sha256` covers
the whole model, but not the time and position at which it was made. So equal hashes mean equal decisions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType
from typing import Any

import numpy as np
import orjson
from numpy.typing import DTypeLike

from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import Floats
from worker.bandit.bonuses import bonus_named
from worker.bandit.click_model import ClickModel
from worker.bandit.models import MODELS
from worker.bandit.planning import Planner
from worker.bandit.policies import Exploration, Policy, policy_named
from worker.bandit.schedule import theory_radius
from worker.errors import InputError, ParametersError
from worker.stream.ad_features import with_ads
from worker.stream.budget import ALL, Shares
from worker.stream.features import Features
from worker.stream.observed import ARRAYS, ObservedSessions
from worker.stream.packing import Block, cut, from_base64, pieces, to_base64
from worker.stream.settings import LATER_SETTINGS, SETTINGS, Arm, LearningSettings, is_number, is_whole
from worker.stream.standardising import LEAST_SESSIONS, Standardisation, without_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A version. `progress` is the highest progress per partition; `radius` the value of β "theory".

    `ties` is, per step, the share of the sessions with exactly the score of the threshold that explore; empty: all.
    `standardisation` is known from the first fold on. Until then `pending` has the sessions that wait for it.
    `shares` are those of the sessions that serving journals.
    """

    version: int
    settings: LearningSettings
    arms: tuple[Arm, ...]
    model: ClickModel = field(repr=False)
    parent_sha256: str = ""
    effective_at: int = 0
    made_at: int = 0
    window_end: int | None = None
    journal_offset: int = -1
    resume_offset: int = 0
    progress: Mapping[int, int] = field(default_factory=dict)
    frozen: bool = False
    folds: int = 0
    observations: int = 0
    expected_sessions: int = 0
    explore_budget: int = 0
    thresholds: tuple[float, ...] = ()
    radius: float = 0.0
    ties: tuple[float, ...] = ()
    answers: AnswerCounts | None = field(default=None, repr=False)
    standardisation: Standardisation | None = field(default=None, repr=False)
    pending: ObservedSessions | None = field(default=None, repr=False)
    shares: Shares = ALL
    _sha256: str = field(default="", init=False, repr=False, compare=False)  # once it is computed

    def __post_init__(self) -> None:
        if self.model.name != self.settings.model:
            raise ParametersError(f"the model is {self.model.name}, the settings say {self.settings.model}")
        if self.model.dim != self.settings.dim:
            raise ParametersError(f"the model has {self.model.dim} context features, dim says {self.settings.dim}")
        if self.model.arms != len(self.arms):
            raise ParametersError(f"the model has {self.model.arms} arms, the catalogue {len(self.arms)}")
        names = [arm.arm for arm in self.arms]
        if len(set(names)) != len(names):
            raise ParametersError("two arms have the same id")
        if self.thresholds and len(self.thresholds) != self.settings.horizon:
            raise ParametersError(f"{len(self.thresholds)} thresholds for a horizon of {self.settings.horizon}")
        if self.ties and len(self.ties) != len(self.thresholds):
            raise ParametersError(f"{len(self.ties)} ties for {len(self.thresholds)} thresholds")
        # orjson would write null for a number that is not finite.
        if not all(map(is_number, (*self.thresholds, *self.ties, self.radius))):
            raise ParametersError("a threshold or the confidence radius is not finite")
        if self.answers is not None:
            shape = (self.settings.horizon, len(self.arms))
            if self.answers.displayed.shape != shape:
                raise ParametersError(f"answers have the shape {self.answers.displayed.shape}, not {shape}")
        self.shares.check()
        object.__setattr__(self, "thresholds", tuple(map(float, self.thresholds)))
        object.__setattr__(self, "ties", tuple(map(float, self.ties)))
        object.__setattr__(self, "radius", float(self.radius))
        self._check_standardisation()

    def _check_standardisation(self) -> None:
        dim, pending = self.settings.dim, self.pending
        if self.standardisation is not None and len(self.standardisation.centre) != dim:
            raise ParametersError(f"the standardisation has {len(self.standardisation.centre)} numbers, dim says {dim}")
        if pending is not None:
            if not self.awaits_standardisation:
                raise ParametersError("sessions are pending, but there is nothing that they wait for")
            if len(pending) >= LEAST_SESSIONS or pending.contexts.shape[1] != dim:
                raise ParametersError(f"{len(pending)} sessions are pending, at most {LEAST_SESSIONS - 1} can be")
            if pending.arms.max(initial=0) >= max(1, len(self.arms)):
                raise ParametersError("a pending display is of an arm that there is not")

    @classmethod
    def first(cls, settings: LearningSettings, arms: tuple[Arm, ...]) -> Parameters:
        """Return version 0: the prior over the configured arms; all explore.

        Features of ads that are not declared are inferred from the arms; raise `InputError` if an arm does not fit.
        """
        features = with_ads(settings.features, arms)
        if features is not settings.features:
            settings = replace(settings, features=features)
        return cls(
            version=0,
            settings=settings,
            arms=arms,
            model=first_model(settings, arms),
            thresholds=(0.0,) * settings.horizon,
            radius=first_radius(settings, arms),
            answers=counts_for(settings, len(arms)),
        )

    @property
    def rewards(self) -> Floats:
        """Revenue of each arm, (K,)."""
        return np.array([arm.reward for arm in self.arms])

    @property
    def rates(self) -> AnswerRates | None:
        """How likely displays are answered; None where every one counts as answered."""
        return None if self.answers is None else self.answers.rates()

    @property
    def beta(self) -> float:
        """The number of standard deviations that counts, also under "theory"."""
        beta = self.settings.beta
        return self.radius if isinstance(beta, str) else float(beta)

    @property
    def indices(self) -> dict[str, int]:
        """The index of each arm by its id."""
        return {arm.arm: index for index, arm in enumerate(self.arms)}

    @property
    def awaits_standardisation(self) -> bool:
        """Whether the next fold has to estimate centre and scale of contexts first."""
        return self.settings.standardise and self.standardisation is None and self.folds == 0

    def prepared(self, contexts: Floats) -> Floats:
        """Return contexts (n, d) as the model takes them: standardised, a missing number as the mean."""
        return without_gaps(contexts) if self.standardisation is None else self.standardisation.apply(contexts)

    @property
    def ad_columns(self) -> Floats:
        """The features of the arms as the model takes them, (K, columns); (K, 0) if there are none."""
        return ad_columns(self.settings, self.arms)

    def planner(self, dtype: DTypeLike = np.float32) -> Planner | None:
        """Return a planner under this version; None if there is no arm to show."""
        active = np.array([arm.active for arm in self.arms], dtype=bool)
        if not active.any():
            return None
        return Planner(
            self.model,
            self.rewards,
            horizon=self.settings.horizon,
            active=active,
            repeats=self.settings.repeats,
            answers=self.rates,
            dtype=dtype,
        )

    def policy(self) -> Policy:
        """Return the policy of this version."""
        settings = self.settings
        return policy_named(settings.policy).under(
            Exploration(
                beta=self.beta,
                bonus=bonus_named(settings.bonus),
                epsilon=settings.epsilon,
                thresholds=self.thresholds or (0.0,) * settings.horizon,
                ties=self.ties or None,
            )
        )

    @property
    def sha256(self) -> str:
        """The hash over the model: every field but itself, made_at, effective_at, window_end, offsets and progress."""
        if not self._sha256:
            object.__setattr__(self, "_sha256", _digest(*_record(self)))
        return self._sha256


def ad_columns(settings: LearningSettings, arms: Sequence[Arm]) -> Floats:
    """Return the features of arms as the model takes them, (K, columns); (K, 0) if none are declared."""
    return np.zeros((len(arms), 0)) if settings.features is None else settings.features.ad_columns(arms)


def first_model(settings: LearningSettings, arms: Sequence[Arm]) -> ClickModel:
    """Return the belief about these arms before any data."""
    return MODELS[settings.model].prior(
        dim=settings.dim,
        arms=len(arms),
        ridge=settings.ridge,
        features=ad_columns(settings, arms),
        intercept=settings.intercept,
    )


def counts_for(settings: LearningSettings, arms: int) -> AnswerCounts | None:
    """Return empty counts of answers if they are learned; where passes are not reported, they cannot be."""
    if settings.answers == "all" or settings.unanswered == "passed":
        return None
    return AnswerCounts.none(arms=arms, horizon=settings.horizon)


def first_radius(settings: LearningSettings, arms: Sequence[Arm]) -> float:
    """Return β before any display; under "theory" with the least bound on ‖z‖, so that even version 0 explores."""
    if not isinstance(settings.beta, str):
        return settings.beta
    return theory_radius(
        dim=settings.dim,
        arms=len(arms),
        largest_reward=max((arm.reward for arm in arms), default=0.0),
        largest_norm=math.sqrt(1 + settings.dim),
        ridge=settings.ridge,
        displays=0,
    )


# ── as JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Fields that are written as they are, and what they must be when they are read.
_PLAIN: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("version", "effective_at", "made_at", "journal_offset", "resume_offset"), (int,)),
    **dict.fromkeys(("folds", "observations", "expected_sessions", "explore_budget"), (int,)),
    "window_end": (int, NoneType),
    "parent_sha256": (str,),
    "frozen": (bool,),
    "thresholds": (list, tuple),
    "radius": (int, float),
}
_COUNTS = ("displayed", "answered")
_UNCOVERED = frozenset(
    ["sha256", "made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress"]
)


def encode_parameters(parameters: Parameters) -> bytes:
    """Return the record of a version, its hash included; the same version gives the same bytes."""
    record, blocks = _record(parameters)
    record["sha256"] = parameters._sha256 or _digest(record, blocks)
    return b"".join(pieces(orjson.dumps(record, option=orjson.OPT_SORT_KEYS), blocks))


def _record(parameters: Parameters) -> tuple[dict[str, Any], list[Block]]:
    """Return the record without its arrays, and these as blocks (see `packing.py`)."""
    settings = parameters.settings
    record: dict[str, Any] = {
        **{name: getattr(parameters, name) for name in _PLAIN},
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
    blocks: list[Block] = []
    for name, array in arrays_of(parameters).items():
        *outer, last = name.split(".")
        target = record
        for part in outer:
            target = target.setdefault(part, {})
        target[last] = {"shape": list(array.shape), "data": f"@{len(blocks)}"}
        blocks.append(to_base64(array))
    return record, blocks


def _arm_document(arm: Arm) -> dict[str, Any]:
    document: dict[str, Any] = {"arm": arm.arm, "reward": arm.reward, "active": arm.active}
    if arm.features:
        document["features"] = dict(arm.features)
    return document


def arrays_of(parameters: Parameters) -> dict[str, Floats]:
    """Return all arrays of a version; a dot nests them in the record."""
    arrays = dict(parameters.model.pack())
    if (counts := parameters.answers) is not None:
        arrays |= {f"answer_counts.{name}": getattr(counts, name) for name in _COUNTS}
    if (known := parameters.standardisation) is not None:
        arrays |= {"standardisation.centre": known.centre, "standardisation.scale": known.scale}
    if parameters.pending is not None:
        arrays |= {f"pending.{name}": array for name, array in parameters.pending.pack().items()}
    return arrays


def _digest(record: Mapping[str, Any], blocks: Sequence[Block]) -> str:
    covered = {name: value for name, value in record.items() if name not in _UNCOVERED}
    digest = hashlib.sha256()
    for piece in pieces(orjson.dumps(covered, option=orjson.OPT_SORT_KEYS), blocks):
        digest.update(piece)
    return digest.hexdigest()


def decode_parameters(value: bytes, *, complete: bool = True) -> Parameters:
    """Decode a version and check its hash.

    With `complete` false (a file written by hand for `explain`), fields not needed for planning may be missing and
    arrays may be nested lists; a hash is then checked only if there is one.
    """
    try:
        skeleton, blocks = cut(value)
        record = orjson.loads(skeleton)
    except ValueError as error:  # JSONDecodeError is one
        raise ParametersError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ParametersError("not a JSON object")
    given = record.get("sha256")
    if complete and not isinstance(given, str):
        raise ParametersError("there is no sha256")
    try:
        if given is not None and _digest(record, blocks) != given:
            raise ParametersError("its sha256 does not fit its content: it was changed or damaged")
        return _parameters(record, blocks, complete)
    except ParametersError:
        raise
    except InputError as error:
        raise ParametersError(str(error)) from None
    except KeyError as error:
        raise ParametersError(f"the field {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise ParametersError(f"a field has the wrong type: {error}") from None


def parameters_document(parameters: Parameters) -> dict[str, Any]:
    """Return the record of a version as a document, to put it into another record."""
    document: dict[str, Any] = orjson.loads(encode_parameters(parameters))
    return document


def parameters_of(document: Mapping[str, Any]) -> Parameters:
    """Return the version in a document and check its hash."""
    try:
        value = orjson.dumps(document)
    except orjson.JSONEncodeError as error:  # nested too deeply, or an integer of more than 64 bits
        raise ParametersError(str(error)) from None
    return decode_parameters(value)


def _parameters(record: Mapping[str, Any], blocks: Sequence[Block], complete: bool) -> Parameters:
    later = {name: record.get(name, first) for name, first in LATER_SETTINGS.items()}
    if later["features"] is not None:
        later["features"] = Features.of_document(later["features"])
    model = _model(later["model"], record, blocks, intercept=later["intercept"] is True)
    known = {**({} if complete else _planning_defaults(record, model)), **record}
    named = {name: known[name] for name in SETTINGS if complete or name in known}
    settings = LearningSettings(**named, **later)
    listed = _checked(known, "arms", (list,))
    if not complete:
        listed = [{"active": True, **arm} for arm in listed]
    arms = tuple(
        [
            Arm(arm=arm["arm"], reward=arm["reward"], active=arm["active"], features=arm.get("features", ()))
            for arm in listed
        ]
    )
    progress = {int(partition): time for partition, time in _checked(known, "progress", (dict,)).items()}
    if not all(map(is_whole, progress.values())):
        raise ParametersError("progress must be whole numbers")
    plain = {name: _checked(known, name, kinds) for name, kinds in _PLAIN.items()}
    plain["thresholds"] = tuple(plain["thresholds"])
    plain["ties"] = tuple(_checked({"ties": [], **known}, "ties", (list, tuple)))
    return Parameters(
        settings=settings,
        arms=arms,
        model=model,
        progress=progress,
        answers=_answers(known, blocks),
        standardisation=_standardisation(known, blocks),
        pending=_pending(known, blocks, dim=settings.dim, arms=len(arms)),
        shares=Shares.of_document(_checked({"learn_shares": {}, **known}, "learn_shares", (dict,))),
        **plain,
    )


def _answers(record: Mapping[str, Any], blocks: Sequence[Block]) -> AnswerCounts | None:
    if record.get("answer_counts") is None:
        return None
    displayed, answered = (_array(record, f"answer_counts.{name}", blocks) for name in _COUNTS)
    return AnswerCounts(displayed=displayed, answered=answered)


def _standardisation(record: Mapping[str, Any], blocks: Sequence[Block]) -> Standardisation | None:
    if record.get("standardisation") is None:
        return None
    centre, scale = (_array(record, f"standardisation.{name}", blocks) for name in ("centre", "scale"))
    return Standardisation(centre=centre, scale=scale)


def _pending(record: Mapping[str, Any], blocks: Sequence[Block], *, dim: int, arms: int) -> ObservedSessions | None:
    if record.get("pending") is None:
        return None
    arrays = {name: _array(record, f"pending.{name}", blocks) for name in ARRAYS}
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


def _model(kind: Any, record: Mapping[str, Any], blocks: Sequence[Block], *, intercept: bool) -> ClickModel:
    if kind not in tuple(MODELS):
        raise ParametersError(f"unknown model {kind!r}; one of {', '.join(MODELS)}")
    arrays = {name: _array(record, name, blocks) for name in MODELS[kind].fields}
    return MODELS[kind].unpack(arrays, intercept=intercept)


def _array(record: Mapping[str, Any], name: str, blocks: Sequence[Block]) -> Floats:
    value: Any = record
    for part in name.split("."):
        value = value[part]
    try:
        if isinstance(value, Mapping):
            data = value["data"]
            block = blocks[int(data[1:])] if data.startswith("@") else data.encode("ascii")
            return from_base64(block).astype(np.float64).reshape(value["shape"])
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ParametersError(f"{name} is not an array of numbers: {error}") from None


def with_settings(parameters: Parameters, **changes: Any) -> Parameters:
    """Return the same estimate under other settings."""
    settings = replace(parameters.settings, **changes)
    if settings.horizon == parameters.settings.horizon:
        return replace(parameters, settings=settings)
    answers = parameters.answers
    fitted = None if answers is None else answers.with_horizon(settings.horizon)
    return replace(parameters, settings=settings, thresholds=(), ties=(), answers=fitted)
