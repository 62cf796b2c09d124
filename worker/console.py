"""The terminal of the commands: lines, tables, progress bars, JSON, files, and the signals that end a command."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from string import Formatter
from time import monotonic
from types import FrameType
from typing import Any, Final

import orjson

from worker.errors import FailedError, InputError

_LAST: Final = 253_402_300_799  # the last second of the year 9999
_BETWEEN_LINES: Final = 0.1  # seconds between two states of a progress bar


class ProgressBar:
    """Progress of some work, in a line on standard error; without a title it shows nothing."""

    def __init__(self, title: str = "", total: float | None = None, unit: str = "") -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done, self._shown = 0.0, monotonic()

    def advance(self, by: float = 1) -> None:
        """Add `by` units of finished work."""
        self._done += by
        if monotonic() - self._shown > _BETWEEN_LINES:
            self._show()

    def describe(self, text: str) -> None:
        """Change the title, if there is one."""
        self._title = self._title and text
        self._show()

    def _show(self) -> None:
        if not self._title:
            return
        self._shown = monotonic()
        share = f" ({min(1.0, self._done / self._total):.0%})" if self._total else ""
        sys.stderr.write(f"\r{self._title}: {self._done:,.0f} {self._unit}{share}\x1b[K")
        sys.stderr.flush()


@contextmanager
def progress(title: str, total: float | None = None, *, unit: str = "") -> Iterator[ProgressBar]:
    """Show the progress of some work if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield ProgressBar()
        return
    try:
        yield ProgressBar(title, total, unit)
    finally:
        sys.stderr.write("\r\x1b[K")


def say(text: str = "") -> None:
    """Print a line on standard output."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Print a line about the run on standard error, apart from results."""
    sys.stderr.write(text + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], most: int | None = None) -> str:
    """Lay out rows in columns, numbers aligned to the right; with `most`, only the first rows.

    >>> print(table(["arm", "q"], [["shoes", 0.25], ["hats", 1.5], ["coats", 3]], most=2))
    arm       q
    shoes  0.25
    hats    1.5
    … and 1 more (--json - has all)
    """
    cells = [[str(cell) for cell in row] for row in rows[:most]]
    columns = []
    for column in zip(header, *cells, strict=True):
        width = max(map(len, column))
        numeric = bool(cells) and all(cell[:1] in "-+.0123456789–" for cell in column[1:])
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in column])
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    more = len(rows) - len(cells)
    return "\n".join([*lines, f"… and {more} more (--json - has all)"] if more else lines)


def moment(milliseconds: int | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in milliseconds since the epoch, in UTC, for people; a dash for 0 and None, no time.

    >>> moment(60_000), moment(10**18, "%Y-%m-%d"), moment(-5, "%Y")
    ('1970-01-01 00:01:00', '9999-12-31', '1970')
    """
    if not milliseconds:
        return "–"
    return f"{datetime.fromtimestamp(min(max(0, milliseconds / 1000), _LAST), UTC):{form}}"


class _Cells(Formatter):
    """Formats of cells; None is a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else str(super().format_field(value, format_spec))


def listing(columns: Mapping[str, str], items: Sequence[Mapping[str, Any]], most: int | None = None) -> str:
    """Lay out items as a table. A column is a heading with a format of the fields of an item.

    >>> print(listing({"arm": "{arm}", "Q": "{q:.2f}"}, [{"arm": "shoes", "q": 0.25}, {"arm": "hats", "q": None}]))
    arm       Q
    shoes  0.25
    hats      –
    """
    rows = [[_Cells().vformat(form, (), item) for form in columns.values()] for item in items]
    return table(list(columns), rows, most)


def write_json(path: str | None, value: Any) -> None:
    """Write `value` to the file, or to standard output for ``-``; without a path, do nothing."""
    if path is None:
        return
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_file(path, data)


def write_result(path: str | None, value: Any, text: str, notes: Iterable[str] = ()) -> None:
    """Write the JSON and print the text; if the JSON goes to standard output, print only the notes, apart from it."""
    write_json(path, value)
    if path != "-":
        say(text)
        return
    for line in notes:
        note(line)


def read_file(path: str, option: str) -> bytes:
    """Return the content of the file that an option names."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None


def read_input(path: str, option: str) -> bytes:
    """Return the content of the file that an option names, or of standard input for ``-``."""
    return sys.stdin.buffer.read() if path == "-" else read_file(path, option)


def check_writable(*paths: str | None) -> None:
    """Raise `InputError`, before any work is done, for a path that cannot be written, or is given for two outputs."""
    given = [path for path in paths if path is not None]
    for path in given:
        if given.count(path) > 1:
            raise InputError(f"{path}: two outputs cannot be the same file")
        if path == "-":
            continue
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise InputError(f"{path}: the folder {folder} does not exist")
        if Path(path).is_dir():
            raise InputError(f"{path}: is a folder, not a file")
        if not os.access(folder, os.W_OK):
            raise InputError(f"{path}: the folder {folder} is not writable")


def write_file(path: str | Path, data: bytes) -> None:
    """Write a file completely or not at all."""
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=f".{target.name}.", delete=False) as file:
            file.write(data)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(target)
    except OSError as error:
        raise FailedError(f"cannot write {target}: {error.strerror or error}") from None


@contextmanager
def stops_on_signals(stop: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Call `stop` at the first SIGINT or SIGTERM, and yield a list that receives its number.

    The first signal requests a clean end, the next one has its usual effect.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request_stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        stop()

    for number in before:
        signal.signal(number, request_stop)
    try:
        yield received
    finally:
        restore()
