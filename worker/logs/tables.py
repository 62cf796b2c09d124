"""Tables of other systems, row by row: CSV, JSON lines, Parquet, Personalizer's DSJSON.

Rules that hold in this file:

- A row is a dictionary of columns, with its number: the line of the file, or the row of a Parquet file, from 1.
- Objects within a JSON row are flattened: ``{"context": {"age": 31}}`` has the columns ``context.age`` and ``age``.
- A line that is no row is a `BadRowError` in place of the row; the reader of the rows decides what becomes of it.
- A file that is no table at all (not UTF-8, no header, broken gzip data) is an error of one line.

DSJSON is the log of Vowpal Wabbit's decision service and of Azure Personalizer, an event per line: ``EventId``,
``Timestamp``, ``c`` with the shared features and a list ``_multi`` of actions, ``_labelIndex`` (that of the action
taken, from 0), ``_label_probability`` and ``_label_cost``, the negative reward.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast

import orjson

from worker.errors import FailedError, InputError

FORMATS: Final = ("csv", "jsonl", "parquet", "dsjson", "obp")
_SUFFIXES: Final = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".dsjson": "dsjson",
}

#: Columns that an event of DSJSON gets, by what they mean.
DSJSON: Final = {
    "session": "EventId",
    "time": "Timestamp",
    "ad": "_ad",
    "click": "_clicked",
    "revenue": "_reward",
    "propensity": "_label_probability",
}

Row: TypeAlias = dict[str, Any]


class BadRowError(InputError):
    """A row cannot be used; `reason` is the same for all rows with the same defect."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail}")
        self.reason = reason


Rows: TypeAlias = Iterator[tuple[int, Row | BadRowError]]


def format_of(path: str) -> str:
    """Return the format by the name of a file.

    >>> format_of("clicks.csv.gz"), format_of("events.jsonl")
    ('csv', 'jsonl')
    """
    name = Path(path.removesuffix(".gz"))
    try:
        return _SUFFIXES[name.suffix.lower()]
    except KeyError:
        raise InputError(f"{path}: the name does not say the format: give --format {'|'.join(FORMATS)}") from None


def read_rows(path: str, format: str) -> Rows:
    """Yield the rows of a file with their numbers; raise `InputError` if it cannot be read as a table."""
    if format == "parquet":
        yield from _parquet(path)
        return
    lines = _lines(path)
    yield from {"csv": _csv, "obp": _csv, "jsonl": _json, "dsjson": _dsjson}[format](path, lines)


def _lines(path: str) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed."""
    number = 0
    try:
        with Path(path).open("rb") as raw:
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            for line in cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw:
                number += 1
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise InputError(
            f"{path}, row {number}: not UTF-8; convert the file: iconv -f {encoding} -t utf-8 {Path(path).name} > new"
            f"{Path(path).suffix}"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip data breaks off after row {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def _csv(path: str, lines: Iterator[str]) -> Rows:
    header = next(lines, "")
    separator = max(",;\t", key=header.count)
    try:
        columns = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
        reader = csv.reader(lines, delimiter=separator, strict=True)
        for cells in reader:
            number = reader.line_num + 1
            if len(cells) == len(columns):
                yield number, dict(zip(columns, cells, strict=True))
            elif cells:
                hint = "; a decimal comma? write 1.50, not 1,50" if separator == "," else ""
                yield number, BadRowError("another number of cells than the header", f" ({len(cells)}){hint}")
    except csv.Error as error:
        raise InputError(f"{path}, row {reader.line_num + 1}: not CSV: {error}") from None


def _json(path: str, lines: Iterator[str]) -> Rows:
    for number, document in _documents(path, lines):
        yield number, document if isinstance(document, BadRowError) else flat(document)


def _documents(path: str, lines: Iterator[str]) -> Rows:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith("["):
            raise InputError(f"{path}: one object per line is needed, not a list: jq -c '.[]' {Path(path).name} > new")
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield number, BadRowError("not JSON", f" ({error})")
            continue
        yield number, document if isinstance(document, dict) else BadRowError("not a JSON object")


def flat(document: Mapping[str, Any], prefix: str = "") -> Row:
    """Return an object without objects in it; a list of objects is all of them.

    >>> flat({"time": 5, "User": [{"age": 31}, {"device": "mobile"}]})
    {'time': 5, 'User.age': 31, 'age': 31, 'User.device': 'mobile', 'device': 'mobile'}
    """
    row: Row = {}
    for name, value in document.items():
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, Mapping):
                for inner, leaf in flat(part).items():
                    row.setdefault(f"{name}.{inner}", leaf)
                    row.setdefault(inner, leaf)
            elif part is value:
                row[name] = value
    return row


def _dsjson(path: str, lines: Iterator[str]) -> Rows:
    """Yield the events that were displayed; rewards without an event and events never activated are no displays."""
    for number, document in _documents(path, lines):
        if isinstance(document, BadRowError):
            yield number, document
        elif "c" in document and not document.get("_skipLearn"):
            try:
                yield number, _event(document)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                detail = f" ({type(error).__name__}: {error})"
                yield number, BadRowError("not an event of one action, as Personalizer's DSJSON has them", detail)


def _event(document: Mapping[str, Any]) -> Row:
    shared = dict(document["c"])
    action = shared.pop("_multi")[document["_labelIndex"] if "_labelIndex" in document else document["a"][0] - 1]
    reward = -float(document["_label_cost"])
    return flat(shared) | {
        "EventId": document["EventId"],
        "Timestamp": document["Timestamp"],
        "_label_probability": document.get("_label_probability"),
        "_ad": action["_tag"] if "_tag" in action else action["i"]["id"],
        "_clicked": reward > 0,
        "_reward": reward if reward > 0 else None,
    }


def _parquet(path: str) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or write the table as CSV") from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, flat(row)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except ArrowException as error:
        raise FailedError(f"{path}: not a Parquet file: {error}") from None
