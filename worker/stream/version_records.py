"""The JSON record of a version: its types and its hash.

Rules that hold in this file:

- The same version gives the same bytes. The hash covers everything but the time and position at which it was made.
- A field that is absent has its usual value, which the types say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import numpy as np
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, to_builtins

from worker.bandit import MODELS
from worker.bandit.arrays import Floats
from worker.bandit.bonuses import BONUSES
from worker.bandit.estimators import ESTIMATORS
from worker.bandit.policies import POLICIES
from worker.errors import ParametersError
from worker.stream.accounts import NOTHING, AccountsRecord
from worker.stream.contexts import SCALES, WAITING
from worker.stream.events import (
    MOST,
    Active,
    Amount,
    Count,
    FeatureValues,
    Identifier,
    Number,
    Probability,
    Rate,
    Reward,
    described,
)
from worker.stream.features import Features, FormerFeatures
from worker.stream.lift import LiftRecord
from worker.stream.packing import PackedArray, packed, unpacked
from worker.stream.settings import ANSWERS, CONTROL_PATTERN, CONTROLS, SETTINGS, UNANSWERED, Arm
from worker.stream.tagged import TaggedVersion

if TYPE_CHECKING:  # a version's hash is that of its record: the value imports this file
    from worker.stream.parameters import Parameters

# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_WHOLE: Final[dict[str, Any]] = {"minimum": 0, "maximum": MOST}


Array: TypeAlias = PackedArray | tuple[Number | tuple[Number, ...], ...]


class ArmRecord(Struct, frozen=True, kw_only=True):
    """An arm of a version."""

    arm: Identifier
    reward: Reward
    active: Active
    features: Annotated[
        FeatureValues | UnsetType, described("Features of the ad: numbers and texts by name; missing if it has none.")
    ] = UNSET


class ScaleRecord(Struct, frozen=True, kw_only=True):
    """Scale of the contexts: the model works on clip((y − centre) / scale, ±8), y being the number transformed."""

    centre: Annotated[Array, described("Shape (d).")]
    scale: Annotated[Array, described("Shape (d), above zero.")]
    exponent: Annotated[
        Array | UnsetType,
        described("λ of the Yeo–Johnson transformation of each number, shape (d); 1 or missing: none."),
    ] = UNSET
    unit: Annotated[
        Array | UnsetType, described("Unit that a number is divided by if its exponent is not 1, shape (d).")
    ] = UNSET
    waiting: Annotated[
        Array | UnsetType,
        described("Numbers of sessions so far in the u columns whose scale is infinite: not known yet. Shape (n, u)."),
    ] = UNSET


class PendingRecord(Struct, frozen=True, kw_only=True):
    """Sessions that wait for the first fold, at most 99, and their displays that count."""

    contexts: Annotated[Array, described("Contexts as they came, shape (n, d); NaN is a number that is missing.")]
    rows: Annotated[Array, described("Session of each display.")]
    arms: Annotated[Array, described("Index of the arm of each display.")]
    positions: Annotated[Array, described("Position of each display.")]
    clicked: Annotated[Array, described("1 if the display was clicked, else 0.")]


class AnswerRecord(Struct, frozen=True, kw_only=True):
    """Displays without a click so far, and after how many of them the user went on."""

    displayed: Annotated[Array, described("Displays without a click, shape (H, K).")]
    answered: Annotated[Array, described("Displays that were answered by a pass, shape (H, K).")]


class MisfitRecord(Struct, frozen=True, kw_only=True):
    """Score tests of products of context columns, by ad: sums since the second fold or the last change of features."""

    scores: Annotated[Array, described("Σ q̃(y − p), shape (K, P).")]
    informations: Annotated[Array, described("Σ p(1 − p)q̃², shape (K, P).")]


class PrecisionRecord(Struct, frozen=True, kw_only=True):
    """Parts of the precision matrix A."""

    context: Annotated[
        Array | UnsetType, described("additive: context block, shape (d, d), or with an intercept (d+H, d+H).")
    ] = UNSET
    cross: Annotated[
        Array | UnsetType, described("additive: cross block, shape (K, d) or (K, d+H), one row per arm.")
    ] = UNSET
    prior: Annotated[
        Array | UnsetType, described("Precision of the prior of the intercept and of each context column.")
    ] = UNSET
    arms: Annotated[Array | UnsetType, described("additive: diagonal of the arm block, shape (K).")] = UNSET
    features: Annotated[Array | UnsetType, described("personal: 1 and the features of each ad, shape (K, m).")] = UNSET
    information: Annotated[
        Array | UnsetType, described("personal: upper triangle of G_k, by rows, shape (K, (d+1)(d+2)/2).")
    ] = UNSET
    crossing: Annotated[Array | UnsetType, described("personal: C_k of each arm, by rows, shape (K, (d+1)(H−1)).")] = (
        UNSET
    )
    inherited: Annotated[
        Array | UnsetType,
        described("personal: upper triangle of what arms that were integrated out have said; empty if none were."),
    ] = UNSET


class GroupsRecord(Struct, frozen=True, kw_only=True):
    """Declared features of contexts or of ads, as the model weighs them."""

    widths: Annotated[Array, described("Columns of each feature.")]
    squares: Annotated[Array, described("Mean squared length of each feature.")]
    strengths: Annotated[Array, described("Precision of each feature: the higher, the less it matters.")]


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """History that version 0 started from; later versions name it, too."""

    sha256: Annotated[str, described("SHA-256, in hexadecimal, of its file.", pattern="^[0-9a-f]{64}$")]
    trust: Annotated[Probability, described("Share of its information that counts.")]


class VersionRecord(Struct, frozen=True, kw_only=True):
    """One version of the model, with the settings for serving and learning. Topic: parameters. Key: version mod 8.

    A file for adcascade explain may omit fields that planning does not use. Unknown fields are ignored.
    """

    version: Annotated[int, described("Version number; 0 is the prior.", **_WHOLE)]
    parent_sha256: Annotated[
        str, described("sha256 of the previous version; empty for version 0.", pattern="^([0-9a-f]{64})?$")
    ]
    sha256: Annotated[
        str,
        described(
            "SHA-256, in hexadecimal, of all fields except itself, made_at, effective_at, window_end, the offsets, "
            "progress, accounts, lift and kernels.",
            pattern="^[0-9a-f]{64}$",
        ),
    ]
    effective_at: Annotated[int, described("Event time from which this version serves arrivals.", **_WHOLE)]
    made_at: Annotated[int, described("Highest progress of any partition when the version was made.", **_WHOLE)]
    window_end: Annotated[int | None, described("End of the last closed window; null before the first.", minimum=0)]
    journal_offset: Annotated[
        int, described("Offset of the journal record that caused this version; −1 for the prior.", minimum=-1)
    ]
    resume_offset: Annotated[int, described("Offset of the oldest journal record that an open window needs.", **_WHOLE)]
    progress: Annotated[
        dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]*)$")], Annotated[int, described("Its time.", **_WHOLE)]],
        described("Highest progress of each partition."),
    ]
    accounts: AccountsRecord | UnsetType = UNSET
    lift: LiftRecord | UnsetType = UNSET
    frozen: Annotated[bool, described("Whether learning is frozen.")]
    folds: Annotated[int, described("t: number of versions that folded sessions.", **_WHOLE)]
    clock: Annotated[Amount, described("t of M_t: folds, less where new ads or a change set the clock back.")]
    kept: Annotated[Probability, described("Share of older displays that the last fold kept.")]
    changes: Annotated[Amount, described("Changes of users or ads that were noticed lately; older ones count less.")]
    observations: Annotated[int, described("Number of displays observed so far.", **_WHOLE)]
    expected_sessions: Annotated[int, described("N: number of sessions in the last folded window.", **_WHOLE)]
    explore_budget: Annotated[int, described("M_t: number of sessions that may explore.", **_WHOLE)]
    thresholds: Annotated[
        tuple[Number, ...],
        described("Score above which a session explores, per position; if empty, all sessions explore."),
    ]
    arms: Annotated[tuple[ArmRecord, ...], described("Arms in the order of first appearance.")]
    dim: Annotated[int, described("d: length of a context.", minimum=1)]
    horizon: Annotated[int, described("H: maximum number of displays per session.", minimum=1)]
    repeats: Annotated[bool, described("Whether an arm may be shown more than once in a session.")]
    policy: Annotated[str, described("Policy of planning.", enum=list(POLICIES))]
    epsilon: Annotated[Rate, described("Share of random choices under epsilon-greedy.")]
    bonus: Annotated[str, described("Bonus of exploration.", enum=list(BONUSES))]
    beta: Annotated[Amount, described("Width of exploration, in standard deviations.")]
    estimator: Annotated[str, described("Estimator of a fold.", enum=list(ESTIMATORS))]
    ridge: Annotated[float, Meta(gt=0, description="λ: precision of the prior.")]
    forgetting: Annotated[
        Probability | Literal["auto"],
        described("Share of older displays that a fold keeps; 1 forgets nothing, auto lets the window decide."),
    ]
    spread: Annotated[Rate, described("How far sessions differ in their optimism.")]
    warmup: Annotated[int, described("Number of folds before the policy starts.", **_WHOLE)]
    horizon_episodes: Annotated[int, described("T: number of windows in the schedule M_t.", minimum=2)]
    random_share: Annotated[Rate, described("Share of sessions with random slates.")]
    salt: Annotated[str, described("Input to the stable hashes that choose at random.")]
    session_timeout: Annotated[
        int, described("Time after the arrival in which feedback counts, in milliseconds.", **_WHOLE)
    ]
    lateness: Annotated[int, described("Time that a record may be late, in milliseconds.", **_WHOLE)]
    window: Annotated[int, described("Length of an episode in milliseconds.", minimum=1)]
    unanswered: Annotated[str, described("Meaning of a displayed position without feedback.", enum=list(UNANSWERED))]
    model: Annotated[str, described("Click model.", enum=list(MODELS))]
    intercept: Annotated[bool, described("Whether the model has a shared intercept.")]
    answers: Annotated[
        str, described("Whether answer rates are learned, or every display counts as answered.", enum=list(ANSWERS))
    ]
    standardise: Annotated[bool, described("Whether the numbers of contexts are standardised by the first sessions.")]
    features: Annotated[
        Features | None, described("Declared features; missing if none are declared. Their columns are in this order.")
    ] = None
    order: Annotated[
        tuple[Identifier, ...], described("Arms that the policy fixed shows first; the others follow in their order.")
    ] = ()
    control_share: Annotated[Rate, described("Share of the sessions in the control group; missing: none.")] = 0.0
    control: Annotated[str, described("What the control group gets.", pattern=CONTROL_PATTERN)] = CONTROLS[0]
    tagged: TaggedVersion | None = None
    max_loss: Annotated[
        Rate, described("Certain loss of revenue, as a share, beyond which exploration stops; missing: it never does.")
    ] = 0.0
    guardrail_sessions: Annotated[
        int, described("Number of compared sessions before which exploration is not stopped.", **_WHOLE)
    ] = 1_000
    guarded: Annotated[bool, described("Whether exploration is stopped, because of a certain loss.")] = False
    popular: Annotated[
        tuple[Count, ...],
        described("Indices of arms by falling revenue per display, if that is what the control group gets."),
    ] = ()
    ties: Annotated[
        tuple[Rate, ...],
        described(
            "Share of the sessions with exactly the score of the threshold that explore, per position; missing: all."
        ),
    ] = ()
    kernels: Annotated[
        str,
        described(
            "Fingerprint of numpy, BLAS, their kernels and threads that made the version: with the same one its "
            "numbers come out again to the bit, with another one up to 1e-9. Absent in a version that nothing was "
            "computed for."
        ),
    ] = ""
    changed: Annotated[
        tuple[Identifier, ...],
        described("Arms that have changed: the last fold forgot what was known of each. Missing: none."),
    ] = ()
    started_from: StartRecord | None = None
    imported: Annotated[bool, described("Whether the sessions were those of another system (adcascade import).")] = (
        False
    )
    answer_counts: AnswerRecord | UnsetType = UNSET
    calibration: Annotated[
        Array | UnsetType,
        described(
            "Fading sums by ad, shape (5, K): displays, predicted clicks Σp, Σp(1 − p), clicks, log loss. Ads that "
            "were added since the last fold may be missing."
        ),
    ] = UNSET
    misfit: MisfitRecord | UnsetType = UNSET
    former_features: FormerFeatures | UnsetType = UNSET
    former_until: Annotated[int, described("Time when all sessions under the former features are over.", **_WHOLE)] = 0
    standardisation: ScaleRecord | UnsetType = UNSET
    pending: PendingRecord | UnsetType = UNSET
    theta_context: Annotated[
        Array | UnsetType,
        described("additive: context coefficients θ_x, shape (d); with an intercept and H−1 positions, (d+H)."),
    ] = UNSET
    theta_arms: Annotated[Array | UnsetType, described("additive: arm coefficients θ_k, shape (K).")] = UNSET
    shared: Annotated[
        Array | UnsetType,
        described("personal: shared part Γ, shape (d+1, m), m = 1 + columns of the features of ads."),
    ] = UNSET
    own: Annotated[Array | UnsetType, described("personal: own part v_k of each arm, shape (K, d+1).")] = UNSET
    doubts: Annotated[
        Array | UnsetType, described("personal: how much speaks for a change of each arm, in nats, shape (K).")
    ] = UNSET
    positions: Annotated[
        Array | UnsetType, described("personal: effect b_h of each position after the first, shape (H−1).")
    ] = UNSET
    context_groups: Annotated[GroupsRecord | UnsetType, described("personal: features of contexts.")] = UNSET
    ad_groups: Annotated[GroupsRecord | UnsetType, described("personal: features of ads.")] = UNSET
    precision: PrecisionRecord | UnsetType = UNSET


#: Fields of a version that its record has under the same name.
PLAIN: Final = (
    *("version", "effective_at", "made_at", "journal_offset", "resume_offset", "window_end", "parent_sha256", "frozen"),
    *("folds", "clock", "kept", "changes", "observations", "expected_sessions", "explore_budget"),
    "thresholds",
)
#: Fields of the same name that a record has only if they are set, and such settings.
IF_SET: Final = ("changed", "ties", "kernels", "started_from", "imported", "guarded", "popular")
_CONTROL: Final = ("control_share", "control", "max_loss", "guardrail_sessions")
_OPTIONAL: Final = ("features", "order", "tagged", *_CONTROL)
COUNTS: Final = ("displayed", "answered")
SCORES: Final = ("scores", "informations")
_UNCOVERED: Final = frozenset(
    [
        *("sha256", "made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress"),
        *("accounts", "lift", "kernels", "former_until"),
    ]
)

# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_parameters(parameters: Parameters) -> bytes:
    """Return the record of a version, its hash included; the same version gives the same bytes."""
    document = document_of(parameters)
    document["sha256"] = parameters.known_sha256 or digest_of(document)
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def parameters_document(parameters: Parameters) -> dict[str, Any]:
    """Return the record of a version as a document, as it is read again from another record."""
    document: dict[str, Any] = orjson.loads(encode_parameters(parameters))
    return document


def document_of(parameters: Parameters) -> dict[str, Any]:
    """Return the record of a version as a document, without its hash."""
    settings = parameters.settings
    document: dict[str, Any] = {
        **{name: getattr(parameters, name) for name in PLAIN},
        **{name: getattr(settings, name) for name in SETTINGS if name not in _OPTIONAL},
        "progress": {str(partition): time for partition, time in sorted(parameters.progress.items())},
        "arms": [arm_document(arm) for arm in parameters.arms],
    }
    if settings.order:
        document["order"] = settings.order
    if settings.control_share:
        document |= {name: getattr(settings, name) for name in _CONTROL}
    if settings.tagged is not None:
        document["tagged"] = to_builtins(settings.tagged)
    if settings.features is not None:
        document["features"] = settings.features.document()
    document |= {name: value for name in IF_SET if (value := getattr(parameters, name))}
    if parameters.former is not None:
        document |= {"former_features": to_builtins(parameters.former), "former_until": parameters.former_until}
    if parameters.accounts != NOTHING:
        document["accounts"] = parameters.accounts.document()
    if parameters.lift is not None:
        document["lift"] = parameters.lift.document()
    for name, array in arrays_of(parameters).items():
        *outer, last = name.split(".")
        target = document
        for part in outer:
            target = target.setdefault(part, {})
        target[last] = packed(name, array)
    return document


def arm_document(arm: Arm) -> dict[str, Any]:
    """Return the fields of an `ArmRecord`."""
    features = {"features": dict(arm.features)} if arm.features else {}
    return {"arm": arm.arm, "reward": arm.reward, "active": arm.active, **features}


def arrays_of(parameters: Parameters) -> dict[str, Floats]:
    """Return all arrays of a version; a dot nests them in the record."""
    arrays = dict(parameters.model.pack())
    if (counts := parameters.answers) is not None:
        arrays |= {f"answer_counts.{name}": getattr(counts, name) for name in COUNTS}
    if parameters.calibration.ads.size:
        arrays["calibration"] = parameters.calibration.ads
    if (misfit := parameters.misfit) is not None:
        arrays |= {f"misfit.{name}": getattr(misfit, name) for name in SCORES}
    if (known := parameters.standardisation) is not None:
        arrays |= {f"standardisation.{name}": getattr(known, name) for name in SCALES}
        arrays |= {f"standardisation.{WAITING}": known.waiting} if len(known.waiting) else {}
    if parameters.pending is not None:
        arrays |= {f"pending.{name}": array for name, array in parameters.pending.pack().items()}
    return arrays


class ArraysOf(dict[str, Floats]):
    """The arrays of a document, packed or as nested lists, each read when it is needed.

    Raise `ParametersError` if it is no array.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__()
        self._document = document

    def __missing__(self, name: str) -> Floats:
        value: Any = self._document
        for part in name.split("."):
            value = value[part]
        try:
            array = unpacked(value) if isinstance(value, Mapping) else np.array(value, dtype=np.float64)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ParametersError(f"{name} is not an array of numbers: {error}") from None
        return self.setdefault(name, array)


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the hash of a record over all that it covers."""
    covered = {name: value for name, value in document.items() if name not in _UNCOVERED}
    return hashlib.sha256(orjson.dumps(covered, option=orjson.OPT_SORT_KEYS)).hexdigest()
