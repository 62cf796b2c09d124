"""The span and the result of a recording, without a Kafka client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from worker.stream.topology import Topics

#: The order of requests for end offsets: decisions follow from parameters, these from the journal, that from traffic.
MADE_FIRST: Final = (
    "decisions",
    "episodes",
    "dead-letters",
    "parameters-history",
    "parameters",
    "journal",
    "clicks",
    "arrivals",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The span of a recording; times in milliseconds since the epoch.

    It begins at the offset `start` of every partition, at the time `since`, or at the beginning. It ends at the time
    `until`, or at the end of the topics when it begins; a `live` one ends when it is stopped.
    """

    start: int | None = None
    since: int | None = None
    until: int | None = None
    live: bool = False


@dataclass(slots=True, kw_only=True)
class Recorded:
    """The result; `gone` counts records of the parameters that compaction or retention has removed."""

    counts: Counter[str] = field(default_factory=Counter)  # by topic
    gone: int = 0
    first: int | None = None
    last: int | None = None

    @property
    def records(self) -> int:
        """Number of all records."""
        return self.counts.total()


def full_names(topics: Topics, names: Iterable[str]) -> list[str]:
    """Return the full names of topics, in the order of `MADE_FIRST`."""
    wanted = set(names)
    return [f"{topics.prefix}.{name}" for name in MADE_FIRST if name in wanted]
