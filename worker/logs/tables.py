"""Tables of other systems, row by row: CSV, JSON lines, Parquet, Personalizer's DSJSON.

Rules that hold in this file:

- A row is a dictionary of columns with its number: the line of the file, or the row of a Parquet file, from 1.
- Objects within a JSON row are flattened: ``{"user": {"age": 31}}`` has the columns ``user.age`` and ``age``.
- A line that is no row is a `BadRowError` in place of the row. A file that is no table is an error.

DSJSON is the log of Vowpal Wabbit's decision service and of Azure Personalizer, an event per line: ``EventId``,
``Timestamp``, ``c`` with the shared features and a list ``_multi`` of actions, ``_labelIndex`` (that of the action
taken, from 0), ``_label_probability`` and ``_label_cost``, the negative reward.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast

import orjson

from worker.errors import InputError

#: Names of the columns that an event of DSJSON gets.
DSJSON: Final = {
    "session": "EventId",
    "time": "Timestamp",
    "ad": "_ad",
    "click": "_clicked",
    "revenue": "_reward",
    "propensity": "_label_probability",
}


class BadRowError(InputError):
    """A row cannot be used; `reason` is the same for all rows with the same defect. `row` is its number, if known."""

    def __init__(self, reason: str, detail: str = "", *, row: int = 0) -> None:
        super().__init__(f"{reason}{detail}")
        self.reason, self.row = reason, row


Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterator[tuple[int, Row | BadRowError]]


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
        convert = f"iconv -f {encoding} -t utf-8 {path} > utf8{Path(path).suffix}"
        raise InputError(f"{path}, row {number}: not UTF-8; convert the file: {convert}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip data breaks off after row {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def _csv(path: str) -> Rows:
    lines = _lines(path)
    header = next(lines, "")
    separator = max(",;\t", key=header.count)
    columns = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        for cells in reader:
            number = reader.line_num + 1
            if len(cells) == len(columns):
                yield number, dict(zip(columns, cells, strict=True))
            elif cells:
                hint = "; a decimal comma? write 1.50, not 1,50" if separator == "," else ""
                yield number, BadRowError("another number of cells than the header", f" ({len(cells)}){hint}")
    except csv.Error as error:
        raise InputError(f"{path}, row {reader.line_num + 1}: not CSV: {error}") from None


def _objects(path: str, convert: Callable[[Row], Row | None]) -> Rows:
    """Yield the objects of JSON lines, converted to rows, but for those that are none."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith("["):
            raise InputError(f"{path}: an object per line is needed, not a list: jq -c '.[]' {path} > new.jsonl")
        try:
            row = convert(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            what = "not JSON" if isinstance(error, orjson.JSONDecodeError) else "not an object with the fields needed"
            yield number, BadRowError(what, f" (no field {error})" if isinstance(error, KeyError) else f" ({error})")
        else:
            if row is not None:
                yield number, row


def flat(document: Mapping[str, Any]) -> Row:
    """Return an object without objects in it; a list of objects stands for all of them.

    >>> flat({"time": 5, "User": [{"age": 31}, {"device": "mobile"}]})
    {'time': 5, 'User.age': 31, 'age': 31, 'User.device': 'mobile', 'device': 'mobile'}
    """
    row: Row = {}
    for name, value in document.items():
        parts = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, Mapping)]
        for part in parts:
            for inner, leaf in flat(part).items():
                row[f"{name}.{inner}"] = leaf
                row.setdefault(inner, leaf)
        if not parts:
            row[name] = value
    return row


def _event(document: Row) -> Row | None:
    """Return an event of DSJSON as a row; None for a reward without its event, and for one that was never displayed."""
    if "c" not in document or document.get("_skipLearn"):
        return None
    shared = dict(document["c"])
    action = shared.pop("_multi")[document["_labelIndex"] if "_labelIndex" in document else document["a"][0] - 1]
    reward = -float(document["_label_cost"])
    taken = {
        "_ad": action["i"]["id"] if "i" in action and "_tag" not in action else action["_tag"],
        "_clicked": reward > 0,
        "_reward": reward if reward > 0 else None,
    }
    return flat(shared) | {name: document.get(name) for name in DSJSON.values()} | taken


def _parquet(path: str) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or write the table as CSV") from None
    try:
        batches = ParquetFile(path).iter_batches()
        yield from enumerate((flat(row) for batch in batches for row in batch.to_pylist()), start=1)
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}") from None


#: Readers of a file by the name of the format; they raise `InputError` if it cannot be read as a table.
FORMATS: Final[Mapping[str, Callable[[str], Rows]]] = {
    "csv": _csv,
    "jsonl": lambda path: _objects(path, flat),
    "parquet": _parquet,
    "dsjson": lambda path: _objects(path, _event),
    "obp": _csv,
}
_SUFFIXES: Final = {"tsv": "csv", "json": "jsonl", "ndjson": "jsonl"}


def format_of(path: str) -> str:
    """Return the format by the name of a file.

    >>> format_of("clicks.csv.gz"), format_of("events.ndjson")
    ('csv', 'jsonl')
    """
    suffix = Path(path.removesuffix(".gz")).suffix.lower().lstrip(".")
    if (format := _SUFFIXES.get(suffix, suffix)) not in FORMATS:
        raise InputError(f"{path}: the name does not say the format: give --format {'|'.join(FORMATS)}")
    return format
