"""Output of the commands: lines, tables, progress bars, JSON and files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson

from worker.errors import FailedError, InputError


class ProgressBar(Protocol):
    """Progress of some work."""

    def advance(self, by: float = 1) -> None:
        """Add `by` units of finished work."""

    def describe(self, text: str) -> None:
        """Change the text beside the bar."""


class _Silent:
    def advance(self, by: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


@contextmanager
def progress(title: str, total: float | None, *, unit: str = "") -> Iterator[ProgressBar]:
    """Show a bar on standard error if that is a terminal and rich is installed, else nothing."""
    bar = _rich_bar(title, total, unit) if sys.stderr.isatty() else None
    if bar is None:
        yield _Silent()
        return
    with bar:
        yield bar


def _rich_bar(title: str, total: float | None, unit: str) -> Any:
    try:
        from rich import progress as rich_progress
        from rich.console import Console
    except ImportError:
        return None

    class Bar:
        def __init__(self) -> None:
            columns: list[Any] = [
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn()
                if not unit
                else rich_progress.TextColumn("{task.completed:,.0f} " + unit),
                rich_progress.TextColumn("{task.fields[rate]}"),
                rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
            ]
            self._bars = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bars.add_task(title, total=total, rate="")

        def __enter__(self) -> Bar:
            self._bars.start()
            return self

        def __exit__(self, *exc: object) -> None:
            self._bars.stop()

        def advance(self, by: float = 1) -> None:
            self._bars.advance(self._task, by)
            speed = self._bars.tasks[0].speed
            if unit and speed:
                self._bars.update(self._task, rate=f"{speed:,.0f} {unit}/s")

        def describe(self, text: str) -> None:
            self._bars.update(self._task, description=text)

    return Bar()


def say(text: str = "") -> None:
    """Print a line on standard output."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Print a line about the run on standard error, apart from results."""
    sys.stderr.write(text + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> str:
    """Lay out rows in columns, numbers aligned to the right.

    >>> print(table(["arm", "q"], [["shoes", 0.25], ["hats", 1.5]]))
    arm       q
    shoes  0.25
    hats    1.5
    """
    cells = [[str(cell) for cell in row] for row in rows]
    rows_list = [list(header), *cells]
    widths = [max(len(row[i]) for row in rows_list) for i in range(len(header))]
    right = [all(_numeric(row[i]) for row in cells) and bool(cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows_list
    ]
    return "\n".join(([title, ""] if title else []) + lines)


def _numeric(text: str) -> bool:
    return text[:1] in "-+.0123456789–" or text == ""


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


def check_writable(*paths: str | None) -> None:
    """Raise `InputError`, before any work is done, for a path that cannot be written."""
    for path in paths:
        if path is None or path == "-":
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
