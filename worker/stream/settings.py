"""The arms, and the settings of serving and learning that every version carries."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Final

from worker.bandit import MODELS
from worker.bandit.bonuses import BONUSES
from worker.bandit.estimators import ESTIMATORS
from worker.bandit.learning import AUTO
from worker.bandit.policies import POLICIES, check_combination
from worker.errors import InputError
from worker.stream.events import TAG_PATTERN
from worker.stream.features import LONGEST_NAME, TAKEN, Features, listed, widest

if TYPE_CHECKING:  # it is made of a version, which has settings
    from worker.stream.tagged import TaggedVersion

#: What a display without feedback means: the user left without a click, or saw it and passed.
UNANSWERED = ("left", "passed")
ANSWERS = ("learned", "all")
#: What sessions of the control group get, or the version with a tag (tag:NAME); see `slates.py`.
CONTROLS = ("fixed", "popular", "random", "greedy")
TAG = "tag:"
CONTROL_PATTERN = f"^({'|'.join(CONTROLS)}|{TAG}{TAG_PATTERN[1:-1]})$"
_NUMBERS = (int, float)
#: What to do where nothing says what a context is.
NO_CONTEXT = (
    "no features are declared: add [features.context] to the --config file, or give --dim N, for lists of numbers"
)


#: Bounds on the revenue of a click. Slates are planned in single precision, where sums of larger ones overflow.
LEAST_REWARD: Final = 1e-12
MOST_REWARD: Final = 1e12


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An ad that can be shown: its id, the revenue of a click, whether it is shown at present, and its features.

    `features` are pairs of a name and a number or text, sorted by name; a mapping may be given.

    >>> Arm(arm="a", reward=1.0, features={"price": 3, "brand": "x"}).features
    (('brand', 'x'), ('price', 3.0))
    """

    arm: str
    reward: float
    active: bool = True
    features: tuple[tuple[str, float | str], ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.arm, str) and self.arm):
            raise InputError(f"an arm's id must be a text that is not empty, not {self.arm!r}")
        if not (is_number(self.reward) and LEAST_REWARD <= self.reward <= MOST_REWARD):
            bounds = f"from {LEAST_REWARD:g} to {MOST_REWARD:g}"
            raise InputError(f"arm {self.arm!r}: the reward must be a number above zero, {bounds}, not {self.reward}")
        if not isinstance(self.active, bool):
            raise InputError(f"arm {self.arm!r}: active must be true or false, not {self.active!r}")
        object.__setattr__(self, "reward", float(self.reward))
        if self.features:
            object.__setattr__(self, "features", tuple(sorted(self._checked_features())))

    def _checked_features(self) -> list[tuple[str, float | str]]:
        pairs = []
        for name, value in dict(self.features).items():
            if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()):
                raise InputError(
                    f"arm {self.arm!r}: a feature's name has 1 to {LONGEST_NAME} printable characters, not {name!r}"
                )
            if name in TAKEN:
                raise InputError(
                    f"arm {self.arm!r}: a feature cannot have the name {name!r}, which has another meaning"
                )
            if not isinstance(value, str) and not is_number(value):
                raise InputError(f"arm {self.arm!r}, {name}: must be a finite number or a text, not {value!r}")
            pairs.append((name, value if isinstance(value, str) else float(value)))
        return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """Settings of serving and learning: chosen by the learner's configuration, carried by every version.

    Times are in milliseconds. `beta` is a number of standard deviations; `warmup` counts folds. `spread`:
    how far sessions differ in their optimism, 0 to 1. `forgetting`: the share of older displays that a fold keeps, or
    "auto". `answers`: whether the rates at which users go on are learned, or all go on. `order`: ids of the arms that
    the policy fixed shows first.
    `control_share` is that of the control group, and `control` what it gets (`slates.py`); `tagged` is the version that
    tag:NAME was when it was looked up. `max_loss` is the loss of revenue, as a share, beyond which exploration stops,
    0: none; not before `guardrail_sessions` are compared.
    An `int` given for a `float` is turned into one, so that equal settings have equal hashes.
    """

    dim: int
    horizon: int = 5
    repeats: bool = False
    policy: str = "aucbbp"
    epsilon: float = 0.1
    bonus: str = "curve"
    beta: float = 1.5
    spread: float = 1.0
    estimator: str = "laplace"
    ridge: float = 1.0
    forgetting: float | str = AUTO
    warmup: int = 1
    horizon_episodes: int = 1000
    random_share: float = 0.0
    salt: str = "adcascade"
    session_timeout: int = 60_000
    lateness: int = 5_000
    window: int = 60_000
    unanswered: str = "left"
    model: str = "personal"
    intercept: bool = True
    answers: str = "learned"
    standardise: bool = True
    features: Features | None = None
    order: tuple[str, ...] = ()
    control_share: float = 0.0
    control: str = CONTROLS[0]
    tagged: TaggedVersion | None = None
    max_loss: float = 0.0
    guardrail_sessions: int = 1_000

    @property
    def tag(self) -> str:
        """The tag of the version that the control group gets; empty if it gets something else, or nothing."""
        return self.control.removeprefix(TAG) if self.control_share and self.control.startswith(TAG) else ""

    @property
    def control_identity(self) -> str:
        """What the control group gets, as text that is equal for equal controls; empty without a control group.

        >>> LearningSettings(dim=1, control_share=0.1, order=("b", "a")).control_identity
        'fixed:b,a'
        """
        if not self.control_share:
            return ""
        if self.tagged is not None:
            return f"{self.control}:{self.tagged.sha256}"
        order = self.order if self.control == "fixed" else ()
        return f"{self.control}:{','.join(order)}" if order else self.control

    @property
    def model_dim(self) -> int:
        """The number of columns of a context in the model: `dim`, and those of crosses."""
        return self.features.model_dim if self.features is not None and self.features.context else self.dim

    @property
    def grace(self) -> int:
        """How long after its arrival a session is needed: no record of it counts later."""
        return self.session_timeout + self.lateness

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in tuple(known):
                raise InputError(f"unknown {name} {getattr(self, name)!r}; one of {', '.join(known)}")
        if not self.intercept and self.model != "additive":
            raise InputError(f"the model {self.model} has an intercept; only additive runs without")
        if self.features is not None and self.features.context and self.features.dim != self.dim:
            raise InputError(
                f"dim is {self.dim}, but the declared features of contexts have {self.features.dim} columns: "
                "leave dim out, it follows from them"
            )
        self._check_numbers()
        check_combination(policy=self.policy, bonus=self.bonus, repeats=self.repeats)

    def _check_numbers(self) -> None:
        for name in ("epsilon", "random_share", "control_share", "max_loss", "spread", "forgetting", "ridge", "beta"):
            value = getattr(self, name)
            if name == "forgetting" and isinstance(value, str):
                if value != AUTO:
                    raise InputError(f'forgetting must be a number or "{AUTO}", not {value!r}')
                continue
            if not is_number(value):
                raise InputError(f"{name} must be a finite number, not {value!r}")
            object.__setattr__(self, name, float(value))
        for name in ("epsilon", "random_share", "control_share", "max_loss", "spread"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        self._check_control()
        if not isinstance(self.forgetting, str) and not 0 < self.forgetting <= 1:
            raise InputError(f"forgetting must be auto, or above 0 and at most 1 (1: off), not {self.forgetting}")
        if self.ridge <= 0:
            raise InputError(f"ridge must be a finite number above zero, not {self.ridge}")
        if self.beta < 0:
            raise InputError(f"beta must be a finite number of at least 0, not {self.beta}")

    def _check_control(self) -> None:
        if not re.fullmatch(CONTROL_PATTERN, self.control):
            raise InputError(f"unknown control {self.control!r}; one of {', '.join(CONTROLS)} or {TAG}NAME")
        if self.tagged is not None and self.tagged.name != self.tag:
            object.__setattr__(self, "tagged", None)
        if self.control_share == 1:
            raise InputError("control_share must be below 1: somebody has to see what adcascade chooses")
        if self.control_share + self.random_share > 1:
            shares = f"control_share {self.control_share} and random_share {self.random_share}"
            raise InputError(f"{shares} add up to more than 1: lower one of them")
        if self.max_loss and not self.control_share:
            raise InputError("max_loss is measured by a control group: give control_share, 0.05 for instance")


_LEAST = {
    "dim": 1,
    "horizon": 1,
    "warmup": 0,
    "horizon_episodes": 2,
    "window": 1,
    "session_timeout": 0,
    "lateness": 0,
    "guardrail_sessions": 0,
}
_CHOICES: Mapping[str, Collection[str]] = {
    "policy": POLICIES,
    "bonus": BONUSES,
    "estimator": ESTIMATORS,
    "unanswered": UNANSWERED,
    "model": MODELS,
    "answers": ANSWERS,
}

#: Names of the settings.
SETTINGS: Final = tuple(f.name for f in fields(LearningSettings))

#: Share of the window that a fold may take, and seconds that it may take in any case.
FOLD_SHARE: Final = 0.1
LEAST_SECONDS: Final = 0.1

#: Settings that go with the model (see `continued`). The first catalogue may complete the features, orders change them.
KEPT_BY_MODEL: Final = ("standardise", "features", "dim")


def check_order(order: Sequence[str], arms: Iterable[Arm]) -> None:
    """Raise `InputError` if an order names an arm twice, or one that a catalogue, if there is one, does not have."""
    known = [arm.arm for arm in arms]
    for place, arm in enumerate(order):
        if arm in order[:place]:
            raise InputError(f"--order: the ad {arm!r} is named twice")
        if known and arm not in known:
            near = get_close_matches(arm, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the catalogue has {listed(known, 5)}"
            raise InputError(f"--order: there is no ad {arm!r}; {hint}")


def other_kind(one: LearningSettings, other: LearningSettings) -> str:
    """Return the name of a setting by which two models are of different kinds, which is for life; empty if none is."""
    named = all(settings.features is not None and settings.features.context for settings in (one, other))
    names = (*(() if named else ("dim",)), "model", "intercept", "standardise")
    return next((name for name in names if getattr(one, name) != getattr(other, name)), "")


def check_tagged(settings: LearningSettings) -> None:
    """Raise `InputError` if the control group gets a version with a tag which nobody has looked up."""
    if settings.tag and settings.tagged is None:
        raise InputError(
            f"--control {settings.control}: only `adcascade worker` and `serve` have tags; here it can be "
            f"{', '.join(CONTROLS)}"
        )


def check_same_model(settings: LearningSettings, published: LearningSettings) -> None:
    """Raise `InputError` if these settings are for another model than the published parameters are of.

    Declared features may differ: the published ones hold.
    """
    named, theirs_named = (one.features is not None and bool(one.features.context) for one in (settings, published))
    if named and not theirs_named:
        raise InputError(
            f"features of contexts are declared, but contexts of the published parameters are lists of {published.dim} "
            "numbers: leave [features.context] out, or give another model topics (--prefix) or a state folder"
        )
    for name, option in (("dim", "--dim"), ("model", "--model"), ("intercept", "--intercept")):
        mine, theirs = getattr(settings, name), getattr(published, name)
        if mine == theirs or (name == "dim" and named):
            continue
        if name == "intercept":
            option, mine, theirs = "the intercept", *("on" if one else "off" for one in (mine, theirs))
        size, keep = "" if named else f"--dim {published.dim} ", "" if published.intercept else " --no-intercept"
        raise InputError(
            f"{option} is {mine}, but the published parameters have {theirs}: go on with theirs ({size}--model "
            f"{published.model}{keep}), or give another model topics (--prefix) or a state folder of its own"
        )


def fold_seconds(settings: LearningSettings, arms: int, columns: int) -> float:
    """Return about how long a fold computes for a model with these columns of contexts, without its sessions.

    Fitted to folds of 32 to 1,000 columns, 3 to 1,000 ads and up to 100 columns of ads, in seconds of one core. The
    last part is that of the coefficients which all ads share: one per column of contexts and column of ads.
    """
    ads = 0 if settings.features is None else settings.features.ad_dim
    if settings.model == "additive":
        return 1.5e-9 * (columns + ads) ** 3
    return arms * columns**2 * (3e-7 + 1e-9 * columns) + 1e-9 * ((columns + 1) * (ads + 1)) ** 3


def check_columns(settings: LearningSettings, arms: int) -> None:
    """Raise `InputError` if folds of the declared features would take more than a tenth of the window."""
    features = settings.features
    if features is None or not features.context:
        return
    arms, seconds = max(1, arms), max(LEAST_SECONDS, settings.window / 1000 * FOLD_SHARE)
    if (needed := fold_seconds(settings, arms, features.model_dim)) > seconds:
        fits = bisect_right(range(features.model_dim), seconds, key=partial(fold_seconds, settings, arms)) - 1
        raise InputError(
            f"{features.model_dim:,} columns of contexts and {arms:,} {'ad' if arms == 1 else 'ads'} take about "
            f"{needed:.3g} s per fold, more than a tenth of the window; {fits:,} columns fit, and "
            f"{widest(features.named_widths)}"
        )


def continued(settings: LearningSettings, published: LearningSettings) -> LearningSettings:
    """Return settings for a model that exists: what its contexts and ads mean, and their scale, stay as they are.

    Raise `InputError` if they are for another model. Other declared features wait for an order (`FeaturesChange`).
    """
    check_same_model(settings, published)
    tagged = published.tagged if settings.tag == published.tag else settings.tagged
    settings = replace(settings, **{name: getattr(published, name) for name in KEPT_BY_MODEL}, tagged=tagged)
    check_tagged(settings)
    return settings


def ignored_scale(settings: LearningSettings, published: LearningSettings) -> str | None:
    """Return a line for people if --standardise is given otherwise than a model that exists has it; else None.

    >>> ignored_scale(LearningSettings(dim=1), LearningSettings(dim=1)) is None
    True
    """
    if settings.standardise == published.standardise:
        return None
    mine, theirs = ("on" if one.standardise else "off" for one in (settings, published))
    return (
        f"standardise is {mine} here and {theirs} in the published parameters, which hold: whether contexts are "
        "standardised is decided by version 0"
    )
