"""The seam between click models and everything else.

A click model is a belief about P(click on arm k | x): an estimate, how certain it is, and how displays change both.
Nothing outside `worker.bandit` looks inside of one. A new model is one file that implements `ClickModel` and `Heads`,
and a name in `worker.bandit.MODELS`.

Rules for every implementation:

- A model is a value: methods return new models and never change one in place.
- The same data in the same order give the same bits.
- What `Heads`, `log_odds_of` and `squared_widths_of` return for a row depends on that row alone, to the bit, never
  on its neighbours or on how a batch is split: planning again after a crash must give the same slate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import DTypeLike

from worker.bandit.arrays import Array, Floats, Ints
from worker.bandit.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Arms shown to some sessions, and what came of them.

    Parameters
    ----------
    contexts : (n, d), one row per session
    sessions : (m,), the row of `contexts` that saw each display
    arms : (m,), the index of the arm displayed
    positions : (m,), the position of each display, from 0
    clicked : (m,), 1.0 or 0.0; a display that got no answer was not clicked
    """

    contexts: Floats
    sessions: Ints
    arms: Ints
    positions: Ints
    clicked: Floats

    def __len__(self) -> int:
        return len(self.arms)


def inputs(contexts: Floats) -> Floats:
    """Return u = [1; x] of each row: (r, d) → (r, d+1)."""
    with_one = np.empty((len(contexts), contexts.shape[1] + 1))
    with_one[:, 0] = 1.0
    with_one[:, 1:] = contexts
    return with_one


def arm_features(arms: int, features: Floats | None) -> Floats:
    """Return a_k = [1; features of arm k], (K, m)."""
    described = np.ones((arms, 1 if features is None else 1 + features.shape[1]))
    if features is not None:
        described[:, 1:] = features
    return described


class Described(TypedDict, total=False):
    """What else is known of contexts, arms and sessions before any data.

    features : (K, columns), those of the arms; a model may ignore them
    intercept : whether there is one; a model may need it
    horizon : the number of positions, 1 by default
    groups : the declared features of contexts, one vector by default
    ad_groups : the declared features of arms, numbers by default
    """

    features: Floats | None
    intercept: bool
    horizon: int
    groups: Groups | None
    ad_groups: Groups | None


class ClickModel(Protocol):
    """A belief about clicks on K arms, given contexts of d numbers; of a simulated world, the truth."""

    name: ClassVar[str]

    @property
    def dim(self) -> int:
        """The number d of context features."""

    @property
    def arms(self) -> int:
        """The number K of arms, retired ones included."""

    @classmethod
    def prior(cls, *, dim: int, arms: int, ridge: float, **known: Unpack[Described]) -> ClickModel:
        """Return the belief before any data.

        `ridge` is the precision of the prior, in units of what `groups.py` says if there is an intercept.
        """

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = True) -> ClickModel:
        """Return the model that `pack` took apart; raise `InputError` if it is not usable."""

    def pack(self) -> dict[str, Floats]:
        """Return all that the model consists of, by name; a dot in a name nests it in the record of a version."""

    # ── predicting ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def biases(self) -> Floats:
        """The log-odds of each arm at x = 0, (K,)."""

    @property
    def effects(self) -> Floats:
        """The shared effect of each context feature on the log-odds, (d,)."""

    @property
    def position_effects(self) -> Floats:
        """The effect b_h of each position on the log-odds, 0 for the first; later positions have the last one's."""

    def log_odds(self, contexts: Floats) -> Floats:
        """Return the log-odds of a click at the first position: (n, d) → (n, K)."""

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the same of chosen arms, −inf for NO_ARM and for K: (n, d), (n, h) → (n, h)."""

    def widths(self, contexts: Floats) -> Floats:
        """Return the posterior standard deviation of the log-odds: (n, d) → (n, K)."""

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the posterior variance of the log-odds of chosen arms: (n, d), (n, h) → (n, h)."""

    def heads(self, shown: Ints, dtype: DTypeLike) -> Heads:
        """Prepare the planning kernel for the arms `shown`."""

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[ClickModel]:
        """Yield models drawn from the posterior; their estimates are the draws."""

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fold(
        self, data: Observations, *, estimator: str, forgetting: float | str = 1.0, changes: float = 0.0
    ) -> Fit[ClickModel]:
        """Learn from displays; raise `EstimationError` rather than return a model that cannot be used.

        `forgetting` is the share of older displays that is kept, or "auto", which takes the number of `changes`
        noticed lately into account (`learning.py`).
        """

    def forget(self, keep: float) -> Self:
        """Keep the share `keep` of all that displays have said: A ← Λ + γ (A − Λ), Aθ̂ ← γ Aθ̂."""

    def with_horizon(self, horizon: int) -> ClickModel:
        """Return the belief for at least as many positions."""

    def with_arms(self, count: int, *, features: Floats | None = None) -> ClickModel:
        """Append arms of which nothing is known but the prior and their features, (count, columns)."""

    def with_features(self, features: Floats) -> ClickModel:
        """Return the belief about arms with other features, (K, columns); what is known of each arm stays."""

    def with_columns(self, fresh: ClickModel, columns: Ints, ad_columns: Ints) -> ClickModel:
        """Return the belief about the features of `fresh`, a prior about the same arms and positions.

        `columns` and `ad_columns` have for each of its columns of contexts and of arms the present one that it
        continues, −1 for a new one, of which nothing is known but the prior. Without present columns that none
        continues, the belief is the one that the same displays give to a model without them; the coefficients of every
        arm stay where features of arms go.
        """

    def shifted(self, arm: int, log_odds: float) -> ClickModel:
        """Return the belief with other log-odds of an arm for all users, as certain as before."""

    def choose_arms(self, arms: Sequence[int]) -> ClickModel:
        """Return the belief about these arms alone, in this order; the others are integrated out."""

    @property
    def most_inherited(self) -> int:
        """The numbers that arms which have changed leave behind; 0 if the model does not notice them."""

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, arm: int) -> tuple[Floats, Floats]:
        """Return the coefficients of [1; x] in the log-odds of an arm, (d+1,), and their covariance, (d+1, d+1)."""


Model = TypeVar("Model", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Generic[Model]):
    """A new belief, and what was forgotten.

    `kept` is the share of older displays that was kept; the arms `changed` began anew.
    """

    model: Model
    kept: float
    changed: tuple[int, ...] = ()

    def forgotten(self, arms: int) -> float:
        """Return the share of what was known that was forgotten, where `arms` arms are shown."""
        return max(1 - self.kept, min(1.0, len(self.changed) / max(1, arms)))


class Heads(Protocol):
    """All that planning needs of the arms shown, prepared once per version; a column is an index into `shown`."""

    @property
    def coefficients(self) -> Array:
        """What log-odds depend on besides contexts, (…, columns): the same numbers, the same log-odds for anybody."""

    def log_odds(self, contexts: Floats) -> Array:
        """Return the log-odds of a click: (n, d) → (n, columns)."""

    def probabilities(self, contexts: Floats) -> Array:
        """Return the click probabilities: (n, d) → (n, columns)."""

    def widths(self, contexts: Floats) -> Array:
        """Return the posterior standard deviations of the log-odds: (n, d) → (n, columns), an array of its own."""
