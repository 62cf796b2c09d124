"""Settings and catalogues of a process that differ from those of the published versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from worker.metrics.troubles import TroubleLog
from worker.stream.catalogue import catalogue_difference, describe_changes
from worker.stream.feature_changes import differing
from worker.stream.features import listed
from worker.stream.parameters import Parameters
from worker.stream.settings import KEPT_BY_MODEL, Arm, LearningSettings

#: Changes that a report lists.
LISTED = 5


def different(one: LearningSettings, other: LearningSettings) -> list[str]:
    """Return the names of the settings that differ, without those that a model keeps for life.

    >>> different(LearningSettings(dim=2, beta=1.0), LearningSettings(dim=2, beta=2.0))
    ['beta']
    """
    names = [f.name for f in fields(one) if f.name not in KEPT_BY_MODEL]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def ignored_features(settings: LearningSettings, newest: Parameters) -> str | None:
    """Return a line for people if features are declared otherwise than a version has them, which holds; else None."""
    found = differing(settings.features, newest.settings.features)
    if not found:
        return None
    return (
        f"the declared features differ from those of version {newest.version}, which hold: {found} "
        "(`adcascade features apply` changes them)"
    )


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
        difference = self.difference(newest)
        self._differs = bool(difference)
        self._troubles.set("catalogue-differs", difference)

    def difference(self, newest: Parameters) -> str:
        """Return the difference in one line; an empty one if there is none."""
        changes = catalogue_difference(newest.arms, self._wanted)
        if not changes:
            return ""
        rows = describe_changes(newest.arms, changes)
        counted = Counter(sign for sign, _, _ in rows)
        named = listed((f"{sign} {arm} {reward}" for sign, arm, reward in rows), LISTED)
        return (
            f"against version {newest.version}, the file has {counted['+']} added, {counted['−']} retired and "
            f"{counted['~']} changed: {named}"
        )
