"""How many sessions, and which `random_share`, would suffice for an answer of an estimator that uses weights.

The information of n sessions at position h is that of n / w_h sessions served by the target, with w_h = E_target[W_h],
the mean weight of the target's slates (`worker.evaluate.support`). An answer needs at each position

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
from worker.evaluate.sessions import Sessions
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, MOST_BEYOND

#: The requirement is an estimate: ask for so much more.
MARGIN: Final = 1.25
SHARES: Final = tuple(np.geomspace(0.001, 1.0, 41).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sufficient:
    """What would suffice: a share for as many sessions as there are, or more sessions at the present share.

    share : smallest random_share for so many sessions; None if even 1 is too little
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
        return float((least * _weights(sessions, share, drawn_only=drawn_only)[:depth]).max())

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


def _weights(sessions: Sessions, share: float, *, drawn_only: bool) -> Floats:
    """Return w_h at a random_share: (H,)."""
    served = replace(sessions.served, uniform=np.full(len(sessions), 1.0 if drawn_only else share))
    if drawn_only:
        served = replace(served, epsilon=np.zeros(len(sessions)))
    eligible = sessions.eligible
    total = np.zeros(sessions.horizon)
    for slates in sessions.target_slates:
        ratio = sessions.target.chances(slates, eligible) / served.chances(slates, eligible)
        if drawn_only:  # replay draws one slate of the target for each session
            ratio = 1 / served.chances(slates, eligible)
        total += ratio.mean(axis=0) / len(sessions.target_slates)
    return np.asarray(total / share if drawn_only else total)


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
