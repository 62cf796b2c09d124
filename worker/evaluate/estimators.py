"""The off-policy estimators of the target's revenue per session.

Every estimator is one class, found by its name in `METHODS`. Notation, for n sessions:

- r_h is the revenue of display h, zero except at the click.
- W_h is the importance weight of the first h displays (`worker.evaluate.support`).
- W̃_h is the same, held constant after the end of the session.
- Q̂_h and V̂_h are the values of an arm and of the target's choice under a click model (`worker.evaluate.model`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats
from worker.evaluate.intervals import ConfidenceInterval, interval
from worker.evaluate.model import CrossFit, ModelError, baseline, model_error, slate_values
from worker.evaluate.sessions import Sessions
from worker.evaluate.support import Support, Unsupported, check_beyond, support

#: Largest share of the target's displays with arms that no session of the log has seen.
MOST_UNSEEN: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The answer of one estimator, or the reason why it has none.

    sessions : number of sessions averaged
    difference : difference to the revenue of the same sessions as they were served
    matching : number of sessions that showed a possible slate of the target
    effective : per position, the number of sessions served by the target itself with the same information
    clicks : number of clicks of equal weight with the same information
    positions : number of positions weighted
    beyond : upper bound of the revenue at later positions, included in the upper ends
    refused : reason for no answer
    """

    method: str
    sessions: int = 0
    revenue: ConfidenceInterval | None = None
    difference: ConfidenceInterval | None = None
    matching: int | None = None
    effective: tuple[float, ...] = ()
    clicks: float | None = None
    positions: int = 0
    beyond: float = 0.0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """An estimated value, the influence of each session on it (n,), and the error of an estimated model, if any."""

    value: float
    influence: Floats
    error: ModelError | None = None

    @classmethod
    def mean(cls, values: Floats, error: ModelError | None = None) -> Value:
        """Return the mean of one number per session."""
        value = float(values.mean())
        return cls(value, values - value, error)

    def minus(self, other: Value) -> Value:
        """Return the difference to the value of the same sessions; pairing cancels their common variance."""
        return Value(self.value - other.value, self.influence - other.influence, self.error)

    def interval(self, confidence: float, beyond: float = 0.0) -> ConfidenceInterval:
        """Return the interval, with the error of the model.

        Sessions that were used to fit the model have two influences, which are added up. The variance from all other
        sessions of the model comes on top.
        """
        if self.error is None:
            return interval(self.value, self.influence, confidence=confidence, beyond=beyond)
        pulls = self.error.pulls
        others = max(0.0, self.error.variance - float((pulls**2).sum()))
        both = self.influence + len(self.influence) * pulls
        return interval(self.value, both, confidence=confidence, extra=others, beyond=beyond)


class OffPolicyEstimator(ABC):
    """An estimator of the target's revenue per session.

    name : name on the command line and in JSON
    needs_model : whether `estimate` needs click models
    needs_chance : whether it uses only sessions whose slates were left to chance
    """

    name: ClassVar[str]
    needs_model: ClassVar[bool] = False
    needs_chance: ClassVar[bool] = True

    @abstractmethod
    def estimate(self, sessions: Sessions, fit: CrossFit | None, *, confidence: float) -> Estimate:
        """Return the answer; raise `Unsupported` if the log does not support one."""

    def usable(self, sessions: Sessions) -> int:
        """Return the number of sessions that this estimator can use."""
        return len(sessions)


class WeightedEstimator(OffPolicyEstimator):
    """An estimator on weighted sessions, as far as the log supports weights.

    is_paired : whether the sessions used are those that the policy served, so that differences make sense
    """

    is_paired: ClassVar[bool] = True

    @abstractmethod
    def value(self, found: Support, sessions: Sessions, fit: CrossFit | None) -> Value:
        """Return the value from `found`, the weights of `sessions`."""

    def support(self, sessions: Sessions) -> Support:
        """Weight the sessions."""
        return support(sessions)

    def estimate(self, sessions: Sessions, fit: CrossFit | None, *, confidence: float) -> Estimate:
        """Return the answer; without a model, later positions must not be able to earn much."""
        found = self.support(sessions)
        beyond = 0.0 if self.needs_model else found.beyond
        if not self.needs_model:
            check_beyond(found)
        value = self.value(found, sessions, fit)
        gained = value.minus(Value.mean(found.sessions.earned)) if self.is_paired else None
        return Estimate(
            method=self.name,
            sessions=len(found.sessions),
            revenue=value.interval(confidence, beyond),
            difference=None if gained is None else gained.interval(confidence, beyond),
            matching=found.matching,
            effective=found.effective,
            clicks=found.clicks[found.sessions.depth - 1],
            positions=found.sessions.depth,
            beyond=beyond,
        )


class MatchingReplay(WeightedEstimator):
    """Matching replay, position by position, on the sessions that were drawn uniformly.

    At position h, the sessions count that showed the target's arms up to h, with r̂_h their mean revenue and ŝ_h the
    share that goes on:

        V̂_h = r̂_h + ŝ_h V̂_{h+1}

    The choice of sessions at h does not depend on the answer at h, so r̂_h and ŝ_h are unbiased. An average over whole
    matching sessions is not: a session with an early click has less to match.

    References
    ----------
    Li, Chu, Langford and Wang (2011). Unbiased offline evaluation of contextual-bandit-based news article
    recommendation algorithms. WSDM.
    """

    name = "replay"
    is_paired = False

    def usable(self, sessions: Sessions) -> int:
        """Return the number of sessions drawn uniformly."""
        return int(sessions.drawn.sum())

    def support(self, sessions: Sessions) -> Support:
        """Weight the sessions drawn uniformly; a target that draws has one slate for each, drawn beforehand."""
        used = sessions.part(sessions.drawn)
        if not len(used):
            raise Unsupported("no session was drawn uniformly (warm-up, or random_share above 0)")
        # A session drawn by a lottery of share ρ stands for 1/ρ sessions, one of the warm-up for itself.
        counts = 1 / used.served.uniform
        return support(used.with_one_target_slate(), served=used.served.uniformly(), counts=counts)

    def value(self, found: Support, sessions: Sessions, fit: CrossFit | None) -> Value:
        """Return V̂_1 by the recursion over positions."""
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
        return Value(float(values[0]), influence)


class InversePropensity(WeightedEstimator):
    """Inverse propensity scoring, per decision.

        V̂ = (1/n) Σ_i Σ_h W_h r_h

    *Unbiased:* given the displays and answers up to h−1, E[W_h r_h] = W_{h−1} E_target[r_h], so the sum telescopes to
    the target's value. *Smaller variance than weights of whole slates:* later choices do not depend on the click, so
    W_H / W_h has conditional mean 1, and W_h r_h = E[W_H r_h | up to h].

    References
    ----------
    Precup, Sutton and Singh (2000). Eligibility traces for off-policy policy evaluation. ICML.
    """

    name = "ips"

    def value(self, found: Support, sessions: Sessions, fit: CrossFit | None) -> Value:
        """Return the mean weighted revenue."""
        return Value.mean((found.weights * found.sessions.rewards).sum(axis=1))


class SelfNormalised(WeightedEstimator):
    """Inverse propensity scoring, self-normalised at each position.

        V̂ = Σ_h (Σ_i W_h r_h) / (Σ_i W̃_h)

    W̃_h is a martingale of mean 1 (optional stopping), so this is consistent, with a bias of order 1/n. Its interval is
    usually narrower than that of `ips`.

    References
    ----------
    Swaminathan and Joachims (2015). The self-normalized estimator for counterfactual learning. NeurIPS.
    """

    name = "snips"

    def value(self, found: Support, sessions: Sessions, fit: CrossFit | None) -> Value:
        """Return the sum of the ratios."""
        earned, stopped = found.weights * found.sessions.rewards, found.stopped
        size = stopped.mean(axis=0)
        ratios = earned.mean(axis=0) / size
        influence = ((earned - ratios * stopped) / size)[:, : found.sessions.depth].sum(axis=1)
        return Value(float(ratios[: found.sessions.depth].sum()), influence)


class DirectMethod(OffPolicyEstimator):
    """The direct method: the mean value of the target's slates under click models.

        V̂ = (1/n) Σ_i V̂_1(x_i)

    The model of a session was fitted on other sessions. The interval is narrow, and the log needs no chance. The
    interval covers the error of estimation, but not that of a wrong form of the model.

    References
    ----------
    Beygelzimer and Langford (2009). The offset tree for learning with partial labels. KDD.
    """

    name = "direct"
    needs_model = True
    needs_chance = False

    def estimate(self, sessions: Sessions, fit: CrossFit | None, *, confidence: float) -> Estimate:
        """Return the answer of the click models alone."""
        fit = _required(fit)
        _check_seen(sessions)
        values = np.zeros(len(sessions))
        for rows, model in fit.each():
            part = sessions.part(rows)
            for slates in part.target_slates:
                values[rows] += slate_values(model, part, slates).values[:, 0] / len(part.target_slates)
        value = Value.mean(values, model_error(fit, sessions))
        return Estimate(
            method=self.name,
            sessions=len(sessions),
            revenue=value.interval(confidence),
            difference=value.minus(Value.mean(sessions.earned)).interval(confidence),
            clicks=float(fit.clicks),
            positions=sessions.depth,
        )


class DoublyRobust(WeightedEstimator):
    """The doubly robust estimator: the direct method, corrected by weighted residuals.

        V̂ = (1/n) Σ_i { V̂_1 + Σ_h W_h [ r_h + 1{goes on} V̂_{h+1} − Q̂_h(a_h) ] }

    *Unbiased for any model:* E[W_h Q̂_h(a_h)] over a_h is W_{h−1} V̂_h, because V̂_h = E_target[Q̂_h], and the bracket of
    h−1 added that. All model terms cancel, and Σ_h E[W_h r_h] is left. A better model has smaller brackets. The sum
    ends before positions without support. The model alone counts there, and its error widens the interval.

    References
    ----------
    Jiang and Li (2016). Doubly robust off-policy value evaluation for reinforcement learning. ICML.
    Kiyohara et al. (2022). Doubly robust off-policy evaluation for ranking policies under the cascade behavior model.
    WSDM.
    """

    name = "dr"
    needs_model = True

    def value(self, found: Support, sessions: Sessions, fit: CrossFit | None) -> Value:
        """Return the mean of the corrected values; the correction ends where support ends."""
        fit, depth = _required(fit), found.sessions.depth
        action, state = np.zeros(found.weights.shape), np.zeros(found.weights.shape)
        for rows, model in fit.each():
            if len(rows):
                action[rows], state[rows] = baseline(model, sessions.part(rows))
        onward = np.concatenate([state[:, 1:], np.zeros((len(sessions), 1))], axis=1)
        surprise = sessions.rewards + sessions.passed * onward - action
        corrected = sessions.reached & (sessions.positions <= depth)
        values = state[:, 0] + (np.where(corrected, found.weights, 0.0) * surprise).sum(axis=1)
        return Value.mean(values, model_error(fit, sessions, after=depth) if depth < sessions.depth else None)


#: The estimators by name, in the order of reports.
METHODS: Final[Mapping[str, OffPolicyEstimator]] = {
    estimator.name: estimator
    for estimator in (MatchingReplay(), InversePropensity(), SelfNormalised(), DirectMethod(), DoublyRobust())
}


def _required(fit: CrossFit | None) -> CrossFit:
    if fit is None:
        raise Unsupported("there is no click model")
    return fit


def _check_seen(sessions: Sessions) -> None:
    """Refuse arms that no session has seen: the model has nothing but its prior for them.

    In an imported log, an arm may have been at one position only, and nothing tells arm and position apart: there no
    session has seen an arm unless at the position where the target shows it.
    """
    wanted = sessions.target_slates[:, :, : sessions.depth]
    known = np.zeros((sessions.horizon, sessions.prices.shape[1]), dtype=bool)
    rows, positions = np.nonzero(sessions.shown)
    known[positions, sessions.slates[rows, positions]] = True
    where = " at that position" if sessions.imported.any() else ""
    known |= known.any(axis=0) & (not where)
    unknown = ~known[np.arange(sessions.depth), wanted] & (wanted != NO_ARM)
    if unknown.mean() > MOST_UNSEEN:
        raise Unsupported(
            f"{unknown.mean():.0%} of the target's displays are arms that no session of the log has seen{where}"
        )
