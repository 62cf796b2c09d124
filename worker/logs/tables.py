"""Tables of other systems: rows of CSV, JSON lines, Parquet, Personalizer's DSJSON or obp, and displays from rows.

Rules that hold in this file:

- A row is a dictionary of columns with its number: the line of the file, or the row of a Parquet file, from 1.
- Objects within a JSON row are flattened: ``{"user": {"age": 31}}`` has the columns ``user.age`` and ``age``.
- A line that is no row is a `BadRowError` in place of the row. A file that is no table is an error.
- Rows of DSJSON and obp have columns with the usual names (`ROLES`). A row of obp without a
  ``session_id`` is a session, at whatever position it was displayed, and a click without a ``reward`` earns 1.
- A column is found by the name that a flag gives, else by one of its usual names.
- Times are numbers, whose size tells the unit, or dates and times of ISO 8601, in UTC unless they have a zone.
- A context is an object of the declared features, by their names or by the columns given for them; an empty cell is a
  missing value. Where none are declared, it is a list of the numbers in the given columns, or in those of obp.

DSJSON is the log of Vowpal Wabbit's decision service and of Azure Personalizer, an event per line: ``EventId``,
``Timestamp``, ``c`` with the shared features and a list ``_multi`` of actions, ``_labelIndex`` (that of the action
taken, from 0), ``_label_probability`` and ``_label_cost``, the negative reward.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from worker.errors import InputError
from worker.stream.decoding import Limits
from worker.stream.events import MOST
from worker.stream.features import Features, listed


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


# ── displays ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#: What a column can be: its meaning, and its usual names.
ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "session": ("session", "session", "session_id"),
    "time": ("time: ISO 8601, or seconds, milliseconds, … since the epoch", "time", "timestamp", "occurred_at"),
    "position": ("position, from 1; without one, the order of time and rows counts", "position"),
    "ad": ("ad", "ad", "arm", "ad_id", "item_id"),
    "click": ("click: 0 or 1, true or false", "clicked", "click"),
    "revenue": ("revenue of the click", "revenue", "reward"),
    "propensity": ("probability of this ad at this position", "propensity", "propensity_score"),
}
_NEEDED: Final = ("session", "time", "ad", "click")
_WORDS: Final = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_LONGEST_ID: Final = Limits().max_arm_id


class Display(NamedTuple):
    """A row of a table; `position` is 0 if the table has none, `context` is JSON."""

    session: str
    position: int
    time: int
    row: int
    ad: str
    clicked: bool
    revenue: float | None
    propensity: float | None
    context: bytes


class RowReader:
    """Turns rows into displays. `columns` and `context` are those of the flags, `ads` those of the catalogue, if any.

    `unseen` has the columns by name that no row had so far, with the flag that gives another one.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        context: Mapping[str, str],
        features: Features | None = None,
        ads: Collection[str] = (),
    ) -> None:
        declared = {feature.name: feature.kind for feature in features.context} if features is not None else {}
        if unknown := [name for name in context if declared and name not in declared]:
            raise InputError(f"--context-columns: {unknown[0]!r} is not declared; declared are {listed(declared)}")
        self._columns, self._kinds, self._ads = columns, declared, ads
        self._declared_dim = features.dim if features is not None else 0
        pairs = {name: name for name in declared} | dict(context)
        self._context = {name: column for name, column in pairs.items() if column}
        self.unseen = {column: f"--{role}-column" for role, column in columns.items()} | {
            column: f"--context-columns {name}=COLUMN, or {name}= if the history lacks it"
            for name, column in self._context.items()
        }

    @property
    def dim(self) -> int:
        """The number of columns of a context."""
        return self._declared_dim or len(self._context)

    def cell(self, row: Row, role: str) -> Any:
        """Return the cell of a role; None if it is empty, or `BadRowError` if it is needed."""
        _, *usual = ROLES[role]
        names = [self._columns[role]] if role in self._columns else usual
        value = next((row[name] for name in names if row.get(name) not in (None, "")), None)
        if value is None and role in _NEEDED:
            hint = f" in {' or '.join(names)}: give --{role}-column; the table has {listed(filter(None, row), 20)}"
            raise BadRowError(f"no {role}", "" if row.keys() & set(names) else hint)
        return value

    def read(self, number: int, session: str, row: Row) -> Display:
        """Return the display of a row; raise `BadRowError` if it is none."""
        for column in self.unseen.keys() & row.keys():
            del self.unseen[column]
        position, clicked, revenue, propensity = (
            _number(self.cell(row, role), role) for role in ("position", "click", "revenue", "propensity")
        )
        ad = str(self.cell(row, "ad")).strip()
        if clicked not in (0, 1):
            raise BadRowError("click is neither 0 nor 1", f" ({clicked})")
        if position is not None and (position < 1 or position % 1):
            raise BadRowError("position is not a whole number from 1 on", f" ({position:g})")
        if propensity is not None and not 0 < propensity <= 1:
            raise BadRowError("propensity is not above 0 and at most 1", f" ({propensity:g})")
        if not 0 < len(ad) <= _LONGEST_ID or not ad.isprintable():
            raise BadRowError("ad is not an id", f" of 1 to {_LONGEST_ID} printable characters")
        if self._ads and ad not in self._ads:
            raise BadRowError("ad is not in the catalogue", f" ({ad!r}): add it, with active = false if it is retired")
        return Display(
            session=session,
            position=int(position or 0),
            time=_time(self.cell(row, "time")),
            row=number,
            ad=ad,
            clicked=clicked == 1,
            revenue=revenue,
            propensity=propensity,
            context=orjson.dumps(self._context_of(row)),
        )

    def _context_of(self, row: Row) -> dict[str, float | str] | list[float | str]:
        if not self._context and not self._kinds:
            self._context = {name: name for name in row if name.startswith("user_feature")}
        hint = "" if self._kinds else "; declare it in [features.context] as a category"
        context: dict[str, float | str] = {}
        for name, column in self._context.items():
            is_text = self._kinds.get(name) in ("category", "hashed")
            value = row.get(column) if is_text else _number(row.get(column), column, hint)
            if isinstance(value, bool):
                value = str(value).lower()
            if value is not None and value != "":
                context[name] = str(value) if is_text else value
        if not self._kinds and len(context) < max(1, len(self._context)):
            missing = listed(column for name, column in self._context.items() if name not in context)
            raise BadRowError(
                f"no number {f'in {missing}' if missing else 'is named'} for the context",
                ": declare features in [features.context] of the --config file, as for `adcascade serve`, or name "
                "columns that have a number in every row with --context-columns",
            )
        return context if self._kinds else list(context.values())


def _number(value: Any, name: str, hint: str = "") -> float | None:
    """Read a number, or true and false; an empty cell and NaN are None."""
    text = "" if value is None else str(value).strip().lower()
    if text in ("", "nan"):
        return None
    try:
        return _WORDS[text] if text in _WORDS else float(text)
    except ValueError:
        hint = "; write a decimal point, not a comma" if text.replace(",", "", 1).isdecimal() else hint
        raise BadRowError(f"{name} is not a number", f" ({value!r}){hint}") from None


def _time(value: Any) -> int:
    """Read a time, in milliseconds since the epoch.

    >>> _time("1767225600"), _time(1767225600000), _time("2026-01-01 00:00:00")
    (1767225600000, 1767225600000, 1767225600000)
    """
    try:
        milliseconds = 1000 * float(value)
    except (TypeError, ValueError):
        try:
            date = datetime.fromisoformat(str(value).strip())
        except ValueError:
            raise BadRowError("time is neither a number nor ISO 8601", f" ({value!r})") from None
        milliseconds = 1000 * (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    while 1e14 <= milliseconds < 1e24:  # beyond the year 5138: the number was in a thousandth of the unit
        milliseconds /= 1000
    if not 0 <= milliseconds < MOST:
        raise BadRowError("time is before 1970 or too far ahead", f" ({value})")
    return round(milliseconds)
