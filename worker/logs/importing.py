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

import msgspec
import orjson

from worker.errors import InputError
from worker.logs.findings import Stage, silent, ticking
from worker.logs.format import LogWriter, cannot_sort, temporary_database
from worker.logs.impressions import Impression, RowReader
from worker.logs.tables import BadRowError, Row, read_rows
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

_TABLES: Final = """
    CREATE TABLE impressions (session, place, time, row, ad, clicked, propensity, revenue, context);
    CREATE TABLE sessions (session PRIMARY KEY, arrived_at, last_at, displays, clicked, repeats, value) WITHOUT ROWID;
"""
_BY_SESSION: Final = "SELECT * FROM impressions ORDER BY session, place, time, row"
_EXTENT: Final = """
    SELECT count(*), sum(displays), sum(clicked), min(arrived_at), max(last_at), max(displays),
           max(last_at - arrived_at), max(repeats) FROM sessions
"""
_PRICES: Final = """
    SELECT ad, avg(CASE WHEN clicked THEN revenue END), avg(revenue) FROM impressions
    WHERE session IN (SELECT session FROM sessions) GROUP BY ad ORDER BY min(row)
"""


class _Session(NamedTuple):
    session_id: str
    arrived_at: int
    last_at: int
    arrival: bytes
    ads: tuple[str, ...]
    propensities: tuple[float | None, ...]
    clicked: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Session).decode


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
    ads: int = 0
    unpriced: list[str] = field(default_factory=list)
    bad: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    sessions_left_out: int = 0
    horizon: int = 0
    window: int = 0
    session_timeout: int = 0


class HistoryImport:
    """Reads a table of impressions, checks its sessions, and writes them as a log.

    `columns` and `context` are the columns that flags give, `settings` those of version 0. Without `arms`, the ads are
    those of the table, with the mean revenue of their clicks; `worth` is that of a click where the table has none.
    """

    def __init__(
        self,
        path: str,
        format: str,
        *,
        columns: Mapping[str, str],
        context: Sequence[tuple[str, str]] = (),
        settings: Mapping[str, Any] | None = None,
        arms: Sequence[Arm] = (),
        worth: float | None = None,
        skip_bad: bool = False,
        stage: Stage = silent,
    ) -> None:
        self._path, self._format, self._skip_bad, self._stage = path, format, skip_bad, stage
        self._columns, self._context, self._worth = columns, context, worth
        self._settings = dict(settings or {})
        self._arms = {arm.arm: arm for arm in arms}
        self._bad_sessions: set[str] = set()
        self._database = temporary_database(_TABLES)
        self.report = ImportReport()

    def run(self, output: str, topics: Topics) -> ImportReport:
        """Import the table; return what it had."""
        database, report = self._database, self.report
        with closing(database):
            try:
                with self._stage("reading", None) as bar:
                    _insert(database, "impressions", 9, ticking(self._read(), bar))
                with self._stage("sorting", report.rows) as bar:
                    rows = map(Impression._make, ticking(database.execute(_BY_SESSION), bar))
                    _insert(database, "sessions", 7, self._sessions(rows))
                version = self._first_version()
                with self._stage("writing", report.sessions) as bar, LogWriter(output) as log:
                    log(_record(topics.parameters, 0, report.first_at, version_key(0), encode_parameters(version)))
                    query = "SELECT value FROM sessions ORDER BY arrived_at, session"
                    self._write(log, topics, version.settings, ticking(database.execute(query), bar))
            except sqlite3.Error as error:
                raise cannot_sort(error) from None
        return report

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> Iterator[Impression]:
        reader: RowReader | None = None
        for number, row in read_rows(self._path, self._format):
            self.report.rows += 1
            session = ""
            try:
                if isinstance(row, BadRowError):
                    raise row
                reader = reader or self._reader(row)
                session = reader.session(number, row)
                one = reader.read(number, session, row)
                if self._arms and one.ad not in self._arms:
                    near = get_close_matches(one.ad, self._arms, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else "add it, with active = false if it is retired"
                    raise BadRowError("ad is not in the catalogue", f" ({one.ad!r}); {hint}")
                yield one
            except BadRowError as error:
                self._leave_out(number, error, session)
        if reader is None:
            raise InputError(f"{self._path}: it has no usable rows{self._first_bad()}")
        for name, column in reader.unseen.items():
            raise InputError(
                f"{self._path}: no row has a value in {column!r}: give --context-columns {name}=COLUMN, or {name}= if "
                "the history lacks it"
            )
        self.report.times = reader.unit

    def _reader(self, first: Row) -> RowReader:
        declared = self._settings.get("features")
        features = declared.context if declared is not None else ()
        try:
            reader = RowReader(first, self._format, self._columns, self._context, features)
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from None
        self._settings["dim"] = declared.dim if features else reader.dim
        return reader

    def _leave_out(self, row: int, error: BadRowError, session: str) -> None:
        if not self._skip_bad:
            raise InputError(f"{self._path}, row {row}: {error} (--skip-bad leaves such sessions out)")
        count, first, defect = self.report.bad.get(error.reason, (0, row, str(error)))
        self.report.bad[error.reason] = (count + 1, *min((first, defect), (row, str(error))))
        if session not in self._bad_sessions:
            self.report.sessions_left_out += 1
            self._bad_sessions.update([session] if session else [])

    def _first_bad(self) -> str:
        rows = sorted(self.report.bad.values(), key=lambda bad: bad[1])
        return f"; row {rows[0][1]}: {rows[0][2]}" if rows else ""

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sessions(self, rows: Iterable[Impression]) -> Iterator[tuple[Any, ...]]:
        for session, group in groupby(rows, key=attrgetter("session")):
            displays = list(group)
            if session in self._bad_sessions:
                continue
            try:
                one = self._session(session, displays)
            except _BadDisplayError as error:
                self._leave_out(error.row, error, session)
                continue
            repeats = len(set(one.ads)) < len(one.ads)
            yield session, one.arrived_at, one.last_at, len(one.ads), one.clicked, repeats, _encode(one)

    def _session(self, session: str, displays: Sequence[Impression]) -> _Session:
        _check(displays)
        times = [one.time for one in displays]
        context = orjson.Fragment(displays[0].context)
        arrival = orjson.dumps({"session_id": session, "occurred_at": min(times), "context": context})
        given = self._settings
        try:
            decode_arrival(
                arrival,
                limits=Limits(),
                dim=given["dim"],
                timestamp=min(times),
                encoder=context_encoder(given.get("features")),
                standardise=given.get("standardise", True),
            )
        except Rejected as error:
            raise _BadDisplayError(displays[0], "a worker would refuse the arrival", f" ({error})") from None
        ads, propensities = (tuple(getattr(one, name) for one in displays) for name in ("ad", "propensity"))
        return _Session(session, min(times), max(times), arrival, ads, propensities, bool(displays[-1].clicked))

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _first_version(self) -> Parameters:
        """Return version 0, whose settings fit the history."""
        report = self.report
        extent = self._database.execute(_EXTENT).fetchone()
        if not extent[0]:
            raise InputError(f"{self._path}: no session is left{self._first_bad()}")
        report.sessions, report.displays, report.clicks, report.first_at, report.last_at, longest, span, repeats = extent
        arms = tuple(self._arms.values()) or self._priced_ads()
        given = self._settings | ({"repeats": True} if repeats else {})
        settings = LearningSettings(**given)
        window = (report.last_at - report.first_at) * max(WINDOW_SESSIONS, report.sessions // MOST_WINDOWS)
        settings = replace(
            settings,
            horizon=max(longest, given.get("horizon", 0)),
            session_timeout=max(settings.session_timeout, _whole_seconds(span)),
            window=max(settings.window, _whole_seconds(window // report.sessions)),
        )
        check_columns(settings, len(arms))
        self._longest, report.ads = longest, len(arms)
        report.horizon, report.window, report.session_timeout = (
            settings.horizon,
            settings.window,
            settings.session_timeout,
        )
        return Parameters.first(settings, arms)

    def _priced_ads(self) -> tuple[Arm, ...]:
        """Return the ads of the table, in the order of their first rows, with the mean revenue of their clicks."""
        prices = {ad: clicks or displays for ad, clicks, displays in self._database.execute(_PRICES)}
        known = [price for price in prices.values() if price]
        if not known and self._worth is None:
            raise InputError(
                f"{self._path}: no revenue of a click is known: give --catalog FILE, with arm and reward, or "
                "--revenue-column"
            )
        mean = sum(known) / len(known) if known else self._worth
        self.report.unpriced = [ad for ad, price in prices.items() if known and not price]
        return tuple(Arm(arm=ad, reward=price or mean) for ad, price in prices.items())

    def _write(
        self, log: LogWriter, topics: Topics, settings: LearningSettings, values: Iterable[tuple[bytes]]
    ) -> None:
        decisions = clicks = 0
        for number, (value,) in enumerate(values):
            one = _decode(value)
            key = one.session_id.encode()
            log(_record(topics.arrivals, number, one.arrived_at, key, one.arrival))
            for at, propensity in enumerate(one.propensities):
                if at == 0 or propensity is not None:
                    decision = encode_decision(_decision(one, at))
                    log(_record(topics.decisions, decisions, one.arrived_at, key, decision))
                    decisions += 1
            shown = len(one.ads)
            answered = shown if one.clicked or shown == self._longest or settings.unanswered == "passed" else shown - 1
            if answered:
                feedback = Feedback(
                    session_id=one.session_id,
                    occurred_at=one.last_at,
                    position=answered,
                    arm=one.ads[answered - 1],
                    clicked=one.clicked,
                )
                log(_record(topics.clicks, clicks, one.last_at, key, encode_feedback(feedback)))
                clicks += 1


class _BadDisplayError(BadRowError):
    def __init__(self, display: Impression, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.row = display.row


def _check(displays: Sequence[Impression]) -> None:
    """Raise if the displays of a session, by their positions, are not those of a cascade."""
    clicked, has_positions = None, any(one.place for one in displays)
    for expected, one in enumerate(displays, start=1):
        if has_positions and one.place != expected:
            what = "position is there twice" if 0 < one.place < expected else "position is missing before this one"
            raise _BadDisplayError(one, what, f" ({one.place} in place of {expected})")
        if clicked is not None:
            what = "second click in a session" if one.clicked else "display after the click"
            raise _BadDisplayError(one, what, f" in row {clicked.row}: a session ends with its click")
        if one.context != displays[0].context:
            raise _BadDisplayError(one, "another context than in the same session", f" in row {displays[0].row}")
        clicked = one if one.clicked else None


def _decision(one: _Session, at: int) -> Decision:
    return Decision(
        session_id=one.session_id,
        arrived_at=one.arrived_at,
        position=at + 1,
        arm=one.ads[at],
        slate=one.ads[at:],
        mode="imported",
        propensity=one.propensities[at],
        parameters_version=0,
        value=0.0,
    )


def _record(topic: str, offset: int, time: int, key: bytes, value: bytes) -> Record:
    return Record(topic, ONLY_PARTITION, offset, time, key, value)


def _insert(database: sqlite3.Connection, table: str, columns: int, rows: Iterable[Sequence[Any]]) -> None:
    database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)


def _whole_seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000) * 1000
