"""Whether versions come in time: a learner that starves is as bad as none, and says nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from worker.metrics.troubles import TroubleLog
from worker.stream.parameters import Parameters

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
