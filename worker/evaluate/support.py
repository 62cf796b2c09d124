"""How far a log supports an answer: importance weights along the cascade, and how many sessions they leave.

The weight of the first h displays of a session is how much likelier the target is to show them than the rule that
served, W_h = P_target(a_1 … a_h | x) / P_served(a_1 … a_h | x). A user who comes through h displays has seen a_1 … a_h
and nothing else, whatever was planned for later, so W_h turns averages over what was served into averages over what
the target would have served: E[W_h g(x, a_1 … a_h, outcome)] = E_target[g].

Two facts keep the weights small.

- *Lottery.* Sessions drawn uniformly (a share ρ, by lottery) could be evaluated alone, with weight 1{drawn}/ρ · Π E_j.
  But the probability of a slate is known whichever way it came about, and W above, with P_served the mixture of both
  ways, is the conditional expectation of that weight given the slate. By Jensen its variance is never larger, and it
  is far smaller where the target mostly agrees with the policy that served.
- *Stopping.* Nothing after the end of a session matters, so nothing after it is weighted.

Where sessions are too few at position h, what is earned from there on cannot be told by weighing; it is between 0 and
P_target(reach h) · e_max. The answer then covers the positions before, and the upper end of its interval is raised by
that bound; if the bound is not small, there is no answer. (`dr` has a model for those positions instead.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.bandit.precision import Floats
from worker.errors import FailedError
from worker.evaluate.sessions import Rule, Sessions

#: Effective sessions below which nothing is said about a position, and effective clicks below which nothing is said.
LEAST_SESSIONS = 30
LEAST_CLICKS = 10
#: The most that positions without support may add, as a share of the estimate.
MOST_BEYOND = 0.1


class Unsupported(FailedError):  # noqa: N818 - says what the log cannot do, which is no error of ours
    """The log cannot support this answer; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """Sessions with their weights.

    Parameters
    ----------
    sessions : n sessions, cut to the depth that is supported
    weights : (n, H), W_h
    counts : (n,), how many sessions of the log each one stands for
    effective : per position, also of those not supported, how many sessions served by the target would say as much
    clicks : how many clicks of equal weight would say as much as those up to each position
    beyond : the most that the target can earn after the depth that is supported, per session
    """

    sessions: Sessions
    weights: Floats
    counts: Floats
    effective: tuple[float, ...]
    clicks: tuple[float, ...]
    beyond: float

    @property
    def stopped(self) -> Floats:
        """W_h, or where the session ended before, W at its end: a martingale of mean 1, (n, H)."""
        last = np.maximum(self.sessions.displayed, 1)[:, None]
        held = np.take_along_axis(self.weights, np.minimum(self.sessions.positions, last) - 1, axis=1)
        return np.where(self.sessions.displayed[:, None] == 0, 1.0, held)

    @property
    def matching(self) -> int:
        """How many sessions the target might have served just so."""
        return int((self.stopped[:, -1] > 0).sum())


def support(sessions: Sessions, *, served: Rule | None = None, counts: Floats | None = None) -> Support:
    """Weigh sessions, and cut them where support ends; raise `Unsupported` if there is too little.

    `served` is the rule to take in place of the one that they were served by.
    """
    if not len(sessions):
        raise Unsupported("no session was drawn at random, and the policy that served leaves nothing to chance")
    served = served or sessions.served
    counts = np.ones(len(sessions)) if counts is None else counts
    eligible = sessions.eligible
    weights = sessions.target.chances(sessions.slates, eligible) / served.chances(sessions.slates, eligible)
    whole = Support(sessions=sessions, weights=weights, counts=counts, effective=(), clicks=(), beyond=0.0)
    reach, squares = reaching(whole), _squares(whole, served)
    total = float(counts.sum())
    effective = [share * total**2 / square for share, square in zip(reach, squares.tolist(), strict=False)]
    clicks = _effective_clicks(whole, squares)
    depth = next((h for h, number in enumerate(effective) if number < LEAST_SESSIONS), sessions.depth)
    if not depth:
        raise Unsupported(f"the first position rests on {_lack(effective[0], clicks[0])}")
    most = max(clicks[:depth])
    if most < LEAST_CLICKS:
        raise Unsupported(f"it rests on {_lack(LEAST_SESSIONS, most)}")
    depth = max(h for h in range(1, depth + 1) if clicks[h - 1] >= LEAST_CLICKS)
    return Support(
        sessions=sessions.cut(depth),
        weights=weights,
        counts=counts,
        effective=tuple(effective),
        clicks=tuple(clicks),
        beyond=float(reach[depth] * sessions.prices.max()) if depth < sessions.depth else 0.0,
    )


def _lack(effective: float, clicks: float) -> str:
    if effective < LEAST_SESSIONS:
        return f"{effective:.1f} effective sessions, {LEAST_SESSIONS} are needed"
    return f"{clicks:.1f} effective clicks, {LEAST_CLICKS} are needed"


def check_beyond(found: Support) -> None:
    """Raise `Unsupported` if what cannot be told is not small against what can."""
    earned = float((found.counts[:, None] * found.weights * found.sessions.rewards).sum() / found.counts.sum())
    depth = found.sessions.depth
    if found.beyond > MOST_BEYOND * earned:
        raise Unsupported(
            f"position {depth + 1} rests on {_lack(found.effective[depth], found.clicks[depth])}, and up to "
            f"{found.beyond:.3g} per session may be earned from there on"
        )


def reaching(support: Support) -> list[float]:
    """Return the estimated probability that the target's users reach each position, and one more: depth + 1 numbers."""
    sessions, counts = support.sessions, support.counts[:, None]
    onward = (counts * support.weights * sessions.passed).sum(axis=0)
    all_of_them = (counts * support.stopped).sum(axis=0)
    shares = onward / np.where(all_of_them > 0, all_of_them, 1.0)
    return [1.0, *shares[: sessions.depth].tolist()]


def _squares(support: Support, served: Rule) -> Floats:
    """Return Σ_i E[W_h²] for each position: (depth,).

    Kish's count (Σ W)² / Σ W² of the weights that came is blind to what did not come: a slate that the target shows
    but that the log, by chance, does not have. And to choose by it would be to choose the logs that lack the heavy
    weights. So support is judged by the squares to be expected, from what is known beforehand: E_served[W_h²] =
    E_target[W_h], the mean over slates drawn from the target.
    """
    sessions, counts = support.sessions, support.counts
    eligible = sessions.eligible
    square = np.zeros(sessions.horizon)
    with np.errstate(divide="ignore"):  # what could not be served at all has infinite weight
        for slates in sessions.target_slates:
            ratio = sessions.target.chances(slates, eligible) / served.chances(slates, eligible)
            square += (counts[:, None] ** 2 * ratio).sum(axis=0) / len(sessions.target_slates)
    return square[: sessions.depth]


def _effective_clicks(support: Support, squares: Floats) -> list[float]:
    """Return, for each position, how many clicks of equal weight are to be expected up to there.

    (Σ E[W r])² / Σ E[(W r)²], with E[(W r)²] = E_target[W r²] taken as E_target[W] E_target[r²]: a heavy click that did
    not come must not make the others look more than they are.
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
