"""Which partitioners the producers use, by samples of their records, and whether sessions are split.

The arrival and the feedback of a session meet only if both producers place its key in the same partition. Any
partitioner will do if it is that of both topics. So what counts is not which one it is, but whether feedback lies
where the arrivals' partitioner places its session. This is checked for all feedback that waits for its arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import unpack_from
from typing import Final, NamedTuple
from zlib import crc32

from worker.stream.events import Arrival, Feedback
from worker.stream.topology import Record, Topics
from worker.stream.troubles import Troubles

#: Samples of a topic that are kept, those from which its partitioner is judged, and the share that must agree.
KEPT_SAMPLES: Final = 64
LEAST_SAMPLES: Final = 12
AT_FIRST: Final = 16  # samples of a batch until there are enough
_AGREEING: Final = 0.95

_MASK: Final = 0xFFFFFFFF


def murmur2_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key by murmur2, the default of the Java client.

    >>> murmur2_partition(b"s-1", 8)
    7
    """
    length = len(key)
    whole = length & ~3
    mixed = 0x9747B28C ^ length
    for word in unpack_from(f"<{whole // 4}I", key):
        word = word * 0x5BD1E995 & _MASK
        mixed = (mixed * 0x5BD1E995 & _MASK) ^ ((word ^ word >> 24) * 0x5BD1E995 & _MASK)
    if whole < length:
        mixed = (mixed ^ int.from_bytes(key[whole:], "little")) * 0x5BD1E995 & _MASK
    mixed = (mixed ^ mixed >> 13) * 0x5BD1E995 & _MASK
    return ((mixed ^ mixed >> 15) & 0x7FFFFFFF) % partitions


def crc32_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key by CRC-32, the default of librdkafka.

    >>> crc32_partition(b"s-1", 8)
    6
    """
    return crc32(key) % partitions


def fnv1a_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key by FNV-1a as a signed number, the default of Sarama.

    >>> fnv1a_partition(b"s-1", 8)
    4
    """
    mixed = 0x811C9DC5
    for byte in key:
        mixed = (mixed ^ byte) * 0x01000193 & _MASK
    return min(mixed, _MASK + 1 - mixed) % partitions


class Partitioner(NamedTuple):
    """A partitioner: its function, whose default it is, and its name as `partitioner` of librdkafka."""

    place: Callable[[bytes, int], int]
    default_of: str
    setting: str


PARTITIONERS: Final = {
    "murmur2": Partitioner(murmur2_partition, "the Java client", "murmur2_random"),
    "crc32": Partitioner(crc32_partition, "librdkafka", "consistent_random"),
    "fnv1a": Partitioner(fnv1a_partition, "Sarama", "fnv1a_random"),
}


class PartitionSurvey:
    """The keys and partitions of arrivals and clicks, over all partitions of a worker; finds sessions that are split.

    >>> topics = Topics()
    >>> survey = PartitionSurvey(topics, partitions=8)
    >>> for session in map(str, range(20)):
    ...     for topic, place in ((topics.arrivals, murmur2_partition), (topics.clicks, crc32_partition)):
    ...         key = session.encode()
    ...         survey.sample(Record(topic, place(key, 8), 0, 0, key, b""), session, Troubles())
    >>> survey.partitioners(topics.arrivals), survey.partitioners(topics.clicks)
    (('murmur2',), ('crc32',))
    """

    def __init__(self, topics: Topics, partitions: int) -> None:
        self._arrivals, self._clicks = topics.arrivals, topics.clicks
        self._partitions = partitions
        # Of each sample, the partitioners that agree with it.
        self._samples: dict[str, deque[frozenset[str]]] = {
            topic: deque(maxlen=KEPT_SAMPLES) for topic in (topics.arrivals, topics.clicks)
        }

    def look(self, records: Sequence[Record], events: Sequence[Arrival | Feedback | None], troubles: Troubles) -> None:
        """Take samples of each topic in a batch: several until there are enough, then one."""
        wanted = {topic: 1 if len(known) == KEPT_SAMPLES else AT_FIRST for topic, known in self._samples.items()}
        for record, event in zip(records, events, strict=True):
            if event is not None and wanted[record.topic]:
                self.sample(record, event.session_id, troubles)
                wanted[record.topic] -= 1

    def sample(self, record: Record, session_id: str, troubles: Troubles) -> None:
        """Take a record as a sample of its topic, and check its key."""
        self._check_key(record, session_id, troubles)
        if record.key:
            agreeing = [name for name in PARTITIONERS if self._place(name, record.key) == record.partition]
            self._samples[record.topic].append(frozenset(agreeing))

    def check_parked(self, record: Record, session_id: str, troubles: Troubles) -> None:
        """Check whether feedback that waits for its arrival can meet it in this partition."""
        if self._check_key(record, session_id, troubles) and self._is_misplaced(session_id, record.partition):
            troubles.add("split-sessions", self._difference())

    def check_late(self, session_id: str, partition: int, troubles: Troubles) -> None:
        """Check the place of a session whose feedback has waited in vain."""
        arrivals, clicks = self.partitioners(self._arrivals), self.partitioners(self._clicks)
        both_judged = arrivals is not None and clicks is not None
        one_unlisted = both_judged and bool(arrivals) != bool(clicks)
        if one_unlisted or self._is_misplaced(session_id, partition):
            troubles.add("split-sessions", self._difference())

    def partitioners(self, topic: str) -> tuple[str, ...] | None:
        """Return the partitioners that a topic may have; empty if it has another; None with too few samples."""
        samples = self._samples[topic]
        if len(samples) < LEAST_SAMPLES:
            return None
        return tuple(
            name for name in PARTITIONERS if sum(name in agreeing for agreeing in samples) >= _AGREEING * len(samples)
        )

    def _place(self, partitioner: str, key: bytes) -> int:
        return PARTITIONERS[partitioner].place(key, self._partitions)

    def _is_misplaced(self, session_id: str, partition: int) -> bool:
        """Return whether no partitioner that the arrivals may have places a session in a partition."""
        possible = self.partitioners(self._arrivals)
        return bool(possible) and all(self._place(name, session_id.encode()) != partition for name in possible or ())

    def _check_key(self, record: Record, session_id: str, troubles: Troubles) -> bool:
        if record.key == session_id.encode():
            return True
        wrong = "the key is not the session_id" if record.key else "no key"
        troubles.add("wrong-key", f"{record.where}: {wrong}")
        return False

    def _difference(self) -> str:
        """Return how the topics differ, and whose producer has to change."""
        arrivals, clicks = self.partitioners(self._arrivals), self.partitioners(self._clicks)
        changing, wanted = self._clicks, (arrivals or ("murmur2",))[0]
        if clicks and "murmur2" in clicks and not (arrivals and "murmur2" in arrivals):
            changing, wanted = self._arrivals, "murmur2"
        return (
            f"{self._arrivals} is partitioned by {_named(arrivals)}, {self._clicks} by {_named(clicks)}. "
            f"Set partitioner={PARTITIONERS[wanted].setting} ({wanted}) in the producer of {changing}"
        )


def _named(partitioners: tuple[str, ...] | None) -> str:
    if not partitioners:
        return "one that is not known yet" if partitioners is None else f"none of {', '.join(PARTITIONERS)}"
    return " or ".join(f"{name} (the default of {PARTITIONERS[name].default_of})" for name in partitioners)
