"""Tables of other systems, row by row: CSV, JSON lines, Parquet, Personalizer's DSJSON, obp's columns.

Rules that hold in this file:

- A row is a dictionary of columns with its number: the line of the file, or the row of a Parquet file, from 1.
- Objects within a JSON row are flattened: ``{"user": {"age": 31}}`` has the columns ``user.age`` and ``age``.
- A line that is no row is a `BadRowError` in place of the row. A file that is no table is an error.
- Rows of DSJSON and obp have columns with the usual names (`worker.logs.displays`). A row of obp without a
  ``session_id`` is a session, at whatever position it was displayed, and a click without a ``reward`` earns 1.

DSJSON is the log of Vowpal Wabbit's decision service and of Azure Personalizer, an event per line: ``EventId``,
``Timestamp``, ``c`` with the shared features and a list ``_multi`` of actions, ``_labelIndex`` (that of the action
taken, from 0), ``_label_probability`` and ``_label_cost``, the negative reward.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from worker.errors import InputError


class BadRowError(InputError):
    """A row cannot be used: `reason` is the same for all rows with this defect, `detail` and number are of this one."""

    def __init__(self, reason: str, detail: str = "", *, row: int = 0) -> None:
        super().__init__(f"{reason}{detail}")
        self.reason, self.detail, self.row = reason, detail, row


Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterator[tuple[int, Row | BadRowError]]


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text, also gzipped."""
    number = 0
    try:
        with gzip.open(path) if path.endswith(".gz") else Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        convert = f"iconv -f {encoding} -t utf-8 {path} > utf8{Path(path).suffix}"
        raise InputError(f"{path}, row {number}: not UTF-8; convert the file: {convert}") from None
    except (OSError, EOFError, zlib.error) as error:
        after = f" (after row {number})" if number else ""
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}{after}") from None


def read_csv(path: str) -> Rows:
    """Yield the rows of a CSV file; commas, semicolons or tabs separate its columns, the names of which are row 1."""
    lines = read_lines(path)
    header = next(lines, "")
    separator = max(",;\t", key=header.count)
    columns = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    if twice := [name for name, times in Counter(filter(None, columns)).items() if times > 1]:
        raise InputError(f"{path}, row 1: the column {twice[0]!r} is there twice")
    reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
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


def _obp(path: str) -> Rows:
    for number, row in read_csv(path):
        if isinstance(row, dict):
            if "propensity_score" not in row:
                raise InputError(f"{path}: no column 'propensity_score', which obp's tables have; try --format csv")
            row.setdefault("reward", 1)
            if "session_id" not in row:
                row |= {"session_id": f"row-{number}", "position": None}
        yield number, row


def _objects(path: str, convert: Callable[[Row], Row | None]) -> Rows:
    """Yield the objects of JSON lines, converted to rows, except those that are none."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                row = convert(orjson.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                hint = f"; jq -c '.[]' {path} > new.jsonl makes lines of a list" if line.startswith("[") else ""
                yield number, BadRowError("not a JSON object with the fields needed", f" ({error}){hint}")
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
    action = shared.pop("_multi")[document["_labelIndex"]]
    reward = -document["_label_cost"]
    return flat(shared) | {
        "session": document["EventId"],
        "time": document["Timestamp"],
        "position": None,
        "ad": action["_tag"] if "_tag" in action else action["i"]["id"],
        "clicked": reward > 0,
        "revenue": reward if reward > 0 else None,
        "propensity": document.get("_label_probability"),
    }


def _parquet(path: str) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or write the table as CSV") from None
    try:
        batches = ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from enumerate((flat({name: _text(value) for name, value in row.items()}) for row in rows), start=1)
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}") from None


def _text(value: object) -> object:
    """Return a value with bytes as text: some writers mark no column as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


#: Readers of a file by the name of the format; they raise `InputError` if it cannot be read as a table.
FORMATS: Final[Mapping[str, Callable[[str], Rows]]] = {
    "csv": read_csv,
    "jsonl": lambda path: _objects(path, flat),
    "parquet": _parquet,
    "dsjson": lambda path: _objects(path, _event),
    "obp": _obp,
}
_SUFFIXES: Final = {"tsv": "csv", "json": "jsonl", "ndjson": "jsonl"}


def read_table(path: str, format: str | None = None) -> Rows:
    """Return the rows of a file, in this format or in the one that its name says."""
    suffix = Path(path.removesuffix(".gz")).suffix.lower().lstrip(".")
    format = format or _SUFFIXES.get(suffix, suffix)
    if format not in FORMATS:
        raise InputError(f"{path}: the name does not say the format: give --format {'|'.join(FORMATS)}")
    return FORMATS[format](path)
