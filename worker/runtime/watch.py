"""Troubles that no event reports: a watermark that stands still, late versions, other settings, another catalogue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Final

from worker.metrics.troubles import TroubleLog
from worker.stream.catalogue import catalogue_difference, describe_changes
from worker.stream.parameters import Parameters
from worker.stream.settings import KEPT_BY_MODEL, Arm, LearningSettings

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


#: Milliseconds after `effective_at` at which a version is late.
MARGIN: Final = 1_000
#: Versions late in a row that are trouble. One alone is the mark of a rebalance or a restart.
IN_A_ROW: Final = 2


class VersionWatch:
    """Compares the arrival of versions with the time from which they serve, and reports `late-versions`.

    Parameters
    ----------
    clock : milliseconds since the epoch, not those of a clock that is ahead of the broker's
    opened : returns the number of sessions that this worker has opened
    """

    def __init__(self, troubles: TroubleLog, *, clock: Callable[[], int], opened: Callable[[], int]) -> None:
        self._troubles = troubles
        self._clock = clock
        self._began = clock()
        self._opened = opened
        self._before = opened()
        self._newest: Parameters | None = None
        self._late = 0  # versions in a row
        self._since: int | None = None  # when a session was opened for the first time after the newest version came

    def received(self, parameters: Parameters) -> None:
        """Note a new version, now that it can serve."""
        self._newest, self._since, self._before = parameters, None, self._opened()
        late = self._clock() - parameters.effective_at
        # A worker that starts reads old versions. When they came is unknown.
        if parameters.effective_at < self._began or late <= MARGIN:
            self._late = 0
            self._troubles.clear("late-versions")
            return
        self._late += 1
        if self._late >= IN_A_ROW or late > parameters.settings.window:
            self._troubles.set(
                "late-versions", f"version {parameters.version} came {late / 1000:.1f} s after its effective_at"
            )

    def check(self) -> None:
        """Report a version that is overdue: sessions are opened, but none comes. Call every few seconds."""
        newest, now = self._newest, self._clock()
        if newest is None or newest.frozen:
            return
        if self._since is None and self._opened() > self._before:
            self._since = now
        # The window of the first session closes within a window; allow one more.
        settings = newest.settings
        usual = settings.window + settings.session_timeout + 2 * settings.lateness
        if self._since is not None and (waited := now - self._since) > usual + settings.window:
            self._troubles.set(
                "late-versions",
                f"sessions are opened, but no version came after {newest.version} for {waited / 1000:.0f} s "
                f"(usual: {usual / 1000:.0f} s)",
            )


#: Changes that a report lists.
LISTED = 5


class CatalogueCheck:
    """Reports a catalogue file that differs at the start, until a version has its arms (`adcascade arms sync`).

    A version that changes the arms later is no trouble: somebody gave that order.
    """

    def __init__(self, wanted: Sequence[Arm], troubles: TroubleLog) -> None:
        self._wanted = tuple(wanted)
        self._troubles = troubles
        self._compared: tuple[Arm, ...] | None = None
        self._differs = False

    def start(self, newest: Parameters | None) -> None:
        """Compare the file with the newest published version, if there are both."""
        if newest is not None and self._wanted:
            self._compare(newest)

    def again(self, published: Sequence[Parameters]) -> None:
        """Compare with the first version, if there was none at the start; then again while the file differs.

        `published` are versions, oldest first.
        """
        if not published:
            return
        if self._compared is None:
            self.start(published[0])
        if self._differs and published[-1].arms != self._compared:
            self._compare(published[-1])

    def _compare(self, newest: Parameters) -> None:
        self._compared = newest.arms
        lines = self.difference(newest)
        self._differs = bool(lines)
        if lines:
            self._troubles.set("catalogue-differs", lines)
        else:
            self._troubles.clear("catalogue-differs")

    def difference(self, newest: Parameters) -> str:
        """Return the difference in one line; an empty one if there is none."""
        changes = catalogue_difference(newest.arms, self._wanted)
        if not changes:
            return ""
        rows = describe_changes(newest.arms, changes)
        counted = Counter(sign for sign, _, _ in rows)
        listed = ", ".join(f"{sign} {arm} {reward}" for sign, arm, reward in rows[:LISTED])
        more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
        return (
            f"against version {newest.version}, the file has {counted['+']} added, {counted['−']} retired and "
            f"{counted['~']} changed: {listed}{more}"
        )
