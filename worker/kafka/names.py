"""The names of the topics."""

from __future__ import annotations

from dataclasses import dataclass

from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True)
class TopicNames(Topics):
    """Topic names under a prefix, with the one that only Kafka needs.

    >>> TopicNames("ads").changelog
    'ads.sessions-changelog'
    """

    @property
    def changelog(self) -> str:
        """The session table; compacted, partitioned as the arrivals."""
        return f"{self.prefix}.sessions-changelog"

    @property
    def inputs(self) -> frozenset[str]:
        """The topics that are read in lists by partition."""
        return frozenset((self.arrivals, self.clicks))
