"""Troubles that no event reports: a watermark that stands still, and settings that differ from those in force."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Final

from worker.metrics.troubles import TroubleLog
from worker.stream.settings import KEPT_BY_MODEL, LearningSettings

#: Seconds without progress that are normal, as in a rebalance. The alert waits a minute more.
PATIENCE: Final = 20.0

_LAST: Final = 253_402_300_799  # the last second of the year 9999


class WatermarkWatch:
    """Reports a watermark that stands still, in the worker that learns: only there it covers all partitions.

    Every partition that is processed reports progress about once a second, with or without users. So the watermark
    stands still only if a partition is not processed, or if the learner does not read the journal.
    """

    def __init__(self, troubles: TroubleLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._troubles = troubles
        self._clock = clock
        self._watermark, self._since = -1, clock()

    def pause(self) -> None:
        """Begin anew: another worker learns, or this one does not serve at present."""
        self._watermark, self._since = -1, self._clock()
        self._troubles.clear("watermark-stalled")

    def look(self, watermark: int, *, slowest: int) -> None:
        """Compare with the last look; `slowest` is the partition that holds the watermark back, -1 if it is unknown."""
        now = self._clock()
        if watermark != self._watermark:
            self._watermark, self._since = watermark, now
            self._troubles.clear("watermark-stalled")
        elif now - self._since > PATIENCE:
            where = f"partition {slowest}" if slowest >= 0 else "the learner"
            at = f"stands at {_time(watermark)}" if watermark else "has not reported"
            self._troubles.set("watermark-stalled", f"{where} {at}, for {now - self._since:.0f} s")


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(min(milliseconds // 1000, _LAST), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class SettingsWatch:
    """Reports settings of this worker that differ from those of the newest version, unless this worker learns.

    The worker that learns makes the next version with its own settings, so there they differ for one window at most.
    """

    def __init__(
        self, own: LearningSettings, troubles: TroubleLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = own
        self._troubles = troubles
        self._clock = clock
        self._since: float | None = None

    def look(self, version: int, published: LearningSettings, *, learns: bool) -> None:
        """Compare with the settings of a published version."""
        changed = [] if learns else different(self._own, published)
        if not changed:
            self._since = None
            self._troubles.clear("settings-differ")
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= PATIENCE:  # not while the learner moves here
            self._troubles.set("settings-differ", f"version {version} has other values of {', '.join(changed)}")


def different(one: LearningSettings, other: LearningSettings) -> list[str]:
    """Return the names of the settings that differ, without those that a model keeps whatever a worker has.

    >>> different(LearningSettings(dim=2, beta=1.0), LearningSettings(dim=2, beta=2.0))
    ['beta']
    """
    names = [f.name for f in fields(one) if f.name not in KEPT_BY_MODEL]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
