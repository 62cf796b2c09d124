"""Support of a log for a target: importance weights along the cascade, and the information that they leave.

The weight of the first h displays of a session is the ratio of their probabilities under the target and under the rule
that served, W_h = P_target(a_1 … a_h | x) / P_served(a_1 … a_h | x). A user who passes h displays has seen a_1 … a_h
and no later part of the slate, so W_h turns averages under the rule that served into averages under the target:
E[W_h g(x, a_1 … a_h, outcome)] = E_target[g].

Two facts keep the weights small.

- *Lottery.* Sessions drawn uniformly (a share ρ, by lottery) could be evaluated alone, with weight 1{drawn}/ρ · Π E_j.
  But every slate has a known probability under the mixture of both ways. W above, with P_served of the mixture, is the
  conditional expectation of that weight given the slate. By Jensen its variance is never larger. It is far smaller if
  the target mostly agrees with the policy that served.
- *Stopping.* Displays after the end of a session do not matter and have no weight.

If position h has too few sessions, weights do not give the revenue from there on; it is between 0 and
P_target(reach h) · e_max. The answer then covers the positions before h, and that bound raises the upper end of its
interval. If the bound is not small, there is no answer. (`dr` has a model for those positions instead.)

*What would suffice.* The information of n sessions at position h is that of n / w_h sessions served by the target, with
w_h = E_target[W_h], the mean weight of the target's slates. An answer needs at each position

    n P(reach h) ≥ LEAST_SESSIONS w_h        and        n P(click up to h) ≥ LEAST_CLICKS w_h

If the target shows other arms than were served, its slates come from the lottery alone: w_h = A_h / ρ, where A_h is the
number of possible slates of h positions, K^h with repeats, and ρ is `random_share`. So the number of random sessions
must be

    n ρ ≥ A_h max(LEAST_SESSIONS / P(reach h), LEAST_CLICKS / P(click up to h))

Where the target agrees with the policy that served, w_h is about 1, and far less suffices. Here w_h is computed from
the slates of both. `dr` needs the first position only, the other estimators need all that may earn much. P(reach h) and
P(click up to h) are taken from the sessions as they were served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.errors import FailedError
from worker.evaluate.sessions import Rule, Sessions

#: Least effective sessions at a position, and least effective clicks, for an answer.
LEAST_SESSIONS = 30
LEAST_CLICKS = 10
#: Largest revenue at positions without support, as a share of the estimate.
MOST_BEYOND = 0.1
#: Largest deviation of mean weights from 1, in standard errors.
MOST_DEVIATION: Final = 3.0
LEAST_SQUARE: Final = 1e-300
#: What would suffice is an estimate: factor on it, to be on the safe side.
MARGIN: Final = 1.25
SHARES: Final = tuple(np.geomspace(0.001, 1.0, 41).tolist())


class Unsupported(FailedError):  # noqa: N818 - a result, not a defect
    """The log does not support an answer; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """Weighted sessions.

    sessions : n sessions, cut to the supported depth
    weights : (n, H), W_h
    counts : (n,), number of sessions of the log that each one represents
    effective : per position, supported or not, the number of sessions served by the target with the same information
    clicks : per position, the number of clicks of equal weight with the same information as those up to there
    beyond : largest revenue per session of the target after the supported depth
    """

    sessions: Sessions
    weights: Floats
    counts: Floats
    effective: tuple[float, ...] = ()
    clicks: tuple[float, ...] = ()
    beyond: float = 0.0

    @property
    def stopped(self) -> Floats:
        """W̃_h: W_h, or W at the end of the session if that was before; a martingale of mean 1, (n, H)."""
        last = np.maximum(self.sessions.displayed, 1)[:, None]
        weights = np.take_along_axis(self.weights, np.minimum(self.sessions.positions, last) - 1, axis=1)
        return np.where(self.sessions.displayed[:, None] == 0, 1.0, weights)

    @property
    def matching(self) -> int:
        """Number of sessions that the target might have served in the same way."""
        return int((self.stopped[:, -1] > 0).sum())


def support(sessions: Sessions, *, served: Rule | None = None, counts: Floats | None = None) -> Support:
    """Weight sessions, and cut them where support ends; raise `Unsupported` if there is too little.

    `served` replaces the rule that served them.
    """
    if not len(sessions):
        raise Unsupported("no session was drawn at random, and the policy that served is deterministic")
    served = served or sessions.served
    counts = np.ones(len(sessions)) if counts is None else counts
    eligible = sessions.eligible
    chances, by_others = served.chances(sessions.slates, eligible), ~np.isnan(sessions.recorded[:, :1])
    chances = np.where(by_others, np.cumprod(sessions.recorded, axis=1), chances)
    weights = sessions.target.chances(sessions.slates, eligible) / chances
    whole = Support(sessions=sessions, weights=weights, counts=counts)
    reach, total = reaching(whole), float(counts.sum())
    expected = np.where(by_others, observed_squares(whole, reach), expected_weights(sessions, served))
    squares = np.maximum((counts[:, None] ** 2 * expected).sum(axis=0)[: sessions.depth], LEAST_SQUARE)
    effective = [share * total**2 / square for share, square in zip(reach, squares.tolist(), strict=False)]
    clicks = _effective_clicks(whole, squares)
    depth = next((h for h, number in enumerate(effective) if number < LEAST_SESSIONS), sessions.depth)
    if not depth:
        raise Unsupported(f"the first position has {_lack(effective[0], clicks[0])}")
    most = max(clicks[:depth])
    if most < LEAST_CLICKS:
        raise Unsupported(f"there are {_lack(LEAST_SESSIONS, most)}")
    depth = max(h for h in range(1, depth + 1) if clicks[h - 1] >= LEAST_CLICKS)
    if by_others.any():
        check_recorded(whole, depth)
    return replace(
        whole,
        sessions=sessions.cut(depth),
        effective=tuple(effective),
        clicks=tuple(clicks),
        beyond=float(reach[depth] * sessions.prices.max()) if depth < sessions.depth else 0.0,
    )


def _lack(effective: float, clicks: float) -> str:
    if effective < LEAST_SESSIONS:
        return f"{effective:.1f} effective sessions, {LEAST_SESSIONS} are needed"
    return f"{clicks:.1f} effective clicks, {LEAST_CLICKS} are needed"


def check_beyond(found: Support) -> None:
    """Raise `Unsupported` if the bound for unsupported positions is not small against the estimate."""
    earned = float((found.counts[:, None] * found.weights * found.sessions.rewards).sum() / found.counts.sum())
    depth = found.sessions.depth
    if found.beyond > MOST_BEYOND * earned:
        raise Unsupported(
            f"position {depth + 1} has {_lack(found.effective[depth], found.clicks[depth])}, "
            f"and the revenue from there on may be up to {found.beyond:.3g} per session"
        )


def reaching(support: Support) -> list[float]:
    """Return the estimated probability that users of the target reach position 1 … depth + 1."""
    sessions, counts = support.sessions, support.counts[:, None]
    onward = (counts * support.weights * sessions.passed).sum(axis=0)
    all_of_them = (counts * support.stopped).sum(axis=0)
    shares = onward / np.where(all_of_them > 0, all_of_them, 1.0)
    return [1.0, *shares[: sessions.depth].tolist()]


def expected_weights(sessions: Sessions, served: Rule) -> Floats:
    """Return E[W_h²] of each session: (n, H).

    Kish's count (Σ W)² / Σ W² of the observed weights ignores slates of the target that the log, by chance, does not
    have. A criterion based on it would prefer the logs that lack the heavy weights. So support is judged by the
    expected squares, which do not depend on the draws: E_served[W_h²] = E_target[W_h], the mean over slates drawn from
    the target.
    """
    eligible = sessions.eligible
    total = np.zeros(sessions.slates.shape)
    with np.errstate(divide="ignore"):  # a slate that could not be served has infinite weight
        for slates in sessions.target_slates:
            total += sessions.target.chances(slates, eligible) / served.chances(slates, eligible)
    return np.asarray(total / len(sessions.target_slates))


def observed_squares(support: Support, reach: list[float]) -> Floats:
    """Return W_h² of the displays made, per session that would reach them: (n, H), as `expected_weights`.

    Where another system recorded its propensities, they are known of the slates that it showed, and of no others. That
    heavy weights may be missing is what `check_recorded` is for.
    """
    sessions = support.sessions
    shares = np.pad(np.array(reach[: sessions.depth]), (0, sessions.horizon - sessions.depth), constant_values=1.0)
    return np.asarray(np.where(sessions.reached, support.weights, 0.0) ** 2 / np.where(shares > 0, shares, 1.0))


def check_recorded(support: Support, depth: int) -> None:
    """Raise `Unsupported` if recorded propensities do not fit the slates: W̃_h of positions up to `depth` has mean 1.

    A mean below 1 says that some users could not see what the target shows. A share that is too small to be noticed
    changes revenues by less than their own error, as fewer sessions click than match.
    """
    for h, column in enumerate(support.stopped.T[:depth], start=1):
        if abs(column.mean() - 1) > MOST_DEVIATION * column.std() / np.sqrt(len(column)):
            raise Unsupported(
                f"the weights of position {h} have the mean {column.mean():.2f} in place of 1: the recorded "
                "propensities are wrong, or some users could not see the ads of the target"
            )


def _effective_clicks(support: Support, squares: Floats) -> list[float]:
    """Return the expected number of clicks of equal weight up to each position.

    (Σ E[W r])² / Σ E[(W r)²], with E[(W r)²] = E_target[W r²] taken as E_target[W] E_target[r²]: the absence of a heavy
    click must not increase the number.
    """
    sessions, counts = support.sessions, support.counts[:, None]
    weights, rewards = counts * support.weights, sessions.rewards
    total = np.maximum((counts * support.stopped).sum(axis=0), np.finfo(np.float64).tiny)
    earned = ((weights * rewards).sum(axis=0) / total)[: sessions.depth]
    squared = ((weights * rewards**2).sum(axis=0) / total)[: sessions.depth]
    found = []
    for depth in range(1, sessions.depth + 1):
        spread = float((squared[:depth] * squares[:depth])[squared[:depth] > 0].sum())
        found.append(float(support.counts.sum() * earned[:depth].sum()) ** 2 / spread if spread else 0.0)
    return found


# ── what would suffice ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Sufficient:
    """What would suffice: a share for as many sessions as there are, or more sessions at the present share.

    share : smallest random_share for as many sessions as there are; None if even 1 is too little
    sessions : number of sessions at the present share; None without one
    best : the share that needs the fewest sessions, and their number
    """

    share: float | None
    present: float
    sessions: float | None
    best: tuple[float, float]

    def __str__(self) -> str:
        if self.share is not None:
            more = "" if self.sessions is None else f", or {_rounded(self.sessions)} sessions at {self.present:.2g}"
            return f"random_share = {self.share:.2g} would suffice for so many sessions{more}"
        share, count = self.best
        return (
            f"no random_share suffices for so many sessions: it takes {_rounded(count)}, at random_share = {share:.2g}"
        )


def sufficient(sessions: Sessions, *, first_position: bool, drawn_only: bool) -> Sufficient:
    """Return what would suffice for these sessions and their target.

    first_position : whether the first position is enough, because a model has the others
    drawn_only : whether only sessions drawn uniformly count (`replay`)
    """
    depth = 1 if first_position else _depth(sessions)
    reach = np.maximum(sessions.reached.mean(axis=0), 1 / len(sessions))[:depth]
    clicks = np.maximum(np.cumsum((sessions.rewards > 0).mean(axis=0)), 1 / len(sessions))[:depth]
    least = np.maximum(LEAST_SESSIONS / reach, LEAST_CLICKS / clicks) * MARGIN

    def needed(share: float) -> float:
        if drawn_only:
            weights = expected_weights(sessions.with_one_target_slate(), sessions.served.uniformly()) / share
        else:
            weights = expected_weights(sessions, replace(sessions.served, uniform=np.full(len(sessions), share)))
        return float((least * weights.mean(axis=0)[:depth]).max())

    present = float(sessions.served.uniform.mean())
    by_share = {share: needed(share) for share in SHARES}
    enough = next((share for share, count in by_share.items() if share > present and count <= len(sessions)), None)
    best = min(SHARES, key=by_share.__getitem__)
    return Sufficient(
        share=None if enough is None else _up(enough),
        present=present,
        sessions=needed(present) if present > 0 else None,
        best=(_up(best), by_share[best]),
    )


def _depth(sessions: Sessions) -> int:
    """Return the number of positions after which little can be earned."""
    earned = np.cumsum(sessions.rewards.mean(axis=0))
    onward = sessions.passed.mean(axis=0) * sessions.prices.max()
    enough = np.flatnonzero(onward[: sessions.depth] <= MOST_BEYOND * earned[: sessions.depth])
    return int(enough[0]) + 1 if len(enough) else sessions.depth


def _up(value: float) -> float:
    """Round up to two digits.

    >>> _up(0.0213), _up(1.0)
    (0.022, 1.0)
    """
    unit = 10.0 ** (floor(log10(value)) - 1)
    return min(1.0, round(ceil(round(value / unit, 6)) * unit, 12))


def _rounded(count: float) -> str:
    """Round a number up to two digits, for people.

    >>> _rounded(41_234.0), _rounded(3.12e6)
    ('42,000', '3,200,000')
    """
    if count == inf:
        return "infinitely many"
    unit = 10 ** max(0, floor(log10(max(count, 1))) - 1)
    return f"{ceil(count / unit) * unit:,}"
