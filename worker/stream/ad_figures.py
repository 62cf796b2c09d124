"""The figures of each ad, from the accounts of a version, and why an ad does badly, in words.

An ad does badly if users hardly ever answer it (`unanswered`), or if a display of it earns less than a quarter of what
a display usually earns: the median over the active ads with enough displays. It is hardly clicked if its clicks are
further below the median than its price is; else its price is the reason. It is judged from as many displays as would
usually bring in the revenue of ten of its clicks. An ad that pays much and is rarely clicked does well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.stream.accounts import ROWS
from worker.stream.parameters import Parameters
from worker.stream.version_records import arm_document

#: Displays without a click from which an ad is judged, and usual passes for that number. A rate starts at the rate
#: of all ads, with the weight of 20 displays, so none can fall below `COLLAPSED` before about 60 displays.
LEAST_DISPLAYS: Final = 50
LEAST_PASSES: Final = 10.0
#: Share of the median below which an ad has collapsed.
COLLAPSED: Final = 0.25
#: Clicks that the usual revenue of the displays of an ad must stand for before it is judged.
LEAST_CLICKS: Final = 10.0


def all_figures(parameters: Parameters) -> dict[str, Any]:
    """Return the figures of all ads, those with the highest revenue first, for machines.

    >>> from dataclasses import replace
    >>> from worker.stream.accounts import Accounts, Sums
    >>> from worker.stream.settings import Arm, LearningSettings
    >>> first = Parameters.first(LearningSettings(dim=1), tuple(Arm(arm=name, reward=2) for name in "abcd"))
    >>> sums = np.array([[900, 800, 500, 9], [90, 80, 2, 0], [180, 160, 4, 0], [900, 700, 500, 0], [0, 0, 0, 9]])
    >>> version = replace(first, accounts=Accounts(total=Sums(sessions=1000, ads=sums)))
    >>> [(ad["arm"], ad["total"]["revenue_per_thousand"], ad["note"]) for ad in all_figures(version)["arms"]]
    [('a', 180.0, None), ('b', 160.0, None), ('c', 4.0, 'hardly clicked'), ('d', 0.0, 'new: 9 displays')]
    """
    table = _Table(parameters)
    return {**table.period, "arms": table.ads(table.order)}


def best_and_worst(parameters: Parameters, most: int) -> dict[str, Any]:
    """Return the figures of active ads: `most` with the highest revenue, and as many of the others.

    Of those, the ones that do badly come first, by displays: they cost most. Then come those that earn least per
    display, and last those with few displays. `top` is the number of the former, `hidden` of those left out.
    """
    table = _Table(parameters)
    active = table.order[[parameters.arms[index].active for index in table.order.tolist()]]
    best, others = active[:most], active[most:]
    displays, revenue = table.total[0, others], table.total[ROWS.index("revenue"), others]
    bad, few = np.isin(others, list(table.reasons)), displays < LEAST_DISPLAYS
    within = np.where(bad | few, -displays, revenue / np.maximum(1.0, displays))
    worst = others[np.lexsort((within, ~bad & few, ~bad))][:most]
    shown = np.concatenate([best, worst])
    return {**table.period, "ads": table.ads(shown), "top": len(best), "hidden": len(active) - len(shown)}


class _Table:
    """The sums of the ads of a version, (5, K), why ads do badly, and the order of their revenue."""

    def __init__(self, parameters: Parameters) -> None:
        self._arms, self._accounts = parameters.arms, parameters.accounts
        self.total, self._today = (sums.of(len(self._arms)) for sums in (self._accounts.total, self._accounts.today))
        self.reasons = reasons(parameters, self.total)
        self.order: Ints = np.argsort(-self.total[ROWS.index("revenue")], kind="stable")
        counted = self._accounts.total.sessions > 0
        #: The time that the figures are of, in milliseconds, and the day, UTC.
        self.period = {
            "version": parameters.version,
            "since": self._accounts.since if counted else None,
            "until": parameters.window_end if counted else None,
            "sessions": self._accounts.total.sessions,
            "day": str(np.datetime64(self._accounts.day, "D")) if counted else None,  # of any year, unlike datetime
            "sessions_today": self._accounts.today.sessions,
        }

    def ads(self, indices: Ints) -> list[dict[str, Any]]:
        """Return ads with their figures."""
        return [self._ad(index) for index in indices.tolist()]

    def _ad(self, index: int) -> dict[str, Any]:
        arm, displays = self._arms[index], float(self.total[0, index])
        few = f"new: {displays:,.0f} displays" if arm.active and displays < LEAST_DISPLAYS else None
        return {
            **arm_document(arm),
            "total": figures(self.total[:, index].tolist(), self._accounts.total.sessions),
            "today": figures(self._today[:, index].tolist(), self._accounts.today.sessions),
            "note": self.reasons.get(index, few),
            "does_badly": index in self.reasons,
        }


def figures(sums: Sequence[float], sessions: float) -> dict[str, float | None]:
    """Return the figures of an ad by its sums, those of `ROWS`, over some sessions; a share of nothing is None."""
    displays, clicks, revenue, answered, explored = sums
    return {
        "displays": displays,
        "clicks": clicks,
        "click_rate": clicks / displays if displays else None,
        "revenue": revenue,
        "revenue_per_thousand": 1000 * revenue / sessions if sessions else None,
        "answer_rate": answered / displays if displays else None,
        "explored_share": explored / displays if displays else None,
    }


def reasons(parameters: Parameters, sums: Floats) -> dict[int, str]:
    """Return why active ads do badly by their sums, (5, K), by index."""
    displays, clicks, revenue, *_ = sums
    active = np.array([arm.active for arm in parameters.arms], dtype=bool)
    judged = np.flatnonzero(active & (displays >= LEAST_DISPLAYS))
    with np.errstate(all="ignore"):
        earned, rate = revenue[judged] / displays[judged], clicks[judged] / displays[judged]
        rewards = parameters.rewards[judged]
        usual, often, price = (median(one.tolist()) if len(judged) else 0.0 for one in (earned, rate, rewards))
        known = usual * displays[judged] >= LEAST_CLICKS * rewards
        few = rate * price < often * rewards  # clicks are further below the usual than the price is
    bad = np.flatnonzero(known & (earned < COLLAPSED * usual)).tolist()
    words = {int(judged[one]): "hardly clicked" if few[one] else "low revenue per display" for one in bad}
    return words | {ad.index: "hardly ever answered" for ad in unanswered(parameters)}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredAd:
    """An ad that is hardly ever answered, the share of its displays that are, and its displays without a click."""

    index: int
    arm: str
    rate: float
    displays: int


def unanswered(parameters: Parameters) -> list[UnansweredAd]:
    """Return the active ads that are hardly ever answered, the worst first; none where it is not learned who goes on.

    Hardly anybody goes on after such an ad, and it gets hardly any clicks: the share of its displays with any feedback
    is f_k + (1 − f_k) ρ_k, for the average user. One of the two alone is a matter of taste.

    >>> from dataclasses import replace
    >>> from worker.bandit.additive import AdditiveModel
    >>> from worker.bandit.answers import AnswerCounts
    >>> from worker.stream.settings import Arm, LearningSettings
    >>> settings = LearningSettings(dim=1, horizon=1, model="additive", intercept=False)
    >>> first = Parameters.first(settings, tuple(Arm(arm=name, reward=1) for name in "abcd"))
    >>> counts = AnswerCounts(displayed=np.full((1, 4), 100.0), answered=np.array([[90.0, 0.0, 0.0, 80.0]]))
    >>> known = AdditiveModel.certain(np.zeros(1), np.array([-2.0, -5.0, 0.0, -2.0]))  # c is clicked by half
    >>> [ad.arm for ad in unanswered(replace(first, answers=counts, model=known))]
    ['b']
    """
    counts, rates = parameters.answers, parameters.rates
    active = np.array([arm.active for arm in parameters.arms], dtype=bool)
    if counts is None or rates is None or not active.any():
        return []
    displays, clicked = counts.displayed.sum(axis=0), sigmoid(parameters.model.biases)
    answered = clicked + (1 - clicked) * np.minimum(1.0, rates.arms)
    usual, usually = (median(shares[active].tolist()) for shares in (rates.arms, answered))  # numpy's is slow to load
    judged = active & (displays >= LEAST_DISPLAYS) & (displays * usual >= LEAST_PASSES)
    collapsed = np.flatnonzero(judged & (rates.arms < COLLAPSED * usual) & (answered < COLLAPSED * usually))
    return [
        UnansweredAd(index=k, arm=parameters.arms[k].arm, rate=float(answered[k]), displays=int(displays[k]))
        for k in collapsed[np.argsort(answered[collapsed], kind="stable")].tolist()
    ]
