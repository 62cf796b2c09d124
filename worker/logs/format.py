r"""The log format: one record per line, JSON as `kcat -J` writes it.

::

    {"topic": "ads.clicks", "partition": 3, "offset": 17, "tstype": "create", "ts": 1700000000000,
     "headers": ["name", "value", …], "key": "session", "payload": "{\"session_id\": …}"}

Rules that hold in this file:

- Records are read back to the byte. JSON cannot hold bytes that are not UTF-8. Such a key or payload is written as
  base64 in `key_base64` or `payload_base64`, such header values in `headers_base64`. kcat writes these bytes as they
  are, which is not valid JSON; the reader replaces them (U+FFFD). Workers make dead letters of such records anyway.
- `payload` is a string, null, or JSON itself (the result of ``jq '.payload |= fromjson'``): then its text is the value.
  `ts` may be missing (kcat omits it if the broker has none) and is −1 then. Other fields are ignored.
- gzip is recognised by its first bytes, so standard input may be compressed. One line is in memory at a time.
- The error for a bad line has its number, counted from 1. Reading stops there, or continues and counts (`skip_bad`).
"""

from __future__ import annotations

import gzip
import io
import sqlite3
import sys
import zlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, TypeAlias, cast

import msgspec
import orjson
from msgspec import Meta, Raw

from worker.errors import AdcascadeError, FailedError, InputError
from worker.stream.events import MOST
from worker.stream.topology import Record

#: Longest line accepted; a version of 20,000 arms and 64 features has 18 MB.
MOST_LINE: Final = 64 * 1024 * 1024

NO_TIMESTAMP: Final = -1

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]


class Line(NamedTuple):
    """A record of a log, its headers, and its line number."""

    record: Record
    headers: Headers
    number: int


class BadLineError(InputError):
    """A line of a log cannot be read."""


# ── one line ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Envelope(msgspec.Struct, gc=False):
    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Natural
    ts: Annotated[int, Meta(ge=-MOST, le=MOST)] = NO_TIMESTAMP
    key: Raw = Raw(b"null")
    payload: Raw = Raw(b"")
    headers: Raw = Raw(b"")
    key_base64: str = ""
    payload_base64: str = ""
    headers_base64: list[str | None] | None = None


_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_string: Final = msgspec.json.Decoder(str).decode


def encode_line(record: Record, headers: Headers = ()) -> bytes:
    r"""Return a record as a line, with the line break.

    >>> encode_line(Record("ads.clicks", 0, 7, 5, b"s", b"\xff"))
    b'{"topic":"ads.clicks","partition":0,"offset":7,"tstype":"create","ts":5,"key":"s","payload_base64":"/w=="}\n'
    """
    line: dict[str, Any] = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    if record.timestamp != NO_TIMESTAMP:
        line["tstype"] = "create"
        line["ts"] = record.timestamp
    if headers:
        try:
            line["headers"] = _flat(headers, bytes.decode)
        except UnicodeDecodeError:
            line["headers_base64"] = _flat(headers, _base64)
    _put(line, "key", record.key)
    _put(line, "payload", record.value)
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _put(line: dict[str, Any], name: str, value: bytes | None) -> None:
    try:
        line[name] = None if value is None else value.decode()
    except UnicodeDecodeError:
        line[f"{name}_base64"] = _base64(cast(bytes, value))


def _flat(headers: Headers, text: Callable[[bytes], str]) -> list[str | None]:
    return [part for name, value in headers for part in (name, None if value is None else text(value))]


def _base64(value: bytes) -> str:
    return b64encode(value).decode("ascii")


def decode_line(text: bytes, number: int = 1) -> Line:
    """Read a line; raise `BadLineError` with the line number and the defect.

    >>> decode_line(b'{"topic":"ads.clicks","partition":0,"offset":7,"ts":5,"key":null,"payload":{"arm":"a"}}').record
    Record(topic='ads.clicks', partition=0, offset=7, timestamp=5, key=None, value=b'{"arm":"a"}')
    """
    try:
        try:
            return _line(_decode_envelope(text), number)
        except UnicodeDecodeError:
            return _line(_decode_envelope(text.decode(errors="replace").encode()), number)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise BadLineError(f"line {number}: {_defect(error)}") from None


def _line(envelope: _Envelope, number: int) -> Line:
    if not envelope.payload_base64 and not bytes(envelope.payload):
        raise ValueError("there is no payload")
    key, value = _bytes(envelope.key, envelope.key_base64), _bytes(envelope.payload, envelope.payload_base64)
    return Line(
        Record(envelope.topic, envelope.partition, envelope.offset, envelope.ts, key, value),
        _headers(envelope) if bytes(envelope.headers) or envelope.headers_base64 is not None else (),
        number,
    )


def _bytes(given: Raw, base64: str) -> bytes | None:
    if base64:
        return b64decode(base64, validate=True)
    text = bytes(given)
    return _decode_string(text).encode() if text[0] == 0x22 else None if text == b"null" else text


def _headers(envelope: _Envelope) -> Headers:
    flat = envelope.headers_base64
    if flat is not None:
        return [(name, None if value is None else b64decode(value, validate=True)) for name, value in _pairs(flat)]
    given = msgspec.json.decode(envelope.headers, type=list[str | None])
    return [(name, None if value is None else value.encode()) for name, value in _pairs(given)]


def _pairs(flat: Sequence[str | None]) -> list[tuple[str, str | None]]:
    if len(flat) % 2:
        raise ValueError("headers are not a list of names and values")
    return [(str(name), value) for name, value in zip(flat[::2], flat[1::2], strict=True)]


def _defect(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error).replace("Object missing required field", "there is no").replace("`", "")
    if isinstance(error, msgspec.DecodeError):
        return f"not JSON ({error})"
    if isinstance(error, Base64Error):
        return "invalid base64"
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    return str(error) or f"not readable ({type(error).__name__})"


# ── a file ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class LogReader:
    """Read a log (``-``: standard input) once, line by line; a context manager.

    With `skip_bad`, reading continues after a bad line, and accepts a truncated file; None if the user cannot choose.
    `lines` and `bad` count the lines read so far and those skipped; `first_bad` is the defect of the first line
    skipped. Of the bytes of each line after the first, `wanted` says whether it is to be decoded; all are by default.
    """

    def __init__(
        self, path: str | Path, *, skip_bad: bool | None = None, wanted: Callable[[bytes], bool] = lambda line: True
    ) -> None:
        self.lines = 0
        self.bad = 0
        self.first_bad = ""
        self._is_stdin = str(path) == "-"
        self.name = "standard input" if self._is_stdin else str(path)
        self._skip_bad = skip_bad
        self._wanted = wanted
        try:
            self._raw: BinaryIO = sys.stdin.buffer if self._is_stdin else Path(path).open("rb")  # noqa: SIM115 - see __exit__
            buffered = cast(io.BufferedReader, self._raw)
            compressed = buffered.peek(2)[:2] == b"\x1f\x8b"
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
        self._file: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw, mode="rb")) if compressed else self._raw

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._is_stdin:
            self._raw.close()

    def __iter__(self) -> Iterator[Line]:
        while text := self._readline():
            self.lines += 1
            if len(text) > MOST_LINE:
                self._handle_defect(f"line {self.lines}: longer than {MOST_LINE} bytes")
                while text and text[-1:] != b"\n":
                    text = self._readline()
                continue
            if self.lines > 1 and not self._wanted(text):
                continue
            try:
                line = decode_line(text, self.lines)
            except BadLineError as error:
                if not text.isspace():
                    self._handle_defect(str(error))
                continue
            yield line

    def _readline(self) -> bytes:
        """Return the next line, or a part of one that is too long; nothing at the end, or where gzip data break off."""
        try:
            return self._file.readline(MOST_LINE + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._handle_defect(f"the gzip data breaks off after line {self.lines}: {error}")
            return b""
        except OSError as error:
            raise FailedError(f"{self.name}: {error.strerror or error}") from None

    def _handle_defect(self, what: str) -> None:
        if not self._skip_bad:
            hint = "" if self._skip_bad is None else " (--skip-bad continues)"
            raise BadLineError(f"{self.name}: {what}{hint}")
        self.bad += 1
        self.first_bad = self.first_bad or what


def check_new(path: str | Path) -> None:
    """Raise `InputError` if a log would be written over a file; an empty one is no loss, nor is standard output."""
    if str(path) != "-" and Path(path).is_file() and Path(path).stat().st_size:
        raise InputError(f"{path}: this file exists; a log is not written over it: name a new file")


class LogWriter:
    """Write a log; a context manager, and a `Tap` of the embedded runner.

    A file that exists and is not empty is refused. The log is compressed if its name ends in ``.gz``; ``-`` is standard
    output.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with LogWriter(f"{folder}/log.gz") as log:
    ...         log(Record("ads.clicks", 0, 7, 5, b"s", None))
    ...     with LogReader(f"{folder}/log.gz") as log:
    ...         [line.record.offset for line in log]
    [7]
    """

    def __init__(self, path: str | Path) -> None:
        self.lines = 0
        self._is_stdout = str(path) == "-"
        self.name = "standard output" if self._is_stdout else str(path)
        with self._failing_as(InputError):
            check_new(path)
            self._raw: BinaryIO = sys.stdout.buffer if self._is_stdout else Path(path).open("wb")  # noqa: SIM115 - see close
        self._file: BinaryIO = self._raw
        if str(path).endswith(".gz"):
            # No name and no time in the header: the same records give the same file.
            compressed = gzip.GzipFile(filename="", fileobj=self._raw, mode="wb", compresslevel=6, mtime=0)
            self._file = cast(BinaryIO, compressed)

    @contextmanager
    def _failing_as(self, kind: type[AdcascadeError]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise kind(f"{self.name}: cannot be written: {error.strerror or error}") from None

    def __call__(self, record: Record, headers: Headers = ()) -> None:
        """Write one record."""
        with self._failing_as(FailedError):
            self._file.write(encode_line(record, headers))
        self.lines += 1

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def flush(self) -> None:
        """Pass all lines so far to the operating system."""
        with self._failing_as(FailedError):
            self._file.flush()
            self._raw.flush()

    def close(self) -> None:
        """Finish the file."""
        with self._failing_as(FailedError):
            if self._file is not self._raw:
                self._file.close()
            if self._is_stdout:
                self._raw.flush()
            else:
                self._raw.close()


# ── a temporary database ─────────────────────────────────────────────────────────────────────────────────────────────

#: Settings of a temporary database: no safety of what is lost with this process anyway; the cache in KiB, negative.
PRAGMAS: Final = "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"


@contextmanager
def temporary_database(tables: str) -> Iterator[sqlite3.Connection]:
    """Open a database that sorts records, with these tables, to be used in this context; it is removed at its end.

    A database that fits into its cache of 64 MB stays in memory. A larger one is a file in the folder for temporary
    files (TMPDIR). Raise `FailedError` if it cannot be written or read: its disk is full, for example.
    """
    try:
        with closing(sqlite3.connect("")) as database:
            database.executescript(PRAGMAS + tables)
            yield database
    except sqlite3.Error as error:
        raise FailedError(
            f"cannot sort the log: {error}; set TMPDIR to a folder with room for the whole log, uncompressed"
        ) from None
