"""The history of another system as a log: version 0, and an arrival, decisions and feedback per session.

Rules that hold in this file:

- The slate of a session is what was displayed, in mode `imported`, under version 0. A position has its own decision if
  its propensity is known; position 1 always has one. The context is that of position 1.
- The feedback is the click; what was displayed after it was not answered. Without a click, a session has passed its
  last display if no session of the table is longer, or if unanswered displays count as passed; else the user left
  there, and passed the display before it.
- A bad row ends the import, or its whole session is left out and the row counted (`skip_bad`). Nothing is written
  before all rows are checked, and an arrival is checked by the rules for records, so learning refuses none of it.
- The settings of version 0 fit the history: no session is longer than the horizon or the timeout, and a window has
  about 500 sessions, or a 200th of them, so that learning takes seconds.
- Rows may be in any order: a temporary database sorts them. The same file and settings give the same bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeAlias

import orjson

from worker.console import progress
from worker.errors import InputError
from worker.logs.findings import ticking
from worker.logs.format import LogWriter, temporary_database
from worker.logs.tables import BadRowError, Display, RowReader, Rows
from worker.stream.decoding import Limits, Rejected, decode_arrival
from worker.stream.events import Decision, Feedback, encode_event
from worker.stream.features import context_encoder
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, check_columns
from worker.stream.topology import MOST_NAMED, ONLY_PARTITION, Record, Topics, Unlisted
from worker.stream.version_records import encode_parameters
from worker.stream.versions import version_key

#: Sessions of a window, at least, and windows of a history, at most; both about.
WINDOW_SESSIONS: Final = 500
MOST_WINDOWS: Final = 200

#: The displays of a session, by position.
Session: TypeAlias = Sequence[Display]

_TABLE: Final = f"""
    CREATE TABLE displays ({", ".join(Display._fields)}, PRIMARY KEY (session, position, time, row)) WITHOUT ROWID;
"""
_INSERT: Final = f"INSERT INTO displays VALUES ({', '.join('?' * len(Display._fields))})"
_SESSIONS: Final = """
    SELECT * FROM displays ORDER BY min(time) OVER (PARTITION BY session), session, position, time, row
"""
_EXTENT: Final = """
    SELECT count(*), sum(displays), sum(clicks), min(first), max(last), max(displays), max(last - first),
           max(displays > ads)
    FROM (SELECT count(*) displays, sum(clicked) clicks, min(time) first, max(time) last, count(DISTINCT ad) ads
          FROM displays GROUP BY session)
"""
_PRICES: Final = """
    SELECT ad, coalesce(avg(revenue) FILTER (WHERE clicked), avg(revenue)) FROM displays GROUP BY ad ORDER BY min(row)
"""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """The result of an import; times are in milliseconds.

    bad : by reason, the number of rows, one of them, and details of its defect
    unlisted : by feature and value, the number of sessions with a value that the category does not list: frequent ones
    unpriced : ads of which no revenue was known, so that they got the mean of the others
    """

    rows: int = 0
    sessions: int = 0
    displays: int = 0
    clicks: int = 0
    ads: int = 0
    first_at: int = 0
    last_at: int = 0
    horizon: int = 0
    window: int = 0
    session_timeout: int = 0
    unlisted: dict[str, dict[str, int]] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    bad: dict[str, dict[str, Any]] = field(default_factory=dict)
    sessions_left_out: int = 0


@dataclass(kw_only=True)
class HistoryImport:
    """Reads a table of displays, checks its sessions, and writes them as a log.

    `given` are settings of version 0. Without `arms`, the ads are those of the table, with the mean revenue of their
    clicks.
    """

    path: str
    rows: Rows
    reader: RowReader
    given: Mapping[str, Any]
    arms: tuple[Arm, ...] = ()
    skip_bad: bool = False
    report: ImportReport = field(default_factory=ImportReport)
    _bad_sessions: set[str] = field(default_factory=set)

    def run(self, output: str, topics: Topics) -> ImportReport:
        """Import the table."""
        with temporary_database(_TABLE) as database:
            with progress("reading", unit="rows") as bar:
                database.executemany(_INSERT, ticking(self._displays(), bar))
            settings = LearningSettings(**self.given, dim=self.reader.dim or 1)  # 0 if no row can be used
            self._check_sessions(database, settings)
            version, longest = self._first_version(database, settings)
            passed_from = 1 if settings.unanswered == "passed" else longest
            with progress("writing", self.report.sessions, unit="sessions") as bar, LogWriter(output) as log:
                first = (version_key(0), encode_parameters(version))
                log(Record(topics.parameters, ONLY_PARTITION, 0, self.report.first_at, *first))
                for session in ticking(_sessions(database), bar):
                    key = session[0].session.encode()
                    for topic, time, value in _events(topics, session, passed_from):
                        log(Record(topic, ONLY_PARTITION, log.lines, time, key, value))
        return self.report

    def _displays(self) -> Iterator[Display]:
        """Yield the displays of the table, without bad rows."""
        for number, row in self.rows:
            self.report.rows += 1
            session = ""
            try:
                if isinstance(row, BadRowError):
                    raise row
                session = str(self.reader.cell(row, "session"))
                yield self.reader.read(number, session, row)
            except BadRowError as error:
                self._leave_out(number, error, session)

    def _check_sessions(self, database: sqlite3.Connection, settings: LearningSettings) -> None:
        """Find the other bad sessions, and remove them all."""
        unlisted = Unlisted()
        for session in _sessions(database):
            if (name := session[0].session) not in self._bad_sessions:
                try:
                    unlisted.add(_checked(session, settings))
                except BadRowError as error:
                    self._leave_out(error.row, error, name)
        self.report.unlisted = {name: dict(values.most_common(MOST_NAMED)) for name, values in unlisted.values.items()}
        database.executemany("DELETE FROM displays WHERE session = ?", [(name,) for name in self._bad_sessions])

    def _leave_out(self, row: int, error: BadRowError, session: str) -> None:
        if not self.skip_bad:
            raise InputError(f"{self.path}, row {row}: {error} (--skip-bad leaves such sessions out)")
        bad = self.report.bad.setdefault(error.reason, {"rows": 0, "example": row, "detail": error.detail})
        bad["rows"] += 1
        if session:
            self._bad_sessions.add(session)
            self.report.sessions_left_out = len(self._bad_sessions)

    # ── version 0 ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _first_version(self, database: sqlite3.Connection, settings: LearningSettings) -> tuple[Parameters, int]:
        """Return version 0, whose settings fit the history, and the number of displays of the longest session."""
        found = self.report
        (found.sessions, found.displays, found.clicks, found.first_at, found.last_at, longest, span, repeats) = (
            database.execute(_EXTENT).fetchone()
        )
        if not found.sessions:
            why = [f"; row {bad['example']}: {reason}{bad['detail']}" for reason, bad in found.bad.items()]
            raise InputError(f"{self.path}: it has no usable rows{''.join(why[:1])}")
        for column, flag in self.reader.unseen.items():
            raise InputError(f"{self.path}: no column {column!r}: give {flag}")
        arms = self.arms or self._priced(dict(database.execute(_PRICES).fetchall()))
        window = (found.last_at - found.first_at) * max(WINDOW_SESSIONS, found.sessions // MOST_WINDOWS)
        settings = replace(
            settings,
            repeats=bool(repeats),
            horizon=longest,
            session_timeout=max(settings.session_timeout, _whole_seconds(span)),
            window=max(settings.window, _whole_seconds(window // found.sessions)),
        )
        check_columns(settings, len(arms))
        found.ads, found.horizon = len(arms), settings.horizon
        found.window, found.session_timeout = settings.window, settings.session_timeout
        return replace(Parameters.first(settings, arms), imported=True), longest

    def _priced(self, prices: Mapping[str, float | None]) -> tuple[Arm, ...]:
        """Return the ads of the table with the mean revenue of their clicks; where it is not known, the mean of all."""
        known = [price for price in prices.values() if price]
        if not known:
            raise InputError(f"{self.path}: no revenue of a click is known: give --catalog FILE or --revenue-column")
        self.report.unpriced = [ad for ad, price in prices.items() if not price]
        return tuple(Arm(arm=ad, reward=price or sum(known) / len(known)) for ad, price in prices.items())


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sessions(database: sqlite3.Connection) -> Iterator[Session]:
    """Yield the sessions in the order of their arrival."""
    for _, displays in groupby(map(Display._make, database.execute(_SESSIONS)), key=attrgetter("session")):
        yield list(displays)


def _arrival(session: Session) -> tuple[int, bytes]:
    """Return the time and the record of the arrival of a session."""
    at, first = min(display.time for display in session), session[0]
    context = orjson.Fragment(first.context)
    return at, orjson.dumps({"session_id": first.session, "occurred_at": at, "context": context})


def _checked(session: Session, settings: LearningSettings) -> list[tuple[str, str]]:
    """Return features with values that their category does not list.

    Raise `BadRowError` if the positions of a session have a gap, if it has two clicks, or a refused arrival.
    """
    clicked, unlisted = 0, list[tuple[str, str]]()
    for expected, (_, position, _, row, _, is_clicked, *_) in enumerate(session, start=1):
        if position != expected and session[-1].position:
            raise BadRowError(
                "position is not the next of its session", f" ({position or 'none'}, not {expected})", row=row
            )
        if clicked and is_clicked:
            raise BadRowError("second click of the session", f", after row {clicked}: keep the first", row=row)
        clicked = row if is_clicked else clicked
    at, arrival = _arrival(session)
    encoder = context_encoder(settings.features)
    try:
        decode_arrival(arrival, settings, limits=Limits(), timestamp=at, encoder=encoder, unlisted=unlisted)
    except Rejected as error:
        raise BadRowError("a worker would refuse the arrival", f" ({error})", row=session[0].row) from None
    return unlisted


def _events(topics: Topics, session: Session, passed_from: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield topic, time and value of the records of a session.

    A session of `passed_from` displays or more has passed all of them, unless it has a click.
    """
    at, arrival = _arrival(session)
    yield topics.arrivals, at, arrival
    name, slate = session[0].session, tuple(display.ad for display in session)
    for index, display in enumerate(session):
        if index == 0 or display.propensity is not None:
            decision = Decision(
                session_id=name,
                arrived_at=at,
                position=index + 1,
                arm=display.ad,
                slate=slate[index:],
                mode="imported",
                propensity=display.propensity,
                parameters_version=0,
                value=0.0,
            )
            yield topics.decisions, at, encode_event(decision)
    clicked = [position for position, display in enumerate(session, start=1) if display.clicked]
    passed = len(slate) if len(slate) >= passed_from else len(slate) - 1
    if position := clicked[0] if clicked else passed:
        answer = session[position - 1]
        time = answer.time if clicked else max(display.time for display in session)
        feedback = Feedback(session_id=name, occurred_at=time, position=position, arm=answer.ad, clicked=bool(clicked))
        yield topics.clicks, time, encode_event(feedback)


def _whole_seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000) * 1000
