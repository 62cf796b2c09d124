"""Topics, records and outputs: the values that every runner moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from worker.errors import InputError
from worker.stream.events import TOPICS


class Record(NamedTuple):
    """A record as a broker delivers it; `timestamp` in milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


#: The partition of the topics that have one: journal, parameters, episodes, dead letters.
ONLY_PARTITION = 0


@dataclass(frozen=True, slots=True)
class Topics:
    """Full names of the topics; `changelog` is the session table on Kafka, partitioned as the arrivals.

    >>> Topics("ads").arrivals
    'ads.arrivals'
    """

    prefix: str = "ads"
    arrivals: str = field(init=False)
    clicks: str = field(init=False)
    decisions: str = field(init=False)
    journal: str = field(init=False)
    parameters: str = field(init=False)
    episodes: str = field(init=False)
    dead_letters: str = field(init=False)
    changelog: str = field(init=False)

    def __post_init__(self) -> None:
        allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        if not self.prefix or set(self.prefix) - allowed or len(self.prefix) > 200:
            raise InputError(f"the topic prefix {self.prefix!r} may have letters, digits, '.', '_' and '-' only")
        for topic in TOPICS:
            object.__setattr__(self, topic.replace("-", "_"), f"{self.prefix}.{topic}")
        object.__setattr__(self, "changelog", f"{self.prefix}.sessions-changelog")

    @property
    def inputs(self) -> frozenset[str]:
        """The topics that clients write to."""
        return frozenset((self.arrivals, self.clicks))


class DeadLetter(NamedTuple):
    """A record that could not be used, with the reasons in its headers."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


def dead_letter(record: Record, reason: str, error: str) -> DeadLetter:
    """Return the dead letter of a record."""
    return DeadLetter(
        record.key,
        record.value,
        [
            ("adcascade.reason", reason.encode()),
            ("adcascade.topic", record.topic.encode()),
            ("adcascade.partition", b"%d" % record.partition),
            ("adcascade.offset", b"%d" % record.offset),
            ("adcascade.error", error.encode()),
        ],
    )


@dataclass(slots=True)
class Tally:
    """Counts of a batch, for the metrics.

    Sums of tallies satisfy the accounting of docs/design.md §7, at every moment:

    - arrivals = opened + repeated + dead_arrivals
    - opened + recovered = ended + open + handed_over
    - feedback + recovered_parked
      = applied + redundant + late + outside + parked now + handed_over_parked + dead_feedback
    """

    arrivals: int = 0
    opened: int = 0
    repeated: int = 0
    dead_arrivals: int = 0
    recovered: int = 0
    handed_over: int = 0
    feedback: int = 0
    applied: int = 0
    redundant: int = 0
    late: int = 0
    outside: int = 0
    dead_feedback: int = 0
    recovered_parked: int = 0
    handed_over_parked: int = 0
    reward: float = 0.0
    expected_reward: float = 0.0
    dead: Counter[str] = field(default_factory=Counter)  # reason
    ended: Counter[str] = field(default_factory=Counter)  # how
    decisions: Counter[tuple[str, int]] = field(default_factory=Counter)  # mode, position
    clicks: Counter[int] = field(default_factory=Counter)  # position

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name in _FIELDS:
            theirs = getattr(other, name)
            if not theirs:  # most of it, in most batches
                continue
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, name, mine + theirs)


_FIELDS = tuple(f.name for f in fields(Tally))


@dataclass(slots=True)
class Emits:
    """What a batch of records calls for, in the order of writing.

    First journal, dead letters and changelog; when these are acknowledged, decisions; when those are, the offsets.
    """

    journal: list[tuple[bytes | None, bytes]] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    changelog: list[tuple[bytes, bytes | None]] = field(default_factory=list)  # None deletes
    decisions: list[tuple[bytes, bytes]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
