"""One version of everything that serving needs: the estimate, the arms, and the settings of its making.

The learner publishes versions, workers plan by them, `replay --verify` makes them again. A version's `sha256` covers
the whole model, but not the time and position at which it was made. So equal hashes mean equal decisions. Its record
is written in `version_records.py`; here it is read and checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import msgspec
import numpy as np
import orjson
from msgspec import UNSET
from numpy.typing import DTypeLike

from worker.bandit import MODELS
from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import Floats
from worker.bandit.bonuses import BONUSES
from worker.bandit.click_model import ClickModel
from worker.bandit.groups import Groups
from worker.bandit.learning import AT_FIRST
from worker.bandit.planning import Planner
from worker.bandit.policies import POLICIES, Fixed, Policy
from worker.errors import InputError, OldVersionError, ParametersError
from worker.stream.accounts import NOTHING, Accounts
from worker.stream.ad_features import with_ads
from worker.stream.calibration import Calibration
from worker.stream.chance import stable_keys
from worker.stream.contexts import (
    ARRAYS,
    LEAST_SESSIONS,
    SCALES,
    WAITING,
    ObservedSessions,
    Standardisation,
    without_gaps,
)
from worker.stream.features import FormerFeatures
from worker.stream.lift import Lift
from worker.stream.misfit import Misfit
from worker.stream.settings import SETTINGS, Arm, LearningSettings, check_order, check_tagged, is_number
from worker.stream.version_records import (
    COUNTS,
    IF_SET,
    PLAIN,
    SCORES,
    ArmRecord,
    ArraysOf,
    StartRecord,
    VersionRecord,
    digest_of,
    document_of,
)

#: A threshold above every score.
NEVER: Final = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A version. `progress` is the highest progress per partition.

    `accounts` are the sums per ad of all windows that were closed when it was made, `lift` is the comparison with the
    control group in them. `guarded` versions do not explore. `popular` are the arms by falling revenue per display.
    `calibration` and `misfit` are sums of how well clicks were predicted, and of what the model may miss.
    `clock` is t of the exploration schedule: the number of folds, less where new ads or a change set it back. `kept` is
    the share of older displays that the last fold kept, `changed` the arms that began anew in it, as
    they have changed, and `changes` the number of changes of all arms noticed lately.
    `ties` is, per step, the share of the sessions with exactly the score of the threshold that explore; empty: all.
    `standardisation` is known from the first fold on. Until then `pending` has the sessions that wait for it.
    `former` are the features before the last change, and `former_until` is the time up to which the watermark must have
    come before all sessions under them are over.
    `kernels` is the fingerprint of the process that made the version (`worker.kernels`): with another one, its numbers
    come out again up to rounding, not to the bit.
    `started_from` is the history behind version 0, which all later versions name, too. A version that learned from the
    sessions of another system is `imported`.
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
    accounts: Accounts = field(default=NOTHING, repr=False)
    lift: Lift | None = field(default=None, repr=False)
    guarded: bool = False
    popular: tuple[int, ...] = ()
    calibration: Calibration = field(default_factory=Calibration, repr=False)
    misfit: Misfit | None = field(default=None, repr=False)
    frozen: bool = False
    folds: int = 0
    clock: float = 0.0
    kept: float = 1.0
    changed: tuple[str, ...] = ()
    changes: float = AT_FIRST
    observations: int = 0
    expected_sessions: int = 0
    explore_budget: int = 0
    thresholds: tuple[float, ...] = ()
    ties: tuple[float, ...] = ()
    answers: AnswerCounts | None = field(default=None, repr=False)
    standardisation: Standardisation | None = field(default=None, repr=False)
    pending: ObservedSessions | None = field(default=None, repr=False)
    former: FormerFeatures | None = field(default=None, repr=False)
    former_until: int = 0
    started_from: StartRecord | None = None
    imported: bool = False
    kernels: str = field(default="", compare=False)
    known_sha256: str = field(default="", init=False, repr=False, compare=False)  # once it is computed

    def __post_init__(self) -> None:
        if self.model.name != self.settings.model:
            raise ParametersError(f"the model is {self.model.name}, the settings say {self.settings.model}")
        if self.model.dim != self.settings.model_dim:
            says = "dim and crosses say" if self.settings.model_dim > self.settings.dim else "dim says"
            raise ParametersError(f"the model has {self.model.dim} context features, {says} {self.settings.model_dim}")
        check_tagged(self.settings)
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
        if not all(map(is_number, (*self.thresholds, *self.ties))):
            raise ParametersError("a threshold is not finite")
        if max(self.popular, default=-1) >= len(self.arms):
            raise ParametersError("an arm of the order by popularity is not in the catalogue")
        if self.answers is not None:
            shape = (self.settings.horizon, len(self.arms))
            if self.answers.displayed.shape != shape:
                raise ParametersError(f"answers have the shape {self.answers.displayed.shape}, not {shape}")
        rows = 0 if self.misfit is None else len(self.misfit.scores)
        if max(rows, self.calibration.ads.shape[1]) > len(self.arms):
            raise ParametersError("calibration or misfit has more arms than the catalogue")
        object.__setattr__(self, "thresholds", tuple(map(float, self.thresholds)))
        object.__setattr__(self, "ties", tuple(map(float, self.ties)))
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
        check_order(settings.order, arms)
        features = with_ads(settings.features, arms)
        if features is not settings.features:
            settings = replace(settings, features=features)
        return cls(
            version=0,
            settings=settings,
            arms=arms,
            model=first_model(settings, arms),
            thresholds=(0.0,) * settings.horizon,
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
    def indices(self) -> dict[str, int]:
        """The index of each arm by its id."""
        return {arm.arm: index for index, arm in enumerate(self.arms)}

    @property
    def is_warming_up(self) -> bool:
        """Whether slates are drawn at random until enough is learned; a fixed order does not wait for that."""
        return self.folds < self.settings.warmup and POLICIES[self.settings.policy] is not Fixed

    @property
    def random_share(self) -> float:
        """The share of the sessions that are drawn at random; none under the guardrail."""
        return 0.0 if self.guarded else self.settings.random_share

    @property
    def awaits_standardisation(self) -> bool:
        """Whether the next fold has to estimate centre and scale of contexts first."""
        return self.settings.standardise and self.standardisation is None and self.folds == 0

    def prepared(self, contexts: Floats) -> Floats:
        """Return contexts (n, d) as the model takes them: standardised, a missing number as the mean, then crossed."""
        known, features = self.standardisation, self.settings.features
        standardised = without_gaps(contexts) if known is None else known.apply(contexts)
        return features.crossing.apply(standardised) if features is not None and features.crosses else standardised

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
            arm_keys=stable_keys(arm.arm for arm in self.arms),
            dtype=dtype,
        )

    def policy(self) -> Policy:
        """Return the policy of this version."""
        settings, index = self.settings, self.indices if self.settings.order else {}
        return POLICIES[settings.policy].under(
            beta=settings.beta,
            bonus=BONUSES[settings.bonus],
            spread=settings.spread,
            epsilon=settings.epsilon,
            thresholds=self.thresholds or (0.0,) * settings.horizon,
            ties=self.ties or None,
            order=tuple(index[arm] for arm in settings.order if arm in index),
        )

    @property
    def sha256(self) -> str:
        """The hash over the model: every field but itself, made_at, effective_at, window_end, offsets and progress."""
        if not self.known_sha256:
            object.__setattr__(self, "known_sha256", digest_of(document_of(self)))
        return self.known_sha256


def ad_columns(settings: LearningSettings, arms: Sequence[Arm]) -> Floats:
    """Return the features of arms as the model takes them, (K, columns); (K, 0) if none are declared."""
    return np.zeros((len(arms), 0)) if settings.features is None else settings.features.ad_columns(arms)


def first_model(settings: LearningSettings, arms: Sequence[Arm], contexts: Floats | None = None) -> ClickModel:
    """Return the belief about these arms before any data.

    With contexts as the model takes them, (n, columns), the priors of features follow their size in these sessions.
    """
    features = settings.features
    groups = ad_groups = None
    if features is not None and features.context:
        widths = features.widths
        groups = Groups.alike(widths) if contexts is None else Groups.measured(widths, contexts)
    if features is not None and features.ads:
        ad_groups = Groups.alike([feature.width for feature in features.ads])
    return MODELS[settings.model].prior(
        dim=settings.model_dim,
        arms=len(arms),
        ridge=settings.ridge,
        features=ad_columns(settings, arms),
        intercept=settings.intercept,
        horizon=settings.horizon,
        groups=groups,
        ad_groups=ad_groups,
    )


def counts_for(settings: LearningSettings, arms: int) -> AnswerCounts | None:
    """Return empty counts of answers if they are learned; where passes are not reported, they cannot be."""
    if settings.answers == "all" or settings.unanswered == "passed":
        return None
    return AnswerCounts.none(arms=arms, horizon=settings.horizon)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_parameters(value: bytes, *, complete: bool = True) -> Parameters:
    """Decode a version and check its hash.

    With `complete` false (a file written by hand for `explain`), fields not needed for planning may be missing and
    arrays may be nested lists; a hash is then checked only if there is one.
    """
    try:
        document = orjson.loads(value)
    except ValueError as error:  # JSONDecodeError is one
        raise ParametersError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ParametersError("not a JSON object")
    return parameters_of(document, complete=complete)


def parameters_of(document: Mapping[str, Any], *, complete: bool = True) -> Parameters:
    """Return the version in a document and check its hash; `complete` as for `decode_parameters`."""
    given = document.get("sha256")
    if complete and not isinstance(given, str):
        raise ParametersError("there is no sha256")
    try:
        if given is not None and digest_of(document) != given:
            raise ParametersError("its sha256 does not fit its content: it was changed or damaged")
        if complete and "clock" not in document:
            raise OldVersionError(
                "the field clock is missing: it was made by release 0.2 or an older one, whose model is another; give "
                "this release topics (--prefix) or a state folder of its own"
            )
        if complete:
            return _parameters(msgspec.convert(document, VersionRecord), document)
        whole = _completed(document)
        arrays = {**document, "precision": whole["precision"]} if "precision" in document else document
        return _parameters(msgspec.convert(whole, VersionRecord), arrays)
    except ParametersError:
        raise
    except InputError as error:
        raise ParametersError(str(error)) from None
    except KeyError as error:
        raise ParametersError(f"the field {error.args[0]} is missing") from None
    # Of a document in an order: nested too deeply, or an integer of more than 64 bits.
    except (msgspec.ValidationError, orjson.JSONEncodeError, ValueError, TypeError, RecursionError) as error:
        raise ParametersError(str(error)) from None


def _completed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hand-written file with the fields that it may leave out: a file that names no model is the simplest."""
    arms, precision = document.get("arms"), document.get("precision")
    if isinstance(precision, dict) and isinstance(context := precision.get("context"), list):
        precision = {"prior": [1.0] * len(context), **precision}
    return {
        **{field.name: field.default for field in fields(LearningSettings) if field.name in SETTINGS},
        **{field.name: field.default for field in fields(Parameters) if field.name in PLAIN},
        "version": 0,
        "progress": {},
        "warmup": 0,
        "model": "additive",
        "intercept": False,
        "answers": "all",
        "standardise": False,
        "spread": 0.0,
        "dim": 1,
        "sha256": "",
        **document,
        "arms": [{"active": True, **arm} for arm in arms] if isinstance(arms, list) else arms,
        **({} if precision is None else {"precision": precision}),
    }


def _parameters(record: VersionRecord, document: Mapping[str, Any]) -> Parameters:
    arrays = ArraysOf(document)
    if record.model not in MODELS:
        raise ParametersError(f"unknown model {record.model!r}; one of {', '.join(MODELS)}")
    model = MODELS[record.model].unpack(arrays, intercept=record.intercept)
    chosen = {name: getattr(record, name) for name in SETTINGS}
    settings = LearningSettings(**{**chosen, "dim": document.get("dim", _dim(record, model))})
    counts = standardisation = pending = misfit = None
    calibration = Calibration()
    if record.answer_counts is not UNSET:
        counts = AnswerCounts(**{name: arrays[f"answer_counts.{name}"] for name in COUNTS})
    if record.standardisation is not UNSET:
        given = [name for name in (*SCALES, WAITING) if name in document["standardisation"]]
        standardisation = Standardisation(**{name: arrays[f"standardisation.{name}"] for name in given})
    if record.pending is not UNSET:
        sessions = {name: arrays[f"pending.{name}"] for name in ARRAYS}
        pending = ObservedSessions.unpack(sessions, dim=settings.dim, arms=len(record.arms))
    if record.calibration is not UNSET:
        calibration = Calibration(ads=arrays["calibration"])
    if record.misfit is not UNSET:
        misfit = Misfit(**{name: arrays[f"misfit.{name}"] for name in SCORES})
    return Parameters(
        settings=settings,
        arms=tuple([_arm(arm) for arm in record.arms]),
        model=model,
        progress={int(partition): time for partition, time in record.progress.items()},
        answers=counts,
        standardisation=standardisation,
        pending=pending,
        accounts=NOTHING if record.accounts is UNSET else Accounts.read(record.accounts, len(record.arms)),
        lift=None if record.lift is UNSET else Lift.read(record.lift),
        calibration=calibration,
        misfit=misfit,
        former=None if record.former_features is UNSET else record.former_features,
        former_until=record.former_until,
        **{name: getattr(record, name) for name in (*PLAIN, *IF_SET)},
    )


def _dim(record: VersionRecord, model: ClickModel) -> int:
    """Return the length of a context where a record does not say it."""
    return record.features.dim if record.features is not None and record.features.context else model.dim


def _arm(record: ArmRecord) -> Arm:
    features = {} if record.features is UNSET else record.features
    return Arm(arm=record.arm, reward=record.reward, active=record.active, features=tuple(features.items()))
