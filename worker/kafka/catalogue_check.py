"""The catalogue file of a worker against the published catalogue: the file serves for version 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from worker.metrics.troubles import TroubleLog
from worker.stream.catalogue import catalogue_difference, describe_changes
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm

#: Changes that a report lists.
LISTED = 5


class CatalogueCheck:
    """Reports a file that differs at the start, until a version has its arms (`adcascade arms sync`).

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
