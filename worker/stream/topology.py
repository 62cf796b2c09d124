"""Topics, records and outputs: the values that every runner moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from worker.errors import InputError
from worker.stream.events import TOPICS
from worker.stream.troubles import Troubles

if TYPE_CHECKING:
    from worker.stream.table import SessionTable


class Record(NamedTuple):
    """A record as a broker delivers it; `timestamp` in milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None

    @property
    def where(self) -> str:
        """Where the record stands, for people."""
        return f"{self.topic}, partition {self.partition}, offset {self.offset}"


#: The partition of the topics that have one: journal, parameters and their history, episodes, dead letters.
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
    parameters_history: str = field(init=False)
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


#: The most bytes of a written record with all that Kafka adds: the default of brokers. All output topics take it.
MOST_BYTES: Final = 1 << 20
#: Of these, kept for what is not the value: headers and the key of a dead letter, lengths, the head of the batch.
RESERVED_BYTES: Final = 4 << 10
#: The bytes that a dead letter carries of a value that does not fit.
CUT_BYTES: Final = 32 << 10
_CUT_KEY = _CUT_ERROR = 1024


def dead_letter(record: Record, reason: str, error: str) -> DeadLetter:
    """Return the dead letter of a record, with its first bytes if a topic would not take all of them.

    >>> letter = dead_letter(Record("ads.clicks", 0, 7, 0, b"s", bytes(2_000_000)), "too-large", "2000000 bytes")
    >>> len(letter.value), [value for name, value in letter.headers if name in ("adcascade.cut", "adcascade.length")]
    (32768, [b'value', b'2000000'])
    """
    key, value = record.key, record.value
    headers = [
        ("adcascade.reason", reason.encode()),
        ("adcascade.topic", record.topic.encode()),
        ("adcascade.partition", b"%d" % record.partition),
        ("adcascade.offset", b"%d" % record.offset),
        ("adcascade.error", error.encode(errors="replace")[:_CUT_ERROR]),
    ]
    long_key = key is not None and len(key) > _CUT_KEY
    long_value = value is not None and len(value) > MOST_BYTES - RESERVED_BYTES
    if long_key or long_value:
        headers.append(("adcascade.cut", b"key,value" if long_key and long_value else b"key" if long_key else b"value"))
    if key is not None and long_key:
        headers += [("adcascade.key-length", b"%d" % len(key)), ("adcascade.key-sha256", _sha256(key))]
        key = key[:_CUT_KEY]
    if value is not None and long_value:
        headers += [("adcascade.length", b"%d" % len(value)), ("adcascade.sha256", _sha256(value))]
        value = value[:CUT_BYTES]
    return DeadLetter(key, value, headers)


def _sha256(data: bytes) -> bytes:
    return sha256(data).hexdigest().encode()


#: Values that are counted of each feature, and the characters that are kept of each.
MOST_VALUES: Final = 64
LONGEST_VALUE: Final = 40
#: Values that are named of each feature, and the count from which on.
MOST_NAMED: Final = 5
OFTEN: Final = 20


@dataclass(slots=True)
class Unlisted:
    """Values that no category lists: exact counts by feature, and by value lower bounds for the frequent ones.

    Where there are too many, all lose the count of the first that has no room (Misra and Gries, 1982). So a value whose
    share is above 1/65 stays, for any number of others.

    Clients decide what the values are, so their number and length are bounded. A value may say something about a
    person, so only those that came often are named, and only on the status page (docs/security.md).
    """

    features: Counter[str] = field(default_factory=Counter)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, found: Sequence[tuple[str, str]]) -> None:
        """Count the values of a batch, given with their features."""
        batch = Unlisted(Counter(feature for feature, _ in found))
        for feature, value in found:
            batch.values.setdefault(feature, Counter())[value[:LONGEST_VALUE]] += 1
        self.update(batch)

    def update(self, other: Unlisted) -> None:
        """Add the counts of another."""
        self.features.update(other.features)
        for feature, values in other.values.items():
            counts = self.values[feature] = self.values.get(feature, Counter()) + values
            if len(counts) > MOST_VALUES:
                excess = sorted(counts.values(), reverse=True)[MOST_VALUES]
                self.values[feature] = counts - Counter(dict.fromkeys(counts, excess))

    def frequent(self, feature: str) -> list[tuple[str, int]]:
        """Return the values of a feature that came often, the most frequent first."""
        return [one for one in self.values[feature].most_common(MOST_NAMED) if one[1] >= OFTEN]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(slots=True)
class Tally:
    """Counts of a batch, for the metrics.

    Sums of tallies satisfy the accounting of docs/design.md §7, at every moment:

    - arrivals = opened + repeated + unremembered + dead_arrivals
    - opened + recovered = ended + open + handed_over
    - feedback + recovered_parked
      = applied + redundant + late + outside + unknown + unparked + parked now + handed_over_parked + dead_feedback

    `unremembered` and `unparked` are arrivals and feedback for which there was no room. `unknown` is feedback
    for a session that a server has never opened.
    """

    arrivals: int = 0
    opened: int = 0
    repeated: int = 0
    unremembered: int = 0
    dead_arrivals: int = 0
    recovered: int = 0
    handed_over: int = 0
    feedback: int = 0
    applied: int = 0
    redundant: int = 0
    late: int = 0
    outside: int = 0
    unknown: int = 0
    unparked: int = 0
    dead_feedback: int = 0
    recovered_parked: int = 0
    handed_over_parked: int = 0
    reward: float = 0.0
    expected_reward: float = 0.0
    dead: Counter[str] = field(default_factory=Counter)  # reason
    ended: Counter[str] = field(default_factory=Counter)  # how
    decisions: Counter[str] = field(default_factory=Counter)  # mode
    clicks: Counter[int] = field(default_factory=Counter)  # position
    unlisted: Unlisted = field(default_factory=Unlisted)
    troubles: Troubles = field(default_factory=Troubles)

    @property
    def open_sessions(self) -> int:
        """The sessions that the table holds by the balances."""
        return self.opened + self.recovered - self.ended.total() - self.handed_over

    @property
    def parked_records(self) -> int:
        """The feedback records that wait for their arrival by the balances."""
        settled = self.applied + self.redundant + self.late + self.outside + self.unknown + self.unparked
        return self.feedback + self.recovered_parked - settled - self.dead_feedback - self.handed_over_parked

    def imbalances(self, tables: Iterable[SessionTable]) -> dict[str, int]:
        """Return the left minus the right side of each balance, given the tables of all partitions."""
        held = [(table.open_sessions, table.parked) for table in tables]
        return {
            "arrivals": self.arrivals - self.opened - self.repeated - self.unremembered - self.dead_arrivals,
            "sessions": self.open_sessions - sum(sessions for sessions, _ in held),
            "feedback": self.parked_records - sum(parked for _, parked in held),
        }

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name in _FIELDS:
            theirs = getattr(other, name)
            if not theirs:  # most of it, in most batches
                continue
            mine = getattr(self, name)
            if isinstance(mine, Counter | Troubles | Unlisted):
                mine.update(theirs)
            else:
                setattr(self, name, mine + theirs)


_FIELDS = tuple(f.name for f in fields(Tally))


@dataclass(slots=True)
class Emits:
    """What a batch of records calls for. All of it is written together; then the offsets are committed.

    `sample` is the packed context of one of the new sessions, for statistics. Batches that were handled together have
    one `tally`.
    """

    journal: list[tuple[bytes | None, bytes]] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    changelog: list[tuple[bytes, bytes | None]] = field(default_factory=list)  # None deletes
    decisions: list[tuple[bytes, bytes]] = field(default_factory=list)
    sample: bytes | None = field(default=None, compare=False)
    tally: Tally = field(default_factory=Tally)
