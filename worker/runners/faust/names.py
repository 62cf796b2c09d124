"""The names of the topics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Topic names under a prefix.

    >>> TopicNames("ads").dead_letters
    'ads.dead-letters'
    """

    prefix: str = "ads"

    def _under(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    @property
    def arrivals(self) -> str:
        """Sessions that begin."""
        return self._under("arrivals")

    @property
    def clicks(self) -> str:
        """Feedback."""
        return self._under("clicks")

    @property
    def decisions(self) -> str:
        """What to show."""
        return self._under("decisions")

    @property
    def journal(self) -> str:
        """All facts in one order."""
        return self._under("journal")

    @property
    def parameters(self) -> str:
        """Versions of the model."""
        return self._under("parameters")

    @property
    def episodes(self) -> str:
        """Closed windows."""
        return self._under("episodes")

    @property
    def dead_letters(self) -> str:
        """Records that could not be used."""
        return self._under("dead-letters")

    @property
    def changelog(self) -> str:
        """The session table; compacted, partitioned as the arrivals."""
        return self._under("sessions-changelog")

    @property
    def inputs(self) -> frozenset[str]:
        """The topics that are read in lists by partition."""
        return frozenset((self.arrivals, self.clicks))
