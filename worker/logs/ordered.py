"""A log told apart and put in order: traffic by event time, the journal by offset, versions by number.

Rules that hold in this file:

- The order of the lines does not matter, nor how often one is repeated: a record is known by topic, partition and
  offset. Two different records at one place are a mismatch; the one that comes first in the file counts.
- Traffic is sorted by the time that decides about its session: an arrival and what was made of it (`opened`, decisions)
  by the arrival time, feedback by its own. So all that concerns a session lies within its timeout, and a reader needs
  to remember open sessions only.
- Memory is bounded by the sorters, however long the log is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from worker.errors import InputError
from worker.logs.findings import Findings, Mismatch
from worker.logs.format import NO_TIMESTAMP, Headers, Line
from worker.logs.sorting import MEMORY, Sorter
from worker.logs.versions import RecordedVersions
from worker.stream.codec import Limits
from worker.stream.events import MOST, TOPICS
from worker.stream.topology import Record, Topics

# What an entry of the traffic is; at one time they come in this order.
DEAD: Final = 0  # the arrival or click at this place became a dead letter
ARRIVAL: Final = 1
OPENED: Final = 2
DECISION: Final = 3
CLICK: Final = 4
FACT: Final = 5  # feedback as the journal has it
_COUNTED: Final = 16  # added to the index of the topic: nothing but the record's existence is of interest
UNREADABLE: Final = 32  # a decision that is none

_KINDS: Final = {ARRIVAL: "arrivals", CLICK: "clicks", DECISION: "decisions", UNREADABLE: "decisions"}

#: Dead letters for these reasons were valid by themselves and stand in the journal.
_JOURNALED: Final = frozenset([b"arm-mismatch", b"position", b"parked-overflow"])

_MAX_AHEAD: Final = Limits().max_ahead_ms

_HEAD: Final = Struct(">QBIQQq")  # time, kind, partition, offset | line, timestamp
_KEY: Final = 21
_JOURNAL_HEAD: Final = Struct(">QQ")  # offset | line
_JOURNAL_KEY: Final = 8


class Entry(NamedTuple):
    """A record of the traffic and where it stood."""

    time: int
    kind: int
    partition: int
    offset: int
    line: int
    timestamp: int
    value: bytes


class _When(msgspec.Struct, gc=False):
    occurred_at: float | int = -1
    arrived_at: float | int = -1
    kind: str = ""


_when: Final = msgspec.json.Decoder(_When).decode
_NEVER: Final = _When()


class ReplayLog:
    """Takes the lines of a log and yields them in order; a context manager.

    Parameters
    ----------
    topics : whose records these are; lines of other topics are counted and ignored
    findings : where contradictions within the log are noted
    memory : bytes that each of the two sorters may hold
    """

    def __init__(self, topics: Topics, findings: Findings, *, memory: int = MEMORY) -> None:
        self.versions = RecordedVersions(findings)
        self.traffic = Sorter(memory=memory)
        self.journal = Sorter(memory=memory)
        self.duplicates = 0
        self.others: Counter[str] = Counter()  # topics that are not ours
        self.first_time: int | None = None  # of arrivals and clicks
        self.last_time = 0
        self.last_feedback = -1
        self.arrivals_of: dict[int, tuple[int, int]] = {}  # partition → time of the first and the last
        self._counts: Counter[str] = Counter()
        self._findings = findings
        self._takers = {
            topics.arrivals: self._take_arrival,
            topics.clicks: self._take_click,
            topics.decisions: self._take_decision,
            topics.journal: self._take_journal,
            topics.parameters: self._take_parameters,
            topics.episodes: self._take_episode,
            topics.dead_letters: self._take_dead_letter,
        }
        self._originals = {topics.arrivals.encode(): ARRIVAL, topics.clicks.encode(): CLICK}

    def __enter__(self) -> ReplayLog:
        return self

    def __exit__(self, *exc: object) -> None:
        for part in (self.versions, self.traffic, self.journal):
            part.__exit__(*exc)

    @property
    def counts(self) -> Mapping[str, int]:
        """Records per topic, repeated ones once; complete when traffic and journal have been read."""
        return {name: self._counts[name] for name in TOPICS}

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, line: Line) -> None:
        """Take a line."""
        take = self._takers.get(line.record.topic)
        if take is None:
            self.others[line.record.topic if len(self.others) < 100 else "…"] += 1
        else:
            take(line)

    def _add(self, time: int, kind: int, line: Line, value: bytes) -> None:
        record = line.record
        self.traffic.add(_HEAD.pack(time, kind, record.partition, record.offset, line.number, record.timestamp) + value)

    def _count(self, topic: str, line: Line) -> None:
        self._add(0, _COUNTED + TOPICS.index(topic), line, b"")

    def _take_arrival(self, line: Line) -> None:
        value = line.record.value
        time = _time(_read(value).occurred_at)
        if time is None or value is None:
            self._count("arrivals", line)  # it was a dead letter
            return
        if self._span(line, time):
            first, last = self.arrivals_of.get(line.record.partition, (time, time))
            self.arrivals_of[line.record.partition] = (min(first, time), max(last, time))
        self._add(time, ARRIVAL, line, value)

    def _take_click(self, line: Line) -> None:
        value = line.record.value
        time = _time(_read(value).occurred_at)
        if time is None or value is None:
            self._count("clicks", line)
            return
        if self._span(line, time):
            self.last_feedback = max(self.last_feedback, time)
        self._add(time, CLICK, line, value)

    def _take_decision(self, line: Line) -> None:
        value = line.record.value
        time = _time(_read(value).arrived_at)
        if time is None or value is None:
            self._add(0, UNREADABLE, line, b"")
        else:
            self._add(time, DECISION, line, value)

    def _take_journal(self, line: Line) -> None:
        record = line.record
        if record.partition:
            raise InputError(f"line {line.number}: {record.topic} has one partition, this is of {record.partition}")
        value = record.value or b""
        self.journal.add(_JOURNAL_HEAD.pack(record.offset, line.number) + value)
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

    def _take_parameters(self, line: Line) -> None:
        self._count("parameters", line)
        record = line.record
        self.versions.add(record.value, place=(record.partition, record.offset), line=line.number)

    def _take_episode(self, line: Line) -> None:
        self._count("episodes", line)

    def _take_dead_letter(self, line: Line) -> None:
        """Count it, and mark the record it was: what was refused then is not to be taken now."""
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

    def _span(self, line: Line, time: int) -> bool:
        """Take note of a time; return whether it can be true: one far after the record's own was refused."""
        timestamp = line.record.timestamp
        if timestamp != NO_TIMESTAMP and time > timestamp + _MAX_AHEAD:
            return False
        self.last_time = max(self.last_time, time)
        if self.first_time is None or time < self.first_time:
            self.first_time = time
        return True

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def entries(self) -> Iterator[Entry]:
        """Yield arrivals, clicks, decisions and the journal's copies, in the order of their times; once."""
        before = last = b""
        dead: set[tuple[int, int, int]] = set()  # kind, partition, offset of records of this time
        dead_at = -1
        unpack, counts = _HEAD.unpack_from, self._counts
        for raw in self.traffic:
            key = raw[:_KEY]
            time, kind, partition, offset, line, timestamp = unpack(raw)
            if key == before:
                self._repeated(kind, raw[_HEAD.size :] != last[_HEAD.size :], line)
                continue
            before, last = key, raw
            if kind == DEAD:
                if time != dead_at:
                    dead, dead_at = set(), time
                dead.add((raw[_HEAD.size], partition, offset))
                continue
            if _COUNTED <= kind < UNREADABLE:
                counts[TOPICS[kind - _COUNTED]] += 1
                continue
            name = _KINDS.get(kind)
            if name:
                counts[name] += 1
            if dead and time == dead_at and (kind, partition, offset) in dead:
                continue
            yield Entry(time, kind, partition, offset, line, timestamp, raw[_HEAD.size :])

    def journal_records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the journal, (offset, value) in its order; once."""
        before = last = b""
        for raw in self.journal:
            key = raw[:_JOURNAL_KEY]
            offset, line = _JOURNAL_HEAD.unpack_from(raw)
            if key == before:
                self.duplicates += 1
                if raw[_JOURNAL_HEAD.size :] != last[_JOURNAL_HEAD.size :]:
                    self._contradict(line)
                continue
            before, last = key, raw
            self._counts["journal"] += 1
            yield offset, raw[_JOURNAL_HEAD.size :]

    def _repeated(self, kind: int, differs: bool, line: int) -> None:
        if kind in _KINDS or _COUNTED <= kind < UNREADABLE:  # not a copy of a journal record, which counts there
            self.duplicates += 1
            if differs:
                self._contradict(line)

    def _contradict(self, line: int) -> None:
        self._findings.add(
            Mismatch(
                kind="line",
                name="topic, partition and offset",
                expected="one record at one place",
                found="another record at the same place as an earlier line",
                line=line,
            )
        )


def _read(value: bytes | None) -> _When:
    try:
        return _when(value or b"")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _NEVER


def _time(number: float | int) -> int | None:
    """Return a time as it was meant: 5.0 is 5, what is no time is None."""
    return int(number) if 0 <= number <= MOST and number == int(number) else None


def _origin(headers: Headers) -> tuple[bytes, int, int] | None:
    """Return where a dead letter came from; None if that is not told or its record stands in the journal."""
    told = dict(headers)
    topic, reason = told.get("adcascade.topic"), told.get("adcascade.reason")
    try:
        place = int(told.get("adcascade.partition") or b""), int(told.get("adcascade.offset") or b"")
    except ValueError:
        return None
    if topic is None or reason in _JOURNALED or not (0 <= place[0] < 2**31 and 0 <= place[1] <= MOST):
        return None
    return topic, *place
