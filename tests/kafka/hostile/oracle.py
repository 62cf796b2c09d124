"""The oracle: reads the raw topics with a decoder of its own, and says what should have been learned.

It is naive on purpose. It takes all records of the journal at once, has no windows that open and close, and joins every
session with every feedback record of its id. docs/design.md §4 has the rules.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

TOPICS: Final = ("arrivals", "clicks", "decisions", "journal", "parameters", "episodes", "dead-letters")
#: Values longer than this are not kept, only their hashes.
KEPT_BYTES: Final = 1 << 20
#: Progress further ahead of its own record, in milliseconds, is that of a wrong clock, and is refused.
MOST_AHEAD: Final = 60_000


@dataclass(frozen=True, slots=True)
class Raw:
    """A record as the broker has it."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    digest: bytes | None
    headers: dict[str, bytes]

    @property
    def body(self) -> Any:
        return json.loads(self.value or b"null")


def read_topics(address: str, prefix: str) -> dict[str, list[Raw]]:
    """Return all records of all topics, by name without prefix, in the order of each partition."""
    found: dict[str, list[Raw]] = {name: [] for name in TOPICS}
    consumer = Consumer({"bootstrap.servers": address, "group.id": "oracle", "enable.partition.eof": True})
    known = consumer.list_topics(timeout=120).topics
    left = {(name, p) for name in (f"{prefix}.{one}" for one in TOPICS) for p in known[name].partitions}
    consumer.assign([TopicPartition(*place, 0) for place in left])
    while left:
        for message in consumer.consume(1_000, 1.0):
            if (error := message.error()) is None:
                found[message.topic().removeprefix(f"{prefix}.")].append(_raw(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard((message.topic(), message.partition()))
    consumer.close()
    return found


def _raw(message: Message) -> Raw:
    value = message.value()
    digest = None if value is None else hashlib.sha256(value).digest()
    kept = None if value is None or len(value) > KEPT_BYTES else value
    headers = dict(message.headers() or ())
    return Raw(message.partition(), message.offset(), message.timestamp()[1], message.key(), kept, digest, headers)


# ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────────────

Session = tuple[str, int]  # id and time of arrival
Answer = tuple[int, int, str, bool]  # occurred_at, position, arm, clicked
Display = tuple[int, str, bool | None]  # position, arm, and whether it was clicked; None without an answer


@dataclass(slots=True)
class Journal:
    """The facts of the journal, each with the offset at which it stood first."""

    #: `opened` by session, as JSON
    opened: dict[Session, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    contexts: dict[Session, set[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(set))
    answers: dict[str, dict[Answer, int]] = field(default_factory=lambda: defaultdict(dict))
    #: (offset, partition, partitions, time)
    progress: list[tuple[int, int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Raw]) -> Journal:
        journal = cls()
        for record in records:
            fact = record.body
            if fact["kind"] == "opened":
                session = fact["session_id"], fact["arrived_at"]
                journal.opened[session].setdefault(json.dumps(fact, sort_keys=True), record.offset)
                journal.contexts[session].add(tuple(fact["context"]))
            elif fact["kind"] == "feedback":
                answer = fact["occurred_at"], fact["position"], fact["arm"], fact["clicked"]
                journal.answers[fact["session_id"]].setdefault(answer, record.offset)
            elif fact["kind"] == "progress" and fact["time"] <= record.timestamp + MOST_AHEAD:
                journal.progress.append((record.offset, fact["partition"], fact["partitions"], fact["time"]))
        return journal

    def watermark(self, offset: int) -> int:
        """Return the lowest, over all partitions, of the highest progress of each up to an offset."""
        highest: dict[int, int] = {}
        for at, partition, partitions, time in self.progress:
            if at > offset:
                break
            for one in range(partitions):
                highest.setdefault(one, 0)
            highest[partition] = max(highest[partition], time)
        return min(highest.values(), default=0)


# ── the join ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def displays_of(slate: tuple[str, ...], answers: Iterable[Answer]) -> set[Display]:
    """Return the displays of a slate: those that the answers are about, and the next one, at which the user left."""
    fitting = [one for one in answers if 1 <= one[1] <= len(slate) and slate[one[1] - 1] == one[2]]
    clicks = [position for _, position, _, clicked in fitting if clicked]
    passes = [position for _, position, _, clicked in fitting if not clicked]
    click = min(clicks, default=0)
    # Whoever clicked at a position has passed over all before it, and nothing after a click counts.
    last = click or max(passes, default=0)
    displays: set[Display] = {(position, slate[position - 1], position == click) for position in range(1, last + 1)}
    if not click and last < len(slate):
        displays.add((last + 1, slate[last], None))
    return displays


def is_uncertain(opened: Collection[str]) -> bool:
    """Whether the user may have seen another slate: a fact says so, or the facts differ."""
    return len(opened) > 1 or any(json.loads(fact).get("uncertain") for fact in opened)


def displays_of_session(opened: Collection[str], answers: Iterable[Answer]) -> set[Display]:
    """Return the displays of a session that count: none if it is uncertain."""
    return set() if is_uncertain(opened) else displays_of(tuple(json.loads(next(iter(opened)))["slate"]), answers)


@dataclass(slots=True)
class Window:
    """A closed window: what its episode record says, and what should have been counted."""

    version: int
    start: int
    end: int
    closed_at: int  # the offset of the journal record that closed it
    said: dict[str, Any]
    sessions: dict[Session, set[Display]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        answers = [clicked for shown in self.sessions.values() for _, _, clicked in shown if clicked is not None]
        return {"sessions": len(self.sessions), "displays": len(answers), "clicks": sum(answers)}


def closed_windows(topics: dict[str, list[Raw]], journal: Journal, session_timeout: int) -> list[Window]:
    """Return the windows that were closed, with the sessions and displays that they should have."""
    made_at: dict[int, int] = {}
    for record in topics["parameters"]:
        version = record.body
        if version["journal_offset"] is not None:
            made_at.setdefault(version["version"], version["journal_offset"])
    windows: dict[tuple[int, int], Window] = {}
    for record in topics["episodes"]:
        said = record.body
        if said["version"] not in made_at:
            continue  # an episode is written before its version
        window = Window(said["version"], said["window_start"], said["window_end"], made_at[said["version"]], said)
        windows.setdefault((window.version, window.start), window)
    ordered = sorted(windows.values(), key=lambda window: (window.version, window.start))
    left, closed_until = dict(journal.opened), 0
    for window in ordered:
        first = max(window.start, closed_until)
        for session in [one for one in left if first <= one[1] < window.end]:
            opened = [fact for fact, offset in left[session].items() if offset <= window.closed_at]
            if opened:
                answers = in_time(journal, session, window.closed_at, session_timeout)
                window.sessions[session] = displays_of_session(opened, answers)
                del left[session]
        closed_until = max(closed_until, window.end)
    return ordered


def in_time(journal: Journal, session: Session, closed_at: int, session_timeout: int) -> list[Answer]:
    """Return the answers that belong to a session and stood in the journal before its window was closed."""
    first, last = session[1], session[1] + session_timeout
    return [
        answer
        for answer, offset in journal.answers.get(session[0], {}).items()
        if offset <= closed_at and first <= answer[0] <= last
    ]
