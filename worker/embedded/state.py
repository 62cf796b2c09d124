"""The state folder of the embedded runner: sessions, journal, parameters and their history.

One SQLite file and one transaction per step of the runner: after a `kill -9` the folder holds all of a step or nothing
of it. A lock file keeps a second process out.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Self

from worker.errors import FailedError, InputError
from worker.stream.history import KeptVersion

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (offset INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS parameters (version INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS history
    (slot TEXT PRIMARY KEY, version INTEGER NOT NULL, made_at INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
FORMAT = b"1"
FILE = "state.sqlite3"


class FolderLock:
    """The lock of a state folder, created if it does not exist; processes that are given `file` hold it too."""

    def __init__(self, path: str | Path, *, wait: float = 0.0) -> None:
        """Take the lock; wait so many seconds for another process to end."""
        path = Path(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has contexts of users
            self.file = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"cannot use {path} as a state folder: {error.strerror or error}") from None
        deadline = monotonic() + wait
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if monotonic() < deadline:
                    sleep(0.02)
                    continue
                os.close(self.file)
                raise FailedError(f"another process uses the state folder {path}; stop it first") from None
            return

    def release(self) -> None:
        """Release the lock, once."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class InheritedLock(FolderLock):
    """The lock of a folder that the process which started this one holds."""

    def __init__(self, file: int) -> None:
        self.file = file


class StateView:
    """Reads a state folder, also while a process uses it; a context manager."""

    path: Path
    _db: sqlite3.Connection

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / FILE
        if not file.exists():
            raise InputError(f"{self.path} holds no state; `adcascade demo` and `adcascade serve` create one (--state)")
        try:
            self._db = sqlite3.connect(file, isolation_level=None, timeout=10.0, check_same_thread=False)
            self._db.execute("PRAGMA query_only=1")
            self.meta("format")
        except sqlite3.Error as error:
            raise InputError(f"{file} is not a state file of adcascade: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End reading."""
        self._db.close()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sessions(self) -> Iterable[tuple[bytes, bytes]]:
        """Yield the session table."""
        yield from self._db.execute("SELECT key, value FROM sessions")

    def parameters(self, after: int = -1) -> list[bytes]:
        """Return the records of the versions kept, those after a version, oldest first."""
        query = "SELECT value FROM parameters WHERE version > ? ORDER BY version"
        return [value for (value,) in self._db.execute(query, (after,))]

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

    def journal(self, start: int) -> Iterable[tuple[int, bytes]]:
        """Yield the journal from an offset."""
        yield from self._db.execute("SELECT offset, value FROM journal WHERE offset >= ? ORDER BY offset", (start,))

    def journal_bounds(self) -> tuple[int, int]:
        """Return the first offset kept and the next one to be written."""
        first, last = self._db.execute("SELECT min(offset), max(offset) FROM journal").fetchone()
        end = int(self.meta("journal_end") or b"0")
        return (end, end) if first is None else (first, max(end, last + 1))

    def meta(self, name: str) -> bytes | None:
        """Return a named value."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])


class StateFolder(StateView):
    """Opens or creates a state folder and locks it; a context manager.

    Nothing is on disk before `commit`. With `lock`, the folder is not locked here: it is an open lock file of the
    process that this one belongs to. With `durable`, what is committed survives a failure of power, too.
    """

    def __init__(
        self, path: str | Path, *, create: bool = True, lock: FolderLock | None = None, durable: bool = False
    ) -> None:
        self.path = Path(path)
        file = self.path / FILE
        if not create and not file.exists():
            raise InputError(f"{self.path} holds no state; `adcascade demo --state {self.path}` creates one")
        self._lock = lock or FolderLock(self.path)
        try:
            self._db = sqlite3.connect(file, isolation_level=None)
            # Survives a kill of the process. A power failure may lose the last steps, but not the consistency.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.executescript(_SCHEMA)
            stored = self.meta("format")
            self._db.execute("BEGIN")
        except sqlite3.Error as error:
            self._lock.release()
            raise InputError(f"{file} is not a state file of adcascade: {error}") from None
        if stored is None:
            self.set_meta("format", FORMAT)
            self.commit()
        elif stored != FORMAT:
            self.close()
            raise InputError(f"{self.path} was written by another version of adcascade (format {stored.decode()})")

    def close(self) -> None:
        """Drop uncommitted changes and release the lock."""
        self._db.close()
        self._lock.release()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_meta(self, name: str, value: bytes) -> None:
        """Set a named value."""
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
        if records:
            self.set_meta("journal_end", b"%d" % (records[-1][0] + 1))

    def put_parameters(self, version: int, value: bytes, *, kept: int, needed: int) -> None:
        """Keep a version; drop those older than the last `kept`, and the journal before offset `needed`."""
        self._db.execute("INSERT OR REPLACE INTO parameters VALUES (?, ?)", (version, value))
        self._db.execute("DELETE FROM parameters WHERE version <= ?", (version - kept,))
        self._db.execute("DELETE FROM journal WHERE offset < ?", (needed,))

    def put_slot(self, slot: str, kept: KeptVersion, value: bytes) -> None:
        """Put a version into a slot of the history."""
        row = (slot, kept.version, kept.made_at, value)
        self._db.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", row)

    def date_slots(self, made_at: int) -> None:
        """Set the time of the versions in the history that have none."""
        self._db.execute("UPDATE history SET made_at = ? WHERE made_at = 0", (made_at,))

    def delete_slot(self, slot: str) -> None:
        """Delete a slot of the history."""
        self._db.execute("DELETE FROM history WHERE slot = ?", (slot,))

    def commit(self) -> None:
        """Make all changes since the last commit durable."""
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")
