"""The state folder: one SQLite database with sessions, journal, parameters and their history.

Rules that hold in this file:

- One process writes, in transactions: one for each batch of `adcascade serve`. After a `kill -9` the folder holds all
  of a batch or nothing of it.
- The folder itself is locked by the process that writes. The lock ends with the process.
- Others read while it writes, in snapshots (WAL mode): the learner of `serve`, and commands.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from worker.errors import FailedError, InputError
from worker.stream.events import Tag
from worker.stream.history import HOUR, KeptVersion, changes, tag_slot
from worker.stream.parameters import Parameters, decode_parameters

_SCHEMA: Final = """
CREATE TABLE sessions (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE journal (offset INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE parameters (version INTEGER PRIMARY KEY, made_at INTEGER NOT NULL, value BLOB NOT NULL);
CREATE TABLE history
    (slot TEXT PRIMARY KEY, version INTEGER NOT NULL, made_at INTEGER NOT NULL, value BLOB NOT NULL);
CREATE TABLE log (number INTEGER PRIMARY KEY, lines BLOB NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
FORMAT: Final = b"2"
FILE: Final = "state.sqlite3"
NO_STATE: Final = "{} holds no state; `adcascade serve --state DIR` creates one"
#: Names of marks: where the journal begins that the first version of an hour needs, which the history has for a week.
_MARK: Final = "mark/"
#: Records of the journal that a version deletes, besides twice as many as were appended: answers wait meanwhile.
DELETED_AT_ONCE: Final = 1_000
#: Pages of the write-ahead log after which a commit moves them to the database, if the learner has not done so before.
CHECKPOINT: Final = 4_000


class StateView:
    """Reads a state folder, also while a process writes to it; a context manager."""

    _db: sqlite3.Connection

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._closing = ExitStack()
        if not (self.path / FILE).exists():
            raise InputError(NO_STATE.format(self.path))
        with self._opening():
            self._db.execute("PRAGMA query_only=1")
            self._check_format()

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Connect to the database; close everything again if what follows fails."""
        file = self.path / FILE
        with ExitStack() as failing:
            failing.callback(self.close)
            try:
                self._db = sqlite3.connect(file, isolation_level=None, timeout=10.0, check_same_thread=False)
                self._closing.callback(self._db.close)
                yield
            except sqlite3.Error as error:
                raise InputError(f"{file} is not a state file of adcascade: {error}") from None
            failing.pop_all()

    def _check_format(self) -> None:
        stored = self.meta("format")
        if stored != FORMAT:
            raise InputError(
                f"{self.path} was written by another release of adcascade (format {(stored or b'?').decode()}): begin "
                "with a folder of its own. From a log, `adcascade replay LOG --relearn --dim N --catalog ARMS "
                "--output FILE` learns what --start-from FILE begins with"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop uncommitted changes, and release the lock if there is one."""
        self._closing.close()

    def sessions(self) -> Iterable[tuple[bytes, bytes]]:
        """Yield the session table."""
        yield from self._db.execute("SELECT key, value FROM sessions")

    def parameters(self) -> list[bytes]:
        """Return the records of the versions kept, oldest first."""
        return [value for (value,) in self._db.execute("SELECT value FROM parameters ORDER BY version")]

    def slots(self) -> dict[str, KeptVersion]:
        """Return the versions in the history, by slot."""
        return {
            slot: KeptVersion(version, made_at)
            for slot, version, made_at in self._db.execute("SELECT slot, version, made_at FROM history")
        }

    def in_slot(self, slot: str) -> bytes | None:
        """Return the record of a version in the history."""
        row = self._db.execute("SELECT value FROM history WHERE slot = ?", (slot,)).fetchone()
        return None if row is None else bytes(row[0])

    def load(self, slot: str) -> Parameters | None:
        """Return the version in a slot of the history."""
        value = self.in_slot(slot)
        return None if value is None else decode_parameters(value)

    def journal(self, start: int = 0, most: int = -1) -> Iterable[tuple[int, bytes]]:
        """Yield the journal from an offset on: all of it, or at most `most` records."""
        query = "SELECT offset, value FROM journal WHERE offset >= ? ORDER BY offset LIMIT ?"
        yield from self._db.execute(query, (start, most))

    def journal_bounds(self) -> tuple[int, int]:
        """Return the first offset kept and the next one to be written. The last record is always kept."""
        first, last = self._db.execute("SELECT min(offset), max(offset) FROM journal").fetchone()
        return (0, 0) if first is None else (first, last + 1)

    def log(self) -> bytes:
        """Return the lines that may be missing at the end of the log of `adcascade serve --record`."""
        return b"".join(lines for (lines,) in self._db.execute("SELECT lines FROM log ORDER BY number"))

    def checkpoint(self) -> None:
        """Move what was committed from the write-ahead log to the database, while the writer goes on."""
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def meta(self, name: str) -> bytes | None:
        """Return a named value."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])


class StateFolder(StateView):
    """Opens or creates a state folder and locks it; a context manager.

    Nothing is on disk before `commit`. What is committed survives the process and a failure of power. The journal of
    the last `keep` milliseconds stays, from the hour before on, so that all versions of that time can be made again
    from one that the history has.
    """

    def __init__(self, path: str | Path, *, create: bool = True, keep: int = 0) -> None:
        self.path = Path(path)
        self._keep = keep
        self._appended = 0
        if not create and not (self.path / FILE).exists():
            raise InputError(NO_STATE.format(self.path))
        self._closing = ExitStack()
        self._closing.callback(os.close, _locked(self.path))
        with self._opening():
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT}")
            self._db.execute("PRAGMA synchronous=FULL")
            if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                self._db.executescript(
                    f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('format', x'{FORMAT.hex()}'); COMMIT"
                )
            self._check_format()
            self._db.execute("BEGIN")

    def set_meta(self, name: str, value: bytes | None) -> None:
        """Set a named value, or delete it."""
        if value is None:
            self._db.execute("DELETE FROM meta WHERE name = ?", (name,))
        else:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def change_sessions(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Apply a changelog; None deletes a session."""
        last = dict(changes)
        self._db.executemany("DELETE FROM sessions WHERE key = ?", [(key,) for key in last if last[key] is None])
        kept = [(key, value) for key, value in last.items() if value is not None]
        self._db.executemany("INSERT OR REPLACE INTO sessions VALUES (?, ?)", kept)

    def append_journal(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Append records at their offsets."""
        self._db.executemany("INSERT INTO journal VALUES (?, ?)", records)
        self._appended += len(records)

    def put_parameters(self, parameters: Parameters, value: bytes, *, kept: int) -> None:
        """Keep a version; drop those older than the last `kept`, and the part of the journal that is not kept."""
        row = (parameters.version, parameters.made_at, value)
        self._db.execute("INSERT OR REPLACE INTO parameters VALUES (?, ?, ?)", row)
        self._db.execute("DELETE FROM parameters WHERE version <= ?", (parameters.version - kept,))
        first, end = self.journal_bounds()
        most = first + 2 * self._appended + DELETED_AT_ONCE
        self._db.execute("DELETE FROM journal WHERE offset < ?", (min(self._needed(parameters), most, end - 1),))
        self._appended = 0

    def _needed(self, parameters: Parameters) -> int:
        """Return the first offset of the journal to keep, now that there is a version."""
        if not self._keep:
            return parameters.resume_offset
        hour = max(parameters.progress.values(), default=0) // HOUR
        mark = (f"{_MARK}{hour:012}", b"%d" % parameters.resume_offset)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", mark)
        # The first version of an hour may be later than the time that is asked for, that of the hour before is not.
        since = f"{_MARK}{max(0, hour - self._keep // HOUR - 1):012}"
        oldest = "SELECT max(name) FROM meta WHERE name BETWEEN ? AND ?"
        self._db.execute(f"DELETE FROM meta WHERE name >= ? AND name < ({oldest})", (_MARK, _MARK, since))
        marks = "SELECT value FROM meta WHERE name >= ? ORDER BY name LIMIT 1"
        return min(int(self._db.execute(marks, (_MARK,)).fetchone()[0]), parameters.resume_offset)

    def erase(self, sessions: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Delete sessions, and records of the journal, also from the pages of the file that are free then."""
        self._db.execute("PRAGMA secure_delete=ON")
        self._db.executemany("DELETE FROM sessions WHERE key = ?", [(key,) for key in sessions])
        self._db.executemany("DELETE FROM journal WHERE offset = ?", [(offset,) for offset in offsets])

    def append_log(self, lines: bytes) -> None:
        """Keep lines that are about to be written to the log."""
        self._db.execute("INSERT INTO log (lines) VALUES (?)", (lines,))

    def clear_log(self) -> None:
        """Forget the lines, now that they are in the log."""
        self._db.execute("DELETE FROM log")

    def commit(self) -> None:
        """Make all changes since the last commit durable. In any thread, one at a time."""
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")

    # ── the history of the versions ──────────────────────────────────────────────────────────────────────────────────

    def keep_history(self, versions: Sequence[Parameters]) -> None:
        """Add the last versions to the history, where they are missing, and thin it (see `worker.stream.history`)."""
        written, gone = changes(self.slots(), versions)
        self._db.executemany(
            "INSERT OR REPLACE INTO history SELECT ?, version, made_at, value FROM parameters WHERE version = ?",
            [(slot, parameters.version) for slot, parameters in written.items()],
        )
        self._db.executemany("DELETE FROM history WHERE slot = ?", [(slot,) for slot in gone])

    def tag(self, tag: Tag) -> bool:
        """Give a version its name, or remove the name; return False if the version is not kept."""
        slot = tag_slot(tag.name)
        if tag.version is None:
            self._db.execute("DELETE FROM history WHERE slot = ?", (slot,))
            return True
        known = "SELECT version, made_at, value FROM parameters UNION ALL SELECT version, made_at, value FROM history"
        tagged = self._db.execute(
            f"INSERT OR REPLACE INTO history SELECT ?, * FROM ({known}) WHERE version = ? LIMIT 1", (slot, tag.version)
        )
        return tagged.rowcount > 0


def _locked(path: Path) -> int:
    """Create a folder if it does not exist, and lock it; return the open file that holds the lock."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has contexts of users
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"cannot use {path} as a state folder: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise FailedError(f"another process uses the state folder {path}; stop it first") from None
    return file
