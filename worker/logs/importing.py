"""The history of another system as a log: version 0, and an arrival, decisions and feedback per session.

Rules that hold in this file:

- The slate of a session is what was displayed, in mode `imported`, under version 0. A position has its own decision if
  its propensity is known; position 1 always has one.
- The feedback is the click. Without a click, a session has passed its last display if no session of the table is
  longer, or if unanswered displays count as passed; else the user left there, and passed the display before it.
- A bad row ends the import, or its whole session is left out and the row counted (`skip_bad`). Nothing is written
  before all rows are checked, and an arrival is checked by the rules for records, so learning refuses none of it.
- The settings of version 0 fit the history: no session is longer than the horizon or the timeout, and a window has
  about 500 sessions, or a 200th of them, so that learning takes seconds.
- Rows may be in any order: a temporary database sorts them. The same file and settings give the same bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import orjson

from worker.errors import InputError
from worker.logs.findings import Stage, silent, ticking
from worker.logs.format import LogWriter, cannot_sort, temporary_database
from worker.logs.impressions import OTHER_COLUMN, Impression, RowReader
from worker.logs.tables import FORMATS, BadRowError, Row
from worker.stream.decoding import Limits, Rejected, decode_arrival
from worker.stream.encoding import encode_decision, encode_feedback
from worker.stream.events import Decision, Feedback
from worker.stream.features import context_encoder
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, check_columns
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import version_key

#: Sessions of a window, at least, and windows of a history, at most; both about.
WINDOW_SESSIONS: Final = 500
MOST_WINDOWS: Final = 200


class _Session(NamedTuple):
    session_id: str
    arrived_at: int
    last_at: int
    clicked: bool
    repeats: bool
    arrival: bytes
    ads: str  # JSON, as the propensities
    propensities: str


_TABLES: Final = f"""
    CREATE TABLE impressions ({", ".join(Impression._fields)});
    CREATE TABLE sessions ({", ".join(_Session._fields)}, PRIMARY KEY (session_id)) WITHOUT ROWID;
"""
_BY_SESSION: Final = "SELECT * FROM impressions ORDER BY session, place, time, row"
_BY_TIME: Final = "SELECT * FROM sessions ORDER BY arrived_at, session_id"
_EXTENT: Final = """
    SELECT count(*) sessions, sum(json_array_length(ads)) displays, sum(clicked), min(arrived_at), max(last_at),
           max(json_array_length(ads)), max(last_at - arrived_at), max(repeats) FROM sessions
"""
_PRICES: Final = """
    SELECT ad, coalesce(avg(CASE WHEN clicked THEN revenue END), avg(revenue)) FROM impressions
    WHERE session IN (SELECT session_id FROM sessions) GROUP BY ad ORDER BY min(row)
"""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """The result of an import.

    bad : by reason, the number of rows, the first of them, and its defect
    unpriced : ads of which no revenue was known, so that they got the mean of the others
    """

    rows: int = 0
    sessions: int = 0
    displays: int = 0
    clicks: int = 0
    first_at: int = 0
    last_at: int = 0
    times: str = ""
    unpriced: list[str] = field(default_factory=list)
    bad: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    sessions_left_out: int = 0

    @property
    def first_bad(self) -> str:
        """The first bad row, for an error."""
        rows = sorted(self.bad.values(), key=lambda bad: bad[1])
        return f"; row {rows[0][1]}: {rows[0][2]}" if rows else ""


@dataclass(kw_only=True)
class HistoryImport:
    """Reads a table of impressions, checks its sessions, and writes them as a log.

    `columns` and `context` are the columns that flags give, `settings` those of version 0. Without `arms`, the ads are
    those of the table, with the mean revenue of their clicks; `worth` is that of a click where the table has none.
    """

    path: str
    format: str
    columns: Mapping[str, str]
    context: Sequence[tuple[str, str]] = ()
    settings: dict[str, Any]
    arms: Mapping[str, Arm]
    worth: float | None = None
    skip_bad: bool = False
    stage: Stage = silent
    report: ImportReport = field(default_factory=ImportReport)
    _bad_sessions: set[str] = field(default_factory=set)
    _accepted: dict[str, Any] = field(default_factory=dict)

    def run(self, output: str, topics: Topics) -> Parameters:
        """Import the table; return version 0."""
        with closing(temporary_database(_TABLES)) as database:
            try:
                with self.stage("reading", None) as bar:
                    _insert(database, "impressions", Impression, ticking(self._read(), bar))
                with self.stage("sorting", self.report.rows) as bar:
                    rows = map(Impression._make, ticking(database.execute(_BY_SESSION), bar))
                    _insert(database, "sessions", _Session, self._sessions(rows))
                version, longest = self._first_version(database)
                with self.stage("writing", self.report.sessions) as bar, LogWriter(output) as log:
                    first = (version_key(0), encode_parameters(version))
                    log(Record(topics.parameters, ONLY_PARTITION, 0, self.report.first_at, *first))
                    passed_from = 1 if version.settings.unanswered == "passed" else longest
                    for one in map(_Session._make, ticking(database.execute(_BY_TIME), bar)):
                        for topic, time, value in _events(topics, one, passed_from):
                            log(Record(topic, ONLY_PARTITION, log.lines, time, one.session_id.encode(), value))
            except sqlite3.Error as error:
                raise cannot_sort(error) from None
        return version

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> Iterator[Impression]:
        reader: RowReader | None = None
        for number, row in FORMATS[self.format](self.path):
            self.report.rows += 1
            session = ""
            try:
                if isinstance(row, BadRowError):
                    raise row
                reader = reader or self._reader(row)
                session = reader.session(number, row)
                one = reader.read(number, session, row)
                if self.arms and one.ad not in self.arms:
                    near = get_close_matches(one.ad, self.arms, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else "add it, with active = false if it is retired"
                    raise BadRowError("ad is not in the catalogue", f" ({one.ad!r}); {hint}")
                yield one
            except BadRowError as error:
                self._leave_out(number, error, session)
        if reader is None:
            raise InputError(f"{self.path}: it has no usable rows{self.report.first_bad}")
        for name, column in reader.unseen.items():
            raise InputError(f"{self.path}: no row has a value in {column!r}: {OTHER_COLUMN.format(name=name)}")
        self.report.times = reader.unit

    def _reader(self, first: Row) -> RowReader:
        declared: Any = self.settings.get("features")
        features = declared.context if declared is not None else ()
        try:
            reader = RowReader(first, self.format, self.columns, self.context, features)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        self.settings["dim"] = dim = declared.dim if features else reader.dim
        standardise = self.settings.get("standardise", True)
        self._accepted = {"dim": dim, "encoder": context_encoder(declared), "standardise": standardise}
        return reader

    def _leave_out(self, row: int, error: BadRowError, session: str) -> None:
        if not self.skip_bad:
            raise InputError(f"{self.path}, row {row}: {error} (--skip-bad leaves such sessions out)")
        count, first, defect = self.report.bad.get(error.reason, (0, row, str(error)))
        self.report.bad[error.reason] = (count + 1, *min((first, defect), (row, str(error))))
        if session not in self._bad_sessions:
            self.report.sessions_left_out += 1
            self._bad_sessions.update([session] if session else [])

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sessions(self, rows: Iterable[Impression]) -> Iterator[_Session]:
        for session, group in groupby(rows, key=attrgetter("session")):
            displays = list(group)
            if session not in self._bad_sessions:
                try:
                    _check(displays)
                    yield self._session(session, displays)
                except BadRowError as error:
                    self._leave_out(error.row, error, session)

    def _session(self, session: str, displays: Sequence[Impression]) -> _Session:
        times, ads = [one.time for one in displays], [one.ad for one in displays]
        context = orjson.Fragment(displays[0].context)
        arrival = orjson.dumps({"session_id": session, "occurred_at": min(times), "context": context})
        try:
            decode_arrival(arrival, timestamp=min(times), limits=Limits(), **self._accepted)
        except Rejected as error:
            raise BadRowError("a worker would refuse the arrival", f" ({error})", row=displays[0].row) from None
        clicked, repeats = bool(displays[-1].clicked), len(set(ads)) < len(ads)
        columns = (orjson.dumps(column).decode() for column in (ads, [one.propensity for one in displays]))
        return _Session(session, min(times), max(times), clicked, repeats, arrival, *columns)

    # ── version 0 ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _first_version(self, database: sqlite3.Connection) -> tuple[Parameters, int]:
        """Return version 0, whose settings fit the history, and the number of displays of the longest session."""
        found = self.report
        (found.sessions, found.displays, found.clicks, found.first_at, found.last_at, longest, span, repeats) = (
            database.execute(_EXTENT).fetchone()
        )
        if not found.sessions:
            raise InputError(f"{self.path}: no session is left{found.first_bad}")
        arms = tuple(self.arms.values()) or self._priced(dict(database.execute(_PRICES).fetchall()))
        settings = LearningSettings(**self.settings)
        window = (found.last_at - found.first_at) * max(WINDOW_SESSIONS, found.sessions // MOST_WINDOWS)
        settings = replace(
            settings,
            repeats=settings.repeats or bool(repeats),
            horizon=max(longest, self.settings.get("horizon", 0)),
            session_timeout=max(settings.session_timeout, _whole_seconds(span)),
            window=max(settings.window, _whole_seconds(window // found.sessions)),
        )
        check_columns(settings, len(arms))
        return Parameters.first(settings, arms), longest

    def _priced(self, prices: Mapping[str, float | None]) -> tuple[Arm, ...]:
        """Return the ads of the table with the mean revenue of their clicks; where it is not known, the mean of all."""
        known = [price for price in prices.values() if price]
        mean = sum(known) / len(known) if known else self.worth
        if mean is None:
            raise InputError(f"{self.path}: no revenue of a click is known: give --catalog FILE or --revenue-column")
        self.report.unpriced = [ad for ad, price in prices.items() if known and not price]
        return tuple(Arm(arm=ad, reward=price or mean) for ad, price in prices.items())


def _check(displays: Sequence[Impression]) -> None:
    """Raise if the displays of a session, by their positions, are not those of a cascade."""
    clicked, has_positions = None, any(one.place for one in displays)
    for expected, one in enumerate(displays, start=1):
        if has_positions and one.place != expected:
            what = "position is there twice" if 0 < one.place < expected else "position before it is missing"
            raise BadRowError(what, f" (position {one.place} in place of {expected})", row=one.row)
        if clicked is not None:
            what = "second click of the session" if one.clicked else "display after the click"
            raise BadRowError(what, f" in row {clicked.row}: a session ends with its click", row=one.row)
        if one.context != displays[0].context:
            raise BadRowError("context differs within the session", f", from row {displays[0].row}", row=one.row)
        clicked = one if one.clicked else None


def _events(topics: Topics, one: _Session, passed_from: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield topic, time and value of the records of a session.

    A session of `passed_from` displays or more has passed all of them, unless it has a click.
    """
    yield topics.arrivals, one.arrived_at, one.arrival
    ads, propensities = tuple(orjson.loads(one.ads)), orjson.loads(one.propensities)
    for at, propensity in enumerate(propensities):
        if at == 0 or propensity is not None:
            decision = Decision(
                session_id=one.session_id,
                arrived_at=one.arrived_at,
                position=at + 1,
                arm=ads[at],
                slate=ads[at:],
                mode="imported",
                propensity=propensity,
                parameters_version=0,
                value=0.0,
            )
            yield topics.decisions, one.arrived_at, encode_decision(decision)
    if answered := len(ads) if one.clicked or len(ads) >= passed_from else len(ads) - 1:
        feedback = Feedback(
            session_id=one.session_id,
            occurred_at=one.last_at,
            position=answered,
            arm=ads[answered - 1],
            clicked=bool(one.clicked),
        )
        yield topics.clicks, one.last_at, encode_feedback(feedback)


def _insert(database: sqlite3.Connection, table: str, kind: type[Any], rows: Iterable[Sequence[Any]]) -> None:
    database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(kind._fields))})", rows)


def _whole_seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000) * 1000
