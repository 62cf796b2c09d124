"""The ordered log: traffic by event time, the journal by offset, versions by number.

Rules that hold in this file:

- The order of the lines does not matter, nor do repeated lines: topic, partition and offset identify a record. Two
  different records at one offset are a mismatch, and the first of the file counts.
- Traffic is sorted by the time that assigns it to a session: an arrival, its `opened` and its decisions by the arrival
  time, feedback by its own. All records of a session lie within its timeout, so a reader holds open sessions only.
- The records are in a temporary SQLite database, in the folder for temporary files (TMPDIR), and are read in the order
  of an index. Memory holds the database's cache, for a log of any length; a log that fits into it stays in memory.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from worker.errors import InputError
from worker.logs.findings import Findings, Mismatch, Stage, silent, ticking
from worker.logs.format import NO_TIMESTAMP, Headers, Line, LogReader, cannot_sort, temporary_database
from worker.logs.versions import RecordedVersions
from worker.stream.decoding import Limits
from worker.stream.events import MOST, TOPICS
from worker.stream.history import is_slot
from worker.stream.topology import ONLY_PARTITION, Record, Topics

# Kinds of entries of the traffic, in their order within one time.
DEAD: Final = 0  # the arrival or click at this offset became a dead letter
ARRIVAL: Final = 1
OPENED: Final = 2
DECISION: Final = 3
CLICK: Final = 4
FACT: Final = 5  # feedback in the journal
_COUNTED: Final = 16  # plus the index of the topic: a record that is counted and not read
UNREADABLE: Final = 32  # a record of the decisions that is not a decision

_KINDS: Final = {ARRIVAL: "arrivals", CLICK: "clicks", DECISION: "decisions", UNREADABLE: "decisions"}

#: Dead letters for these reasons were valid records, and the journal has them.
_JOURNALED: Final = frozenset([b"arm-mismatch", b"position", b"parked-overflow"])

_LIMITS: Final = Limits()

_TABLES: Final = """
    CREATE TABLE traffic (time, kind, partition, offset, line, timestamp, value);
    CREATE TABLE journal (offset, line, timestamp, value);
"""


class Entry(NamedTuple):
    """A record of the traffic with its partition, offset and line."""

    time: int
    kind: int
    partition: int
    offset: int
    line: int
    timestamp: int
    value: bytes


class _Times(msgspec.Struct, gc=False):
    occurred_at: float | int = -1
    arrived_at: float | int = -1
    kind: str = ""


_decode_times: Final = msgspec.json.Decoder(_Times).decode
_NEVER: Final = _Times()


class OrderedLog:
    """Take the lines of a log in any order and yield its records in order; a context manager.

    Lines of other topics are counted and ignored. `findings` receives contradictions within the log. `entry_count` and
    `journal_count` are the numbers of entries of the traffic and of records of the journal, with the repeated ones.
    """

    def __init__(self, topics: Topics, findings: Findings) -> None:
        self._database = temporary_database(_TABLES)
        self.versions = RecordedVersions(findings, self._database)
        self.entry_count = 0
        self.journal_count = 0
        self.duplicates = 0
        self.others: Counter[str] = Counter()  # topics outside `topics`
        self.first_time: int | None = None  # earliest arrival or click
        self.last_time = 0
        self.last_feedback = -1
        self.arrivals_of: dict[int, tuple[int, int]] = {}  # partition → first and last time
        self._counts: Counter[str] = Counter()
        self._findings = findings
        self._handlers: dict[str, Callable[[Line], None]] = {
            topics.arrivals: self._add_arrival,
            topics.clicks: self._add_click,
            topics.decisions: self._add_decision,
            topics.journal: self._add_journal,
            topics.parameters: self._add_parameters,
            topics.parameters_history: self._add_history,
            topics.episodes: partial(self._count, "episodes"),
            topics.dead_letters: self._add_dead_letter,
        }
        self._originals = {topics.arrivals.encode(): ARRIVAL, topics.clicks.encode(): CLICK}

    def __enter__(self) -> OrderedLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._database.close()

    @property
    def counts(self) -> Mapping[str, int]:
        """Records per topic, repeated ones once; complete when traffic and journal have been read."""
        return {name: self._counts[name] for name in TOPICS}

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, path: str | Path, *, skip_bad: bool = False, stage: Stage = silent) -> LogReader:
        """Add all lines of a file; return its reader, which has counted them."""
        with LogReader(path, skip_bad=skip_bad) as reader, stage("reading", None) as bar:
            for line in ticking(reader, bar):
                self.add(line)
        return reader

    def add(self, line: Line) -> None:
        """Add a line."""
        handle = self._handlers.get(line.record.topic)
        if handle is None:
            self.others[line.record.topic if len(self.others) < 100 else "…"] += 1
            return
        try:
            handle(line)
        except sqlite3.Error as error:
            raise cannot_sort(error) from None

    def _add(self, time: int, kind: int, line: Line, value: bytes) -> None:
        record = line.record
        entry = Entry(time, kind, record.partition, record.offset, line.number, record.timestamp, value)
        self._database.execute("INSERT INTO traffic VALUES (?, ?, ?, ?, ?, ?, ?)", entry)
        self.entry_count += 1

    def _count(self, topic: str, line: Line) -> None:
        self._add(0, _COUNTED + TOPICS.index(topic), line, b"")

    def _add_arrival(self, line: Line) -> None:
        time = self._add_traffic(line, ARRIVAL)
        if time is not None:
            first, last = self.arrivals_of.get(line.record.partition, (time, time))
            self.arrivals_of[line.record.partition] = (min(first, time), max(last, time))

    def _add_click(self, line: Line) -> None:
        time = self._add_traffic(line, CLICK)
        if time is not None:
            self.last_feedback = max(self.last_feedback, time)

    def _add_traffic(self, line: Line, kind: int) -> int | None:
        """Add an arrival or a click; return its time if that extends the span of the log."""
        value = line.record.value
        time = _time(_read(value).occurred_at)
        if time is None or value is None:
            self._count(_KINDS[kind], line)  # a dead letter
            return None
        self._add(time, kind, line, value)
        return time if self._extend_span(line, time) else None

    def _add_decision(self, line: Line) -> None:
        value = line.record.value
        time = _time(_read(value).arrived_at)
        if time is None or value is None:
            self._add(0, UNREADABLE, line, b"")
        else:
            self._add(time, DECISION, line, value)

    def _add_journal(self, line: Line) -> None:
        record = line.record
        if record.partition != ONLY_PARTITION:
            raise InputError(
                f"line {line.number}: {record.topic} has one partition, this record is of partition {record.partition}"
            )
        value = record.value or b""
        row = record.offset, line.number, record.timestamp, value
        self._database.execute("INSERT INTO journal VALUES (?, ?, ?, ?)", row)
        self.journal_count += 1
        event = _read(value)
        if event.kind == "opened":
            time = _time(event.arrived_at)
            if time is not None:
                self._add(time, OPENED, line, value)
        elif event.kind == "feedback":
            time = _time(event.occurred_at)
            if time is not None:
                self.last_feedback = max(self.last_feedback, time)
                self._add(time, FACT, line, value)

    def _add_parameters(self, line: Line) -> None:
        self._count("parameters", line)
        record = line.record
        self.versions.add(record.value, at=(record.partition, record.offset), line=line.number)

    def _add_history(self, line: Line) -> None:
        self._count("parameters-history", line)
        record = line.record
        if record.value is not None and is_slot((record.key or b"").decode(errors="replace")):
            self.versions.add(record.value, at=(record.partition, record.offset), line=line.number, published=False)

    def _add_dead_letter(self, line: Line) -> None:
        """Count a dead letter, and mark its original record, which `entries` then leaves out."""
        self._count("dead-letters", line)
        origin = _origin(line.headers)
        time = _time(_read(line.record.value).occurred_at)
        if origin is None or time is None:
            return
        topic, partition, offset = origin
        kind = self._originals.get(topic)
        if kind is not None:
            mark = Record("", partition, offset, 0, None, None)
            self._add(time, DEAD, Line(mark, (), line.number), bytes([kind]))

    def _extend_span(self, line: Line, time: int) -> bool:
        """Extend the span by a time; return False for an invalid one: far after the timestamp, or in seconds."""
        timestamp = line.record.timestamp
        if timestamp != NO_TIMESTAMP and time > timestamp + _LIMITS.max_ahead_ms:
            return False
        if timestamp - time > _LIMITS.max_behind_ms and time < timestamp // 500:
            return False
        self.last_time = max(self.last_time, time)
        if self.first_time is None or time < self.first_time:
            self.first_time = time
        return True

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def entries(self) -> Iterator[Entry]:
        """Yield arrivals, clicks, decisions, and `opened` and feedback of the journal, by time; call it once."""
        first: Entry | None = None  # at the present offset
        dead: set[tuple[int, int, int]] = set()  # kind, partition, offset of records of this time
        dead_at = -1
        counts = self._counts
        for entry in map(Entry._make, self._sorted("traffic", "time, kind, partition, offset, line")):
            time, kind, partition, offset = key = entry[:4]
            if first is not None and key == first[:4]:
                if kind in _KINDS or _COUNTED <= kind < UNREADABLE:  # those of the journal are counted there
                    self._count_repeated(entry.line, differs=entry.value != first.value)
                continue
            first = entry
            if kind == DEAD:
                if time != dead_at:
                    dead, dead_at = set(), time
                dead.add((entry.value[0], partition, offset))
                continue
            if _COUNTED <= kind < UNREADABLE:
                counts[TOPICS[kind - _COUNTED]] += 1
                continue
            name = _KINDS.get(kind)
            if name:
                counts[name] += 1
            if dead and time == dead_at and (kind, partition, offset) in dead:
                continue
            yield entry

    def journal_records(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield the journal, (offset, value, timestamp), by offset; call it once."""
        before, first = -1, b""
        for offset, line, timestamp, value in self._sorted("journal", "offset, line"):
            if offset == before:
                self._count_repeated(line, differs=value != first)
                continue
            before, first = offset, value
            self._counts["journal"] += 1
            yield offset, value, timestamp

    def _sorted(self, table: str, key: str) -> Iterator[Any]:
        try:
            self._database.execute(f"CREATE INDEX IF NOT EXISTS {table}_order ON {table} ({key})")
            for row in self._database.execute(f"SELECT * FROM {table} ORDER BY {key}"):  # noqa: UP028 - or it is closed twice
                yield row
        except sqlite3.Error as error:
            raise cannot_sort(error) from None

    def _count_repeated(self, line: int, *, differs: bool) -> None:
        self.duplicates += 1
        if differs:
            expected, found = "one record at one offset", "another record at the offset of an earlier line"
            self._findings.add(Mismatch("line", "topic, partition and offset", expected, found, line=line))


def _read(value: bytes | None) -> _Times:
    try:
        return _decode_times(value or b"")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _NEVER


def _time(number: float | int) -> int | None:
    """Return a time as an integer (5.0 is 5), or None if it is not a time."""
    return int(number) if 0 <= number <= MOST and number == int(number) else None


def _origin(headers: Headers) -> tuple[bytes, int, int] | None:
    """Return the source of a dead letter; None if its headers do not name it, or if the journal has the record."""
    given = dict(headers)
    topic, reason = given.get("adcascade.topic"), given.get("adcascade.reason")
    try:
        partition, offset = (int(given.get(f"adcascade.{name}") or b"") for name in ("partition", "offset"))
    except ValueError:
        return None
    if topic is None or reason in _JOURNALED or not (0 <= partition < 2**31 and 0 <= offset <= MOST):
        return None
    return topic, partition, offset
