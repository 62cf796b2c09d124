"""Displays: the rows of a table, by the meaning of its columns.

Rules that hold in this file:

- A column is found by the name that a flag gives, else by one of its usual names.
- Times are numbers, whose size tells the unit, or dates and times of ISO 8601, in UTC unless they have a zone.
- A context is an object of the declared features, by their names or by the columns given for them; an empty cell is a
  missing value. Where none are declared, it is a list of the numbers in the given columns, or in those of obp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import orjson

from worker.errors import InputError
from worker.logs.tables import BadRowError, Row
from worker.stream.decoding import Limits
from worker.stream.events import MOST
from worker.stream.features import Features, listed

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
