"""What the target would have earned per session: five estimators, each on its own footing.

n sessions; r_h is what display h earned (zero but at the click), W_h the weight of the first h displays (see
`evaluate_support`), W̃_h the same, held at the end of the session.

- `replay`: matching replay (Li et al., 2011), position by position. Only sessions that were drawn uniformly are used,
  and of these, at position h, the ones that showed what the target would have shown up to h. Whether a session is
  used at h does not depend on what happens at h; it would if whole sessions were averaged, because a session that is
  clicked early has less to match. So r̂_h and ŝ_h, the mean revenue and the share that goes on, are honest at each
  position, and V̂_h = r̂_h + ŝ_h V̂_{h+1}.
- `ips`: inverse propensity, per decision: the mean of Σ_h W_h r_h. *Unbiased:* given what was shown and answered up
  to h−1, E[W_h r_h] = W_{h−1} E_target[r_h], so that the sum telescopes to the target's value. *Smaller variance than
  weighting by the whole slate:* later choices are made without regard to the click, so W_H / W_h has conditional
  mean 1 given everything up to h, and W_h r_h = E[W_H r_h | up to h]; conditional expectations vary less.
- `snips`: the same with each position self-normalised, Σ_h (Σ_i W_h r_h) / (Σ_i W̃_h). W̃_h is a martingale of mean 1
  (optional stopping), so this is consistent, with a bias of order 1/n, and usually the narrower of the two.
- `direct`: the mean of V̂_1(x) under a click model that has not seen the session. Narrow, needs no chance in the log,
  and wrong if the model is: its interval covers the error of estimation, not that of a wrong form.
- `dr`: doubly robust, the model corrected by what was seen,

      V̂_1 + Σ_h W_h [ r_h + 1{goes on} V̂_{h+1} − Q̂_h(a_h) ]

  *Unbiased whatever the model:* E[W_h Q̂_h(a_h)] over a_h is W_{h−1} V̂_h (because V̂_h = E_target[Q̂_h]), which is
  what the bracket of h−1 added; all model terms cancel and Σ_h E[W_h r_h] is left. The better the model, the smaller
  the brackets (Jiang & Li, 2016; for cascades Kiyohara et al., 2022). Positions that the log does not support are left
  to the model: the sum ends before them, and the interval is widened by what the model does not know there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from worker.bandit.planning import NO_ARM
from worker.bandit.precision import Floats
from worker.evaluate.intervals import Interval, interval
from worker.evaluate.model import Judges, ModelError, baseline, model_error, slate_values
from worker.evaluate.sessions import Rule, Sessions
from worker.evaluate.support import Support, Unsupported, check_beyond, support

#: Share of the target's displays that may be of arms that were never seen.
MOST_UNSEEN: Final = 0.01

METHODS: Final = ("replay", "ips", "snips", "direct", "dr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's answer, or why there is none.

    `sessions` is how many sessions it averages over, `matching` how many of them showed what the target might have
    shown, `effective` per position how many sessions served by the target itself would say as much, `clicks` how many
    clicks of equal weight. `positions` is how many positions were weighed; `beyond` is the most that later ones can
    add (included in the upper ends). `difference` is to what the same sessions earned as they were served.
    """

    method: str
    sessions: int = 0
    revenue: Interval | None = None
    difference: Interval | None = None
    matching: int | None = None
    effective: tuple[float, ...] = ()
    clicks: float | None = None
    positions: int = 0
    beyond: float = 0.0
    refused: str | None = None


def weighted(sessions: Sessions, judges: Judges | None, *, method: str, confidence: float) -> Estimate:
    """Return the answer of `replay`, `ips`, `snips` or `dr` on sessions whose rule supports the target."""
    found = replay_support(sessions) if method == "replay" else support(sessions)
    error, beyond = None, found.beyond
    if method == "dr":
        if judges is None:
            raise Unsupported("there is no click model to correct")
        value, influence = doubly_robust(found, sessions, judges)
        if found.sessions.depth < sessions.depth:
            error, beyond = model_error(judges, sessions, after=found.sessions.depth), 0.0
    else:
        check_beyond(found)
        value, influence = {"replay": replay, "ips": per_decision, "snips": self_normalised}[method](found)
    # Pairing takes out what both have in common; replay rests on other sessions than those that were served.
    earned = float(found.sessions.earned.mean())
    gained = influence - (found.sessions.earned - earned)
    return Estimate(
        method=method,
        sessions=len(found.sessions),
        revenue=_interval(value, influence, error, confidence, beyond),
        difference=None if method == "replay" else _interval(value - earned, gained, error, confidence, beyond),
        matching=found.matching,
        effective=found.effective,
        clicks=found.clicks[found.sessions.depth - 1],
        positions=found.sessions.depth,
        beyond=beyond,
    )


def direct(sessions: Sessions, judges: Judges, *, confidence: float) -> Estimate:
    """Return the answer of the click model alone."""
    _check_shown(sessions)
    values = np.zeros(len(sessions))
    for rows, model in judges.each():
        part = sessions.part(rows)
        for slates in part.target_slates:
            values[rows] += slate_values(model, part, slates).values[:, 0] / len(part.target_slates)
    error = model_error(judges, sessions)
    value, earned = float(values.mean()), float(sessions.earned.mean())
    gained = values - sessions.earned - (value - earned)
    return Estimate(
        method="direct",
        sessions=len(sessions),
        revenue=_interval(value, values - value, error, confidence),
        difference=_interval(value - earned, gained, error, confidence),
        clicks=float(judges.clicks),
        positions=sessions.depth,
    )


def _interval(
    value: float, influence: Floats, error: ModelError | None, confidence: float, beyond: float = 0.0
) -> Interval:
    """Return an interval to which the error of an estimated model belongs, if there is one.

    The clicks that a session is judged by also made the model, so its two influences go together and are added up;
    what sessions outside of these did to the model comes on top.
    """
    if error is None:
        return interval(value, influence, confidence=confidence, beyond=beyond)
    others = max(0.0, error.variance - float((error.pulls**2).sum()))
    both = influence + len(influence) * error.pulls
    return interval(value, both, confidence=confidence, extra=others, beyond=beyond)


def _check_shown(sessions: Sessions) -> None:
    """Refuse to judge arms that nobody has seen: the model knows nothing of them but its prior."""
    seen = sessions.slates[sessions.positions <= sessions.answered[:, None]]
    known = np.bincount(seen, minlength=sessions.prices.shape[1]) > 0
    wanted = sessions.target_slates[:, :, : sessions.depth]
    unknown = ~known[wanted] & (wanted != NO_ARM)
    if unknown.mean() > MOST_UNSEEN:
        raise Unsupported(
            f"{unknown.mean():.0%} of what the target would show are arms that nobody has seen in the log"
        )


# ── the estimators: each returns its value and the influence of each session on it ───────────────────────────────────


def per_decision(found: Support) -> tuple[float, Floats]:
    """Weigh what each display earned."""
    values = (found.weights * found.sessions.rewards).sum(axis=1)
    value = float(values.mean())
    return value, values - value


def self_normalised(found: Support) -> tuple[float, Floats]:
    """Weigh what each display earned, by weights that sum to one at each position."""
    earned, stopped = found.weights * found.sessions.rewards, found.stopped
    size = stopped.mean(axis=0)
    ratios = earned.mean(axis=0) / size
    influence = ((earned - ratios * stopped) / size)[:, : found.sessions.depth].sum(axis=1)
    return float(ratios[: found.sessions.depth].sum()), influence


def doubly_robust(found: Support, sessions: Sessions, judges: Judges) -> tuple[float, Floats]:
    """Correct the model as far as there is support; from there on the model stands alone."""
    action, state = np.zeros(found.weights.shape), np.zeros(found.weights.shape)
    for rows, model in judges.each():
        if len(rows):
            expected = baseline(model, sessions.part(rows))
            action[rows], state[rows] = expected.action, expected.state
    onward = np.concatenate([state[:, 1:], np.zeros((len(sessions), 1))], axis=1)
    surprise = sessions.rewards + sessions.passed * onward - action
    corrected = sessions.reached & (sessions.positions <= found.sessions.depth)
    values = state[:, 0] + (np.where(corrected, found.weights, 0.0) * surprise).sum(axis=1)
    value = float(values.mean())
    return value, values - value


def replay_support(sessions: Sessions) -> Support:
    """Take the sessions drawn uniformly; if the target leaves something to chance, it draws first, once."""
    used = sessions.part(sessions.drawn)
    if not len(used):
        raise Unsupported("no session was drawn uniformly (warm-up, or random_share above 0)")
    nothing = np.zeros(len(used))
    slates = used.target_slates[0]
    certain = Rule(best=slates, epsilon=nothing, uniform=nothing, repeats=used.target.repeats)
    uniformly = replace(used.served, epsilon=nothing, uniform=np.ones(len(used)))
    # A session drawn by a lottery of share ρ stands for 1/ρ sessions, one of the warm-up for itself.
    counts = 1 / used.served.uniform
    return support(replace(used, target=certain, target_slates=slates[None]), served=uniformly, counts=counts)


def replay(found: Support) -> tuple[float, Floats]:
    """Go through the positions by those sessions that match so far."""
    sessions, count = found.sessions, len(found.sessions)
    used = found.counts[:, None] * found.weights * sessions.reached
    size = used.sum(axis=0)
    rewards, passed = sessions.rewards, sessions.passed
    values = np.zeros(sessions.depth + 1)
    going_on = np.zeros(sessions.depth)
    for h in range(sessions.depth - 1, -1, -1):
        going_on[h] = (used[:, h] * passed[:, h]).sum() / size[h]
        values[h] = (used[:, h] * rewards[:, h]).sum() / size[h] + going_on[h] * values[h + 1]
    reach = np.concatenate([[1.0], np.cumprod(going_on)])
    influence = np.zeros(count)
    for h in range(sessions.depth):
        surprise = rewards[:, h] + passed[:, h] * values[h + 1] - values[h]
        influence += reach[h] * used[:, h] / size[h] * count * surprise
    return float(values[0]), influence
