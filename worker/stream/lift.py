"""The lift: what the policy earns more than the control group, valid whenever it is looked at (docs/math.md §14).

Rules that hold in this file:

- Every session gives two scores, ψ₁ of what adcascade earns with such a user, ψ₀ of what the control earns (AIPW,
  `comparison.py`). Their means are the revenue per session of either, without bias whatever the model is.
- Kept is the sum of v vᵀ of v = (1, ψ₁, ψ₀, a − π), for revenue and for clicks. a − π is whether a session is in the
  control group, less the probability of that.
- All figures come from these sums alone. The interval is an asymptotic confidence sequence (Waudby-Smith and others):
  it covers at all looks together with 95 %, so looking at every window, and stopping at any, is allowed.
- The relative lift is the set of r for which 0 is in the interval of ψ₁ − (1 + r) ψ₀ (Fieller 1954).
- Sums belong to the position of a version in the journal, as `accounts.py`: the hash does not cover them. They count
  every closed window, frozen and rejected ones included. With another control they begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta, Struct

from worker.bandit.arrays import ArrayValue, Floats, frozen_array
from worker.errors import InputError
from worker.stream.events import MOST, ComparedOutcome, Interval, LiftFigures, Number, described

#: What is compared, and the two groups. Rows of the sums are in this order.
OUTCOMES: Final = ("revenue", "clicks")
GROUPS: Final = ("policy", "control")
#: The share of the runs in which an interval may miss the truth at any look.
ALPHA: Final = 0.05
#: The same for the check that the groups have the right sizes.
MISMATCH_ALPHA: Final = 0.001
#: Deviation of the control group from its size that matters.
MISMATCH: Final = 0.1
#: Sessions at which the interval is narrowest, compared with one that were valid then only.
TUNED: Final = 10_000
#: Least sessions of each group, and least clicks of each, from which an interval is shown: it is asymptotic.
LEAST_SESSIONS: Final = 200
LEAST_CLICKS: Final = 50
#: Shapes of the sums.
_GROUPS: Final = (len(GROUPS), 3)
_SUMS: Final = (len(OUTCOMES), 4, 4)


class LiftRecord(Struct, frozen=True, kw_only=True):
    """Comparison with the control group, over the windows that are closed."""

    control: Annotated[str, Meta(description="What the control group gets.")]
    since: Annotated[int, described("Start of the first window.", minimum=0, maximum=MOST)]
    groups: Annotated[
        tuple[tuple[Number, Number, Number], ...],
        described("Policy and control group: sessions compared, their revenue and clicks."),
    ]
    sums: Annotated[
        tuple[tuple[tuple[Number, Number, Number, Number], ...], ...],
        described("For revenue and for clicks: the rows of Σ v vᵀ, of v = (1, ψ₁, ψ₀, a − π)."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lift(ArrayValue):
    """Sums of the sessions since `since` that were compared with `control`.

    groups : (2, 3), policy and control group: sessions, revenue, clicks
    sums : (2, 4, 4), for revenue and for clicks: Σ v vᵀ
    """

    control: str
    since: int = 0
    groups: Floats = field(default_factory=lambda: np.zeros(_GROUPS))
    sums: Floats = field(default_factory=lambda: np.zeros(_SUMS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", frozen_array(self.groups, _GROUPS))
        object.__setattr__(self, "sums", frozen_array(self.sums, _SUMS))

    def plus(self, scores: Scores, start: int) -> Lift:
        """Return the sums with those of a window that began at `start`."""
        a, share, ones, sums = scores.control, scores.share, np.ones_like(scores.control), self.sums.copy()
        if not len(a):
            return self
        for row, (earned, (first, second)) in enumerate(zip(scores.earned, scores.expected, strict=True)):
            policy = first + (1 - a) / (1 - share) * (earned - first)
            control = second + a / share * (earned - second)
            v = np.stack([ones, policy, control, a - share])
            sums[row] += v @ v.T
        return Lift(
            control=self.control,
            since=self.since if self.sessions else start,
            groups=self.groups + np.stack([1 - a, a]) @ np.stack([ones, *scores.earned], axis=1),
            sums=sums,
        )

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def sessions(self) -> int:
        """The number of sessions that were compared."""
        return int(self.groups[:, 0].sum())

    @property
    def is_known(self) -> bool:
        """Whether there are enough sessions and clicks for intervals."""
        return bool((self.groups[:, 0] >= LEAST_SESSIONS).all() and (self.groups[:, 2] >= LEAST_CLICKS).all())

    def compare(self, outcome: str) -> ComparedOutcome | None:
        """Return the comparison of an outcome; None as long as too little is known.

        It is relative to the control unless that may as well be 0: then nothing is known of the ratio.
        """
        if not self.is_known:
            return None
        sums = self.sums[OUTCOMES.index(outcome)]
        sessions = sums[0, 0]
        policy, control = (sums[0, 1:3] / sessions).tolist()
        # Covariance of the two means.
        centred = np.array([[-policy, 1.0, 0.0, 0.0], [-control, 0.0, 1.0, 0.0]])
        covariance = centred @ sums @ centred.T / sessions**2
        width = multiplier(sessions)
        (s11, s10), (_, s00) = (width**2 * covariance).tolist()
        half = math.sqrt(max(0.0, s11 - 2 * s10 + s00))
        gained = policy - control
        return ComparedOutcome(
            policy=policy,
            control=control,
            difference=Interval(gained, gained - half, gained + half),
            relative=_ratio(policy, control, s11, s10, s00),
        )

    @property
    def mismatch(self) -> float | None:
        """The size of the control group relative to what it should be, if it is wrong; else None."""
        sums = self.sums[0]
        excess = sums[0, 3]
        expected = self.groups[1, 0] - excess
        if not self.is_known and not expected >= LEAST_SESSIONS:
            return None
        ratio = float(self.groups[1, 0] / expected)
        off = multiplier(sums[0, 0], MISMATCH_ALPHA) * math.sqrt(sums[3, 3])
        return ratio if abs(ratio - 1) > MISMATCH and abs(excess) > off else None

    @property
    def is_loss(self) -> bool:
        """Whether the policy certainly earns less than the control."""
        found = self.compare("revenue")
        return found is not None and found.difference.high < 0

    def exceeds(self, loss: float, sessions: int) -> bool:
        """Return whether the policy certainly loses more than the share `loss`, once `sessions` are compared."""
        found = self.compare("revenue") if loss and self.sessions >= sessions else None
        return found is not None and found.relative is not None and found.relative.high < -loss

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def sentence(self) -> str:
        """The comparison of the revenue in one line."""
        found = self.compare("revenue")
        if found is None:
            return f"revenue per session against {self.name}: not known yet"
        line = f"revenue per session: {self.name} {found.control:.3g}, adcascade {found.policy:.3g}"
        return f"{line}, {with_interval(found)}"

    @property
    def size(self) -> str:
        """The numbers of sessions, and the comparison of the clicks, for people."""
        found = self.compare("clicks")
        clicks = "" if found is None else f"; clicks per session {with_interval(found)}"
        return f"{self.sessions:,} sessions, {self.groups[1, 0]:,.0f} of them in the control group{clicks}"

    @property
    def name(self) -> str:
        """What the control group gets, in words."""
        kind, _, rest = self.control.partition(":")
        return CONTROL_NAMES.get(kind, kind).format(tag=rest.partition(":")[0])

    @property
    def figures(self) -> LiftFigures:
        """All that is known."""
        return LiftFigures(
            control=self.control,
            since=self.since,
            sessions=self.sessions,
            control_sessions=int(self.groups[1, 0]),
            sentence=self.sentence,
            revenue=self.compare("revenue"),
            clicks=self.compare("clicks"),
            mismatch=self.mismatch,
        )

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def document(self) -> dict[str, Any]:
        """Return the fields of a `LiftRecord`."""
        sums = {"groups": self.groups.tolist(), "sums": self.sums.tolist()}
        return {"control": self.control, "since": self.since, **sums}

    @classmethod
    def read(cls, record: LiftRecord) -> Lift:
        """Return the sums in a record; raise `InputError` if their shape is another."""
        try:
            groups, sums = np.array(record.groups), np.array(record.sums)
        except ValueError as error:
            raise InputError(f"the comparison with the control group is damaged: {error}") from None
        return cls(control=record.control, since=record.since, groups=groups, sums=sums)


CONTROL_NAMES: Final[Mapping[str, str]] = {
    "fixed": "your order",
    "popular": "the most popular ads",
    "random": "ads at random",
    "greedy": "the best ads without exploration",
    "tag": "the version tagged {tag}",
}


def in_words(found: ComparedOutcome) -> tuple[str, str, str]:
    """Return the lift and the ends of its interval, in per cent if that is known.

    >>> nothing, gained = Interval(0, 0, 0), Interval(0.3, -0.004, 0.37)
    >>> in_words(ComparedOutcome(policy=2, control=2, difference=nothing, relative=gained))
    ('+30 %', '+0', '+37')
    """
    if found.relative is None:
        gained, low, high = (f"{number:+.3g}".replace("-", "−") for number in found.difference)
        return gained, low, high
    decimals = 0 if found.relative.high - found.relative.low > 0.05 else 1
    gained, low, high = (
        f"{round(100 * number, decimals) + 0.0:+.{decimals}f}".replace("-", "−") for number in found.relative
    )
    return f"{gained} %", low, high


def with_interval(found: ComparedOutcome) -> str:
    """Return the lift and its interval in words."""
    gained, low, high = in_words(found)
    return f"{gained} (between {low} and {high})"


def multiplier(sessions: float, alpha: float = ALPHA) -> float:
    """Return the number of standard errors that a confidence sequence takes in place of 1.96.

    It is √(2 (1 + 1/(nρ²)) ln(√(nρ² + 1)/α)), with ρ² = (−2 ln α + ln(1 − 2 ln α))/t* tuned for t* = `TUNED` sessions.

    >>> [round(multiplier(n), 2) for n in (1_000, 10_000, 100_000)]
    [3.86, 3.04, 3.24]
    """
    tuned = sessions * (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / TUNED
    return math.sqrt(2 * (1 + 1 / tuned) * math.log(math.sqrt(tuned + 1) / alpha))


def _ratio(policy: float, control: float, s11: float, s10: float, s00: float) -> Interval | None:
    """Return the ratio less 1, and the roots of (μ₁ − qμ₀)² = s₁₁ − 2q s₁₀ + q² s₀₀; None if q has no bounds."""
    a, b, c = control**2 - s00, policy * control - s10, policy**2 - s11
    if not (control > 0 and a > 0 and math.isfinite(c)):
        return None
    root = math.sqrt(max(0.0, b * b - a * c))
    return Interval(policy / control - 1, (b - root) / a - 1, (b + root) / a - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Scores of n sessions.

    Parameters
    ----------
    control : (n,), 1 for the control group, else 0
    share : (n,), the probability of being in it
    earned : (2, n), revenue and click of each session
    expected : (2, 2, n), for revenue and for clicks what is expected under the policy and under the control
    """

    control: Floats
    share: Floats
    earned: Floats
    expected: Floats
