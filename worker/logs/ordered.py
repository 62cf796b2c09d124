"""The ordered log: traffic by event time, the journal by offset, versions by number.

Rules that hold in this file:

- The order of the lines does not matter, nor do repeated lines: topic, partition and offset identify a record. Two
  different records at one offset are a mismatch, and the first of the file counts.
- Traffic is sorted by the time that assigns it to a session: an arrival, its `opened` and its decisions by the arrival
  time, feedback by its own. All records of a session lie within its timeout, so a reader holds open sessions only.
- The records are in a temporary SQLite database, which deduplicates and sorts them, in the folder for temporary files
  (TMPDIR). Memory holds the database's cache, for a log of any length; a log that fits into it stays in memory.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from worker.console import progress
from worker.errors import InputError
from worker.logs.findings import Findings, Mismatch, ticking
from worker.logs.format import NO_TIMESTAMP, Headers, Line, LogReader, temporary_database
from worker.logs.versions import RecordedVersions
from worker.stream.decoding import Limits
from worker.stream.events import MOST, TOPICS
from worker.stream.history import is_slot
from worker.stream.topology import ONLY_PARTITION, Record, Topics

# Kinds of entries of the traffic, in their order within one time.
ARRIVAL: Final = 1
OPENED: Final = 2
DECISION: Final = 3
CLICK: Final = 4
FACT: Final = 5  # feedback in the journal

#: Topics whose records are counted and not read again.
_COUNTED: Final = ("dead-letters",)

#: Dead letters for these reasons were valid records, and the journal has them.
_JOURNALED: Final = frozenset([b"arm-mismatch", b"position", b"parked-overflow"])

_LIMITS: Final = Limits()

PIECE: Final = 1024  # most journal records in one piece

#: A record of the journal: offset, value, timestamp.
JournalRecord: TypeAlias = tuple[int, bytes, int]

#: Only records of the traffic have a time and a kind. `dead` has the origins of dead letters.
_TABLES: Final = """
    CREATE TABLE records (
        row INTEGER PRIMARY KEY, topic, partition, offset, line, timestamp, time, kind, value,
        UNIQUE (topic, partition, offset)
    );
    CREATE TABLE dead (topic, partition, offset, PRIMARY KEY (topic, partition, offset)) WITHOUT ROWID;
"""
_INSERT: Final = """
    INSERT INTO records (topic, partition, offset, line, timestamp, time, kind, value) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO NOTHING
"""
_LIVING: Final = """
    FROM records WHERE time BETWEEN ? AND ?
    AND (topic, partition, offset) NOT IN (SELECT topic, partition, offset FROM dead)
"""
_COLUMNS: Final = "SELECT time, kind, partition, offset, line, timestamp, ifnull(value, x'')"
_ENTRIES: Final = f"{_COLUMNS} {_LIVING} ORDER BY time, kind, partition, offset"
#: Rows are mixed by a multiplication, so that a sample has no rhythm of the lines.
_SAMPLE: Final = f"{_COLUMNS} {_LIVING} AND kind = ? AND row * 2654435761 % {1 << 32} < ? ORDER BY time"
_SPAN: Final = f"SELECT count(*), min(time), max(time) {_LIVING} AND kind = ?"
_JOURNAL: Final = f"""
    SELECT offset, ifnull(value, x''), timestamp FROM records
    WHERE topic = 'journal' AND partition = {ONLY_PARTITION} ORDER BY offset
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


@contextmanager
def read_log(
    path: str | Path,
    findings: Findings,
    *,
    topics: Topics | None = None,
    skip_bad: bool | None = None,
    session: str | None = None,
) -> Iterator[OrderedLog]:
    """Read a log, to be used in this context; raise `InputError` if it has no records of these topics.

    With a `session` only lines that may be about it are decoded, and versions are checked when they are read.
    """
    topics = topics or Topics()
    with empty_log(topics, findings, session=session) as log:
        lines = LogReader(path, skip_bad=skip_bad, wanted=log.is_wanted)
        with lines as reader, progress("reading", unit="lines") as bar:
            for line in ticking(reader, bar):
                log.add(line)
        log.name, log.lines, log.bad_lines, log.first_bad = reader.name, reader.lines, reader.bad, reader.first_bad
        if not any(log.counts.values()):
            topic = next(iter(log.others), None)
            if topic is None:
                raise InputError(f"{reader.name}: it has no records")
            prefix = topic.rpartition(".")[0]
            hint = f"; try --prefix {prefix}" if prefix else ""
            raise InputError(f"{reader.name}: it has no records of these topics, but of {topic}{hint}")
        yield log


@contextmanager
def empty_log(topics: Topics, findings: Findings, *, session: str | None = None) -> Iterator[OrderedLog]:
    """Open a log to which records are added, to be used in this context; `session` as in `read_log`."""
    with temporary_database(_TABLES) as database:
        yield OrderedLog(database, topics, findings, session=session)


def about(session_id: str, topics: Topics) -> Callable[[bytes], bool]:
    """Return whether JSON has a version or an episode, or may be about a session, however its id is escaped.

    >>> [about("s-1", Topics())(line) for line in (b'{"key":"s-1"}', b'{"key":"s-2"}', b'{"topic":"ads.episodes"}')]
    [True, False, True]
    """
    # The longest part of the id that JSON escapes nowhere; it may be empty.
    plain = max(re.findall(rb"[\w.:-]+", session_id.encode()), key=len, default=b"")
    names = topics.parameters, topics.parameters_history, topics.episodes
    parts = plain, *(f'{topic}"'.encode() for topic in names), b"_base64"
    return lambda text: any(part in text for part in parts)


class OrderedLog:
    """Add the lines of a log in any order and yield its records in order.

    Lines of other topics are counted and ignored. `findings` receives contradictions within the log. `counts` has the
    records per topic, repeated ones once, and `entry_count` the entries of the traffic. `is_wanted` says which lines
    to decode. `name` and the counts of lines are those of a file.
    """

    def __init__(
        self, database: sqlite3.Connection, topics: Topics, findings: Findings, *, session: str | None
    ) -> None:
        self.name, self.lines, self.bad_lines, self.first_bad = "", 0, 0, ""
        self.is_wanted = (lambda line: True) if session is None else about(session, topics)
        self.versions = RecordedVersions(findings, database, checked=session is None)
        self._database = database
        self.counts = dict.fromkeys(TOPICS, 0)
        self.entry_count = 0
        self.duplicates = 0
        self.others: Counter[str] = Counter()  # topics outside `topics`
        self.first_time: int | None = None  # earliest arrival or click
        self.last_time = 0
        self.last_feedback = -1
        self.arrivals_of: dict[int, tuple[int, int]] = {}  # partition → first and last time
        self._findings = findings
        self._names = {f"{topics.prefix}.{name}": name for name in TOPICS}

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, line: Line) -> None:
        """Add a line."""
        record = line.record
        name = self._names.get(record.topic)
        if name is None:
            self.others[record.topic if len(self.others) < 100 else "…"] += 1
            return
        if name == "journal" and record.partition != ONLY_PARTITION:
            raise InputError(
                f"line {line.number}: {record.topic} has one partition, this record is of partition {record.partition}"
            )
        time, kind = _time_and_kind(name, record.value)
        position = name, record.partition, record.offset
        value = None if name in _COUNTED else record.value
        done = self._database.execute(_INSERT, (*position, line.number, record.timestamp, time, kind, value))
        if not done.rowcount:
            self._count_repeated(position, value, line.number)
            return
        self.counts[name] += 1
        if time is not None:
            self.entry_count += 1
            self._extend(kind, time, line)
        elif name == "parameters":
            self.versions.add(record.value, row=done.lastrowid or 0, line=line.number)
        elif name == "parameters-history":
            if record.value is not None and is_slot((record.key or b"").decode(errors="replace")):
                self.versions.add(record.value, row=done.lastrowid or 0, line=line.number, published=False)
        elif name == "dead-letters":
            self._leave_out_origin(line.headers)

    def add_record(self, record: Record, headers: Headers = ()) -> None:
        """Add a record of another source than a file, unless it is about another session."""
        if self.is_wanted(b'%b" %b %b' % (record.topic.encode(), record.key or b"", record.value or b"")):
            self.add(Line(record, headers, 0))

    def _count_repeated(self, position: tuple[str, int, int], value: bytes | None, line: int) -> None:
        self.duplicates += 1
        query = "SELECT value FROM records WHERE topic = ? AND partition = ? AND offset = ?"
        if self._database.execute(query, position).fetchone() != (value,):
            expected, found = "one record at one offset", "another record at the offset of an earlier line"
            self._findings.add(Mismatch("line", "topic, partition and offset", expected, found, line=line))

    def _extend(self, kind: int, time: int, line: Line) -> None:
        """Extend the span of the log, of its feedback, and of the arrivals of a partition."""
        if kind in (ARRIVAL, CLICK):
            if _is_invalid(time, line.record.timestamp):
                return
            self.last_time = max(self.last_time, time)
            self.first_time = time if self.first_time is None else min(self.first_time, time)
        if kind in (CLICK, FACT):
            self.last_feedback = max(self.last_feedback, time)
        if kind == ARRIVAL:
            first, last = self.arrivals_of.get(line.record.partition, (time, time))
            self.arrivals_of[line.record.partition] = (min(first, time), max(last, time))

    def _leave_out_origin(self, headers: Headers) -> None:
        """Mark the original record of a dead letter, unless the journal has it."""
        given = dict(headers)
        name = self._names.get((given.get("adcascade.topic") or b"").decode(errors="replace"))
        try:
            partition, offset = (int(given.get(f"adcascade.{part}") or b"") for part in ("partition", "offset"))
        except ValueError:
            return
        if name is not None and given.get("adcascade.reason") not in _JOURNALED and max(partition, offset) <= MOST:
            self._database.execute("INSERT OR IGNORE INTO dead VALUES (?, ?, ?)", (name, partition, offset))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def entries(self, title: str, first: int = 0, last: int = MOST) -> Iterator[Entry]:
        """Yield arrivals, clicks, decisions, and `opened` and feedback of the journal, by time; without the dead.

        The progress has this title. With times, only entries from `first` to `last`.
        """
        with progress(title, self.entry_count, unit="records") as bar:
            yield from ticking(map(Entry._make, self._rows(_ENTRIES, first, last)), bar)

    def openings(self, first: int = 0, last: int = MOST) -> tuple[int, int, int]:
        """Return how many sessions were opened from `first` to `last`, and the times of the first and last of them."""
        count, earliest, latest = next(self._rows(_SPAN, first, last, self._opening))
        return count, earliest or 0, latest or 0

    def sample(self, most: int, first: int, last: int) -> Iterator[Entry]:
        """Yield about `most` openings from `first` to `last`, evenly spread; all of them if they are fewer."""
        bound = (most << 32) // max(1, self.openings(first, last)[0])
        return map(Entry._make, self._rows(_SAMPLE, first, last, self._opening, bound))

    @property
    def _opening(self) -> int:
        """The kind of entry that opens a session; without a journal, it is the arrival."""
        return OPENED if self.counts["journal"] else ARRIVAL

    def values(self, topic: str) -> Iterator[bytes]:
        """Yield the values of a topic with one partition, by offset."""
        rows = self._rows("SELECT ifnull(value, x'') FROM records WHERE topic = ? ORDER BY offset", topic)
        return (value for (value,) in rows)

    def journal_record(self, offset: int) -> bytes:
        """Return a record of the journal; nothing if the log does not have it."""
        query = "SELECT ifnull(value, x'') FROM records WHERE topic = 'journal' AND partition = ? AND offset = ?"
        return next((value for (value,) in self._rows(query, ONLY_PARTITION, offset)), b"")

    def journal_records(self) -> Iterator[JournalRecord]:
        """Yield the journal, (offset, value, timestamp), by offset."""
        return self._rows(_JOURNAL)

    def journal_pieces(self) -> Iterator[list[JournalRecord]]:
        """Yield the journal in pieces without holes; a rollback is alone, because the log may lack its version."""
        piece: list[JournalRecord] = []
        for record in self.journal_records():
            alone = b"rollback" in record[1]
            if piece and (alone or len(piece) == PIECE or record[0] != piece[-1][0] + 1):
                yield piece
                piece = []
            piece.append(record)
            if alone:
                yield piece
                piece = []
        if piece:
            yield piece

    def _rows(self, query: str, *given: int | str) -> Iterator[Any]:
        return self._database.execute(query, given)


def _time_and_kind(name: str, value: bytes | None) -> tuple[int | None, int]:
    """Return the time and kind of a record of the traffic; no time for other records, nor for an unreadable one."""
    if name in ("arrivals", "clicks"):
        return _time(_read(value).occurred_at), ARRIVAL if name == "arrivals" else CLICK
    if name == "decisions":
        return _time(_read(value).arrived_at) or 0, DECISION  # its reader reports an unreadable one
    event = _read(value) if name == "journal" else _NEVER
    if event.kind == "opened":
        return _time(event.arrived_at), OPENED
    return (_time(event.occurred_at) if event.kind == "feedback" else None), FACT


def _read(value: bytes | None) -> _Times:
    try:
        return _decode_times(value or b"")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _NEVER


def _time(number: float | int) -> int | None:
    """Return a time as an integer (5.0 is 5), or None if it is not a time."""
    return int(number) if 0 <= number <= MOST and number == int(number) else None


def _is_invalid(time: int, timestamp: int) -> bool:
    """Return whether the time of an arrival or click is far after its timestamp, or in seconds."""
    if timestamp != NO_TIMESTAMP and time > timestamp + _LIMITS.max_ahead:
        return True
    return timestamp - time > _LIMITS.max_behind and time < timestamp // 500
