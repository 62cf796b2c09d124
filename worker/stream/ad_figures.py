"""The figures of each ad, from the accounts of a version, and why an ad does badly, in words.

An ad does badly if users hardly ever answer it (`episodes.py`), or if a display of it earns less than a quarter of what
a display usually earns: the median over the active ads with enough displays. It is hardly clicked if its clicks are
further below the median than its price is; else its price is the reason. It is judged from as many displays as would
usually bring in the revenue of ten of its clicks. An ad that pays much and is rarely clicked does well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.stream.accounts import ROWS
from worker.stream.episodes import COLLAPSED, LEAST_DISPLAYS, answering
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm

#: Clicks that the usual revenue of the displays of an ad must stand for before it is judged.
LEAST_CLICKS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an ad over some sessions; a share of nothing is None."""

    displays: float
    clicks: float
    revenue: float
    click_rate: float | None
    revenue_per_thousand: float | None  # sessions
    answer_rate: float | None  # share of the displays with a click or a pass
    explored_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdFigures:
    """An ad, its figures since the start and on the current day, and a note on how it does."""

    arm: Arm
    total: Figures
    today: Figures
    note: str | None
    is_bad: bool

    def document(self) -> dict[str, Any]:
        """Return it for machines."""
        arm = {"arm": self.arm.arm, "reward": self.arm.reward, "active": self.arm.active}
        features = {"features": dict(self.arm.features)} if self.arm.features else {}
        figures = {"total": asdict(self.total), "today": asdict(self.today)}
        return {**arm, **features, **figures, "note": self.note, "does_badly": self.is_bad}


class AdTable:
    """The figures of all ads of a version; `order` has the indices of the ads by falling revenue.

    >>> from dataclasses import replace
    >>> from worker.stream.accounts import Accounts, Sums
    >>> from worker.stream.settings import LearningSettings
    >>> first = Parameters.first(LearningSettings(dim=1), tuple(Arm(arm=name, reward=2) for name in "abcd"))
    >>> sums = np.array([[900, 800, 500, 9], [90, 80, 2, 0], [180, 160, 4, 0], [900, 700, 500, 0], [0, 0, 0, 9]])
    >>> table = AdTable(replace(first, accounts=Accounts(total=Sums(sessions=1000, ads=sums))))
    >>> [(ad.arm.arm, ad.total.revenue_per_thousand, ad.note) for ad in table.ads()]
    [('a', 180.0, None), ('b', 160.0, None), ('c', 4.0, 'hardly clicked'), ('d', 0.0, 'new: 9 displays')]
    """

    def __init__(self, parameters: Parameters) -> None:
        self._accounts, self._arms = parameters.accounts, parameters.arms
        self._total, self._today = (of.of(len(self._arms)) for of in (self._accounts.total, self._accounts.today))
        self._reasons = _reasons(parameters, self._total)
        self._active = np.array([arm.active for arm in self._arms], dtype=bool)
        self.order = np.argsort(-self._total[ROWS.index("revenue")], kind="stable")

    def ads(self, indices: Ints | None = None) -> list[AdFigures]:
        """Return the figures of ads, by default of all by falling revenue."""
        return [self._ad(index) for index in (self.order if indices is None else indices).tolist()]

    def best_and_worst(self, most: int) -> tuple[list[AdFigures], list[AdFigures]]:
        """Return active ads: `most` with the highest revenue, and as many of the others.

        Of those, the ones that do badly come first, by displays: they cost most. Then come those that earn least per
        display, and last those with few displays.
        """
        order = self.order[self._active[self.order]]
        best, others = order[:most], order[most:]
        displays, revenue = self._total[0, others], self._total[ROWS.index("revenue"), others]
        bad, few = np.isin(others, list(self._reasons)), displays < LEAST_DISPLAYS
        within = np.where(bad | few, -displays, revenue / np.maximum(1.0, displays))
        worst = others[np.lexsort((within, ~bad & few, ~bad))][:most]
        return self.ads(best), self.ads(worst)

    def _ad(self, index: int) -> AdFigures:
        arm, displays = self._arms[index], float(self._total[0, index])
        few = f"new: {displays:,.0f} displays" if arm.active and displays < LEAST_DISPLAYS else None
        return AdFigures(
            arm=arm,
            total=_figures(self._total[:, index], self._accounts.total.sessions),
            today=_figures(self._today[:, index], self._accounts.today.sessions),
            note=self._reasons.get(index, few),
            is_bad=index in self._reasons,
        )


def period(parameters: Parameters) -> dict[str, Any]:
    """Return the time that the figures are of, in milliseconds, the day, UTC, and the numbers of sessions."""
    accounts = parameters.accounts
    counted = accounts.total.sessions > 0
    return {
        "version": parameters.version,
        "since": accounts.since if counted else None,
        "until": parameters.window_end if counted else None,
        "sessions": accounts.total.sessions,
        "day": str(np.datetime64(accounts.day, "D")) if counted else None,  # of any year, unlike datetime
        "sessions_today": accounts.today.sessions,
    }


def document(parameters: Parameters) -> dict[str, Any]:
    """Return the figures of all ads for machines."""
    return {**period(parameters), "arms": [ad.document() for ad in AdTable(parameters).ads()]}


def _figures(sums: Floats, sessions: int) -> Figures:
    displays, clicks, revenue, answered, explored = sums.tolist()
    return Figures(
        displays=displays,
        clicks=clicks,
        revenue=revenue,
        click_rate=clicks / displays if displays else None,
        revenue_per_thousand=1000 * revenue / sessions if sessions else None,
        answer_rate=answered / displays if displays else None,
        explored_share=explored / displays if displays else None,
    )


def _reasons(parameters: Parameters, sums: Floats) -> dict[int, str]:
    """Return why active ads do badly, by index."""
    displays, clicks, revenue, *_ = sums
    active = np.array([arm.active for arm in parameters.arms], dtype=bool)
    judged = np.flatnonzero(active & (displays >= LEAST_DISPLAYS))
    reasons = {}
    with np.errstate(all="ignore"):
        earned, rate = revenue[judged] / displays[judged], clicks[judged] / displays[judged]
        rewards = parameters.rewards[judged]
        usual, often, price = (median(one.tolist()) if len(judged) else 0.0 for one in (earned, rate, rewards))
        known = usual * displays[judged] >= LEAST_CLICKS * rewards
        few = rate * price < often * rewards  # clicks are further below the usual than the price is
    for place in np.flatnonzero(known & (earned < COLLAPSED * usual)).tolist():
        reasons[int(judged[place])] = "hardly clicked" if few[place] else "low revenue per display"
    answered = answering(parameters)
    return reasons | dict.fromkeys(answered.indices if answered else (), "hardly ever answered")
