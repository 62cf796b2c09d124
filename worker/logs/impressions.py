"""Impressions: the rows of a table, by the meaning of its columns.

Rules that hold in this file:

- A column is found by the name that a flag gives, else by one of its usual names.
- Times are numbers of one unit, which their size tells, or dates and times of ISO 8601, in UTC unless they have a zone.
- A context is an object of the declared features, by their names or by the columns given for them; an empty cell is a
  missing value. Where none are declared, it is a list of the numbers in the given columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from worker.errors import InputError
from worker.logs.tables import DSJSON, BadRowError, Row
from worker.stream.decoding import Limits
from worker.stream.events import MOST
from worker.stream.features import Feature, listed

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
#: Numbers below these are times in this unit, with its milliseconds: all from 1973 to 5138.
_UNITS: Final = (
    (1e11, "seconds", 1e3),
    (1e14, "milliseconds", 1.0),
    (1e17, "microseconds", 1e-3),
    (1e20, "nanoseconds", 1e-6),
)
#: What to do about a declared feature without a column.
OTHER_COLUMN: Final = "give --context-columns {name}=COLUMN, or {name}= if the history lacks it"
_WORDS: Final = {
    **dict.fromkeys(("1", "1.0", "true", "yes"), 1.0),
    **dict.fromkeys(("0", "0.0", "false", "no"), 0.0),
}
_LONGEST_ID: Final = Limits().max_arm_id

#: Names of features with their columns.
Pairs: TypeAlias = Sequence[tuple[str, str]]


class Impression(NamedTuple):
    """One display: `place` is its position, 0 if the table has none; `context` is JSON."""

    session: str
    place: int
    time: int
    row: int
    ad: str
    clicked: bool
    propensity: float | None
    revenue: float | None
    context: bytes


class RowReader:
    """Turns the rows of a table into impressions; `first` is a row that has its columns.

    `unit` is that of the times so far, and `unseen` has the declared features of which no row had a value so far.
    """

    def __init__(
        self, first: Row, format: str, columns: Mapping[str, str], context: Pairs, features: Sequence[Feature]
    ) -> None:
        self.unit = ""
        self._columns = _find(first, format, columns)
        self._numbers = {feature.name: feature.kind == "number" for feature in features}
        self._context = _context_columns(first, format, context, list(self._numbers))
        self.dim = len(self._context)
        self.unseen = {name: column for name, column in self._context if features}

    def session(self, number: int, row: Row) -> str:
        """Return the session of a row; a table of obp may have none, then each row is one."""
        if not self._columns["session"]:
            return f"row-{number}"
        if (value := row.get(self._columns["session"])) in (None, ""):
            raise BadRowError("no session")
        return str(value)

    def read(self, number: int, session: str, row: Row) -> Impression:
        """Return the impression of a row; raise `BadRowError` if it is none."""
        cells = {role: row.get(column) if column else None for role, column in self._columns.items()}
        clicked = _WORDS.get(str(cells["click"]).strip().lower())
        propensity = _number(cells["propensity"], "propensity")
        if clicked is None:
            raise BadRowError("click is neither 0 nor 1", f" ({cells['click']!r})")
        if propensity is not None and not 0 < propensity <= 1:
            raise BadRowError("propensity is not above 0 and at most 1", f" ({propensity:g})")
        return Impression(
            session,
            _position(cells["position"]) if self._columns["session"] else 0,
            self._time(cells["time"]),
            number,
            _ad(cells["ad"]),
            clicked == 1,
            propensity,
            _number(cells["revenue"], "revenue"),
            orjson.dumps(self._named(row) if self._numbers else self._listed(row)),
        )

    def _time(self, value: Any) -> int:
        try:
            time = float(value)
            unit, factor = next((name, by) for below, name, by in _UNITS if abs(time) < below)
        except (TypeError, ValueError, StopIteration):
            unit, factor = "dates", 1e3
            try:
                moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
                time = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                raise BadRowError("time is neither a number nor ISO 8601", f" ({value!r})") from None
        self.unit = self.unit or unit
        if unit != self.unit:
            raise BadRowError("time is in another unit than in the first row", f" ({value}: {unit}, not {self.unit})")
        if not 0 <= time * factor < MOST:
            raise BadRowError("time is before 1970 or too far ahead", f" ({value})")
        return round(time * factor)

    def _listed(self, row: Row) -> list[float]:
        numbers = []
        for _, column in self._context:
            if (number := _number(row.get(column), column, "; declare it in [features.context] as a category")) is None:
                raise BadRowError(f"{column} is empty", "; declare it in [features.context], where it may be missing")
            numbers.append(number)
        return numbers

    def _named(self, row: Row) -> dict[str, float | str]:
        context: dict[str, float | str] = {}
        for name, column in self._context:
            value = row.get(column)
            if value is None or value == "":
                continue
            if not self._numbers[name]:
                context[name] = str(value).lower() if isinstance(value, bool) else str(value)
            elif (number := _number(value, column)) is not None:
                context[name] = number
        if self.unseen:
            self.unseen = {name: column for name, column in self.unseen.items() if name not in context}
        return context


def _find(first: Row, format: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the columns by their meaning, empty where the table has none."""
    has_header = format in ("csv", "obp")  # the first object of JSON lines may lack what others have
    needed = {"time", "ad", "click"} | ({"propensity"} if format == "obp" else {"session"})
    columns = {}
    for role, (_, *usual) in ROLES.items():
        absent = "" if has_header else usual[0]
        found = DSJSON.get(role, "") if format == "dsjson" else next((n for n in usual if n in first), absent)
        column = columns[role] = given.get(role, found)
        if (not column or column not in first) and (role in needed or (role in given and has_header)):
            others = [name for name in first if all(name not in names[1:] for names in ROLES.values())]
            raise InputError(f"no column {column or usual[0]!r}: give --{role}-column{_near(column or role, others)}")
    return columns


def _context_columns(first: Row, format: str, given: Pairs, declared: Sequence[str]) -> Pairs:
    if unknown := [name for name, _ in given if declared and name not in declared]:
        raise InputError(f"--context-columns: {unknown[0]!r} is not declared; declared are {listed(declared)}")
    obp = [name for name in first if name.startswith("user_feature")] if format == "obp" and not given else []
    columns = {name: name for name in declared or obp} | dict(given)
    pairs = [(name, column) for name, column in columns.items() if column]
    if not pairs:
        raise InputError(
            "no features: declare [features.context] in the --config file, as for `adcascade serve`, or name columns "
            "of numbers with --context-columns"
        )
    for name, column in pairs:
        if column not in first and format in ("csv", "obp"):
            raise InputError(f"no column {column!r}: {OTHER_COLUMN.format(name=name)}{_near(column, first)}")
    return pairs


def _near(wanted: str, names: Collection[str]) -> str:
    near = get_close_matches(wanted, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; the table has {listed(names)}"


def _number(value: Any, name: str, hint: str = "") -> float | None:
    """Read a number, or true and false; an empty cell and NaN are None."""
    if value is None or value == "":
        return None
    try:
        number = _WORDS.get(value.strip().lower()) if isinstance(value, str) else None
        number = float(value) if number is None else number
    except (TypeError, ValueError):
        comma = isinstance(value, str) and value.strip().replace(",", "", 1).isdecimal()
        hint = "; write a decimal point, not a comma" if comma else hint
        raise BadRowError(f"{name} is not a number", f" ({value!r}){hint}") from None
    if number != number:
        return None
    if not isfinite(number):
        raise BadRowError(f"{name} is not finite")
    return number


def _position(value: Any) -> int:
    number = _number(value, "position")
    if number is not None and (number < 1 or number != int(number)):
        raise BadRowError("position is not a whole number from 1 on", f" ({value})")
    return 0 if number is None else int(number)


def _ad(value: Any) -> str:
    ad = "" if value is None else str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if not 0 < len(ad) <= _LONGEST_ID or not ad.isprintable():
        raise BadRowError("ad is not an id", f" of 1 to {_LONGEST_ID} printable characters")
    return ad
