"""Ads as people write them: the file of --catalog and of `arms sync`, and `--feature name=value` of `arms add`.

Rules that hold in this file:

- Where features are declared, they decide what a text means; `worker.stream.ad_features` checks the rest.
- Where none are declared, a column that is a number in every row is a number, any other is a category.
- Every error names the row and the column.
"""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import orjson

from worker.cli.options.parser import Option, boolean
from worker.console import read_file
from worker.errors import InputError
from worker.stream.ad_features import Value, check_ad, infer
from worker.stream.decoding import Limits
from worker.stream.features import Feature
from worker.stream.settings import Arm

CATALOG = Option(
    "catalog",
    "ads of version 0, JSON, CSV or TOML with arm, reward and features (later changes: `adcascade arms`)",
    metavar="FILE",
)

_LONGEST_ID = Limits().max_arm_id
_DECIMAL_COMMA: Final = re.compile(r"\d+,\d+")
_POINT: Final = "; write a decimal point, not a comma"

#: An entry of a file, with its place for error messages.
Placed = tuple[str, Any]


def read_arms(
    path: str | None, *, name: str = "--catalog", declared: Sequence[Feature] | None = None
) -> tuple[Arm, ...]:
    """Read the arms of version 0, or of `arms sync`; `name` is the option that gives the file.

    JSON and TOML have a list ``arms`` of ``{arm, reward, active?}``, or a table of arm to reward; JSON may also be the
    list alone. CSV has a header with ``arm`` and ``reward``, and optionally ``active``; commas, semicolons or tabs
    separate its columns. Further columns are features of the ads: those `declared`, or, if that is None, any.
    """
    if path is None:
        return ()
    content = read_file(path, name)
    try:
        text = content.decode("utf-8-sig")
        suffix = Path(path).suffix.lower()
        rows = list(_READERS.get(suffix, _json)(text))
        for where, row in rows:
            _check_row(row, where, declared)
        others = [(where, other_fields(row, FIELDS)) for where, row in rows]
        features = typed_features(others, declared, as_text=suffix in (".csv", ".tsv"))
        arms = tuple(_arm(row, where, given) for (where, row), given in zip(rows, features, strict=True))
    except (UnicodeDecodeError, orjson.JSONDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise InputError(f"{name} {path}: cannot be read: {error}") from None
    except InputError as error:
        raise InputError(f"{name} {path}: {error}") from None
    repeated = [arm for arm, times in Counter(arm.arm for arm in arms).items() if times > 1]
    if repeated:
        raise InputError(f"{name} {path}: the arm {repeated[0]!r} is listed twice")
    if not arms:
        raise InputError(f"{name} {path}: has no arms")
    return arms


def _json(text: str) -> Iterable[Placed]:
    return _rows(orjson.loads(text))


def _toml(text: str) -> Iterable[Placed]:
    return _rows(tomllib.loads(text))


def _csv(text: str) -> Iterable[Placed]:
    if not text.strip():
        raise InputError("the file is empty")
    header = text.partition("\n")[0]
    separator = max(SEPARATORS, key=header.count)
    rows = csv.DictReader(io.StringIO(text), strict=True, delimiter=separator, skipinitialspace=True)
    rows.fieldnames = [column.strip() for column in rows.fieldnames or ()]
    if not {"arm", "reward"} <= set(rows.fieldnames):
        _check_names(rows.fieldnames, f"row 1, the header {header.strip()!r}")
    for column, times in Counter(rows.fieldnames).items():
        if times > 1:
            raise InputError(f"row 1: the column {column!r} is there twice")
    for row in rows:
        where = f"row {rows.line_num}"
        if None in row:
            hint = "; a decimal comma? write 1.50, not 1,50" if separator == "," else ""
            raise InputError(f"{where} has more cells than the header{hint}")
        yield where, {column: cell for column, cell in row.items() if cell is not None}


SEPARATORS: Final = (",", ";", "\t")
_READERS = {".json": _json, ".toml": _toml, ".csv": _csv, ".tsv": _csv}


def _rows(content: Any) -> Iterable[Placed]:
    if isinstance(content, Mapping) and "arms" in content:
        content = content["arms"]
    if isinstance(content, Mapping):
        return [(f"arm {arm!r}", {"arm": arm, "reward": reward}) for arm, reward in content.items()]
    if not isinstance(content, list):
        raise InputError("must have a list of arms, or a table of arm to reward")
    return [(f"entry {number}", row) for number, row in enumerate(content, start=1)]


#: Fields of an arm, with other names that people give them.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "arm": ("id", "ad", "ad_id", "arm_id", "name", "sku", "item", "product"),
    "reward": ("price", "revenue", "value", "amount", "cpc", "bid", "payout"),
    "active": ("enabled", "is_active"),
}


def _check_names(names: Iterable[str], where: str) -> None:
    """Raise `InputError` if a field is missing, or seems to be there under another name."""
    if missing := _missing(tuple(names)):
        raise InputError(f"{where} has no {missing}")


@lru_cache(maxsize=64)  # the entries of a file have the same fields
def _missing(names: tuple[str, ...]) -> str | None:
    others = [name for name in names if name not in FIELDS]
    for field, aliases in FIELDS.items():
        if field in names:
            continue
        alike = [name for name in others if name.lower().strip() in (field, *aliases)]
        alike = alike or get_close_matches(field, others, n=1, cutoff=0.7)
        if alike or field != "active":
            guess = f"; if {alike[0]!r} is meant, rename it to {field}" if alike else ""
            return f"{field}{guess}"
    return None


def _check_row(row: Any, where: str, declared: Sequence[Feature] | None) -> None:
    if not isinstance(row, Mapping):
        raise InputError(f"{where} must have arm and reward")
    known = {feature.name for feature in declared or ()} - set(FIELDS)  # the revenue may be declared as a feature
    _check_names([name for name in row if name not in known], where)


def _arm(row: Any, where: str, features: Mapping[str, Value]) -> Arm:
    active = row.get("active", True)
    reward = _number(row["reward"], where)
    try:
        active = boolean(active) if isinstance(active, str) else active
        arm = Arm(arm=row["arm"], reward=reward, active=active, features=tuple(features.items()))
    except ValueError as error:
        raise InputError(f"{where}, active: {error}") from None
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    if len(arm.arm) > _LONGEST_ID or not arm.arm.isprintable():
        raise InputError(f"{where}, arm: an arm id has at most {_LONGEST_ID} printable characters")
    return arm


def _number(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        hint = _POINT if _DECIMAL_COMMA.fullmatch(value.strip()) else ""
        what = f"{value!r} is not a number" if value.strip() else "the cell is empty"
        raise InputError(f"{where}, reward: {what}{hint}") from None


# ── features of ads ───────────────────────────────────────────────────────────────────────────────────────────────────


def pair(text: str) -> tuple[str, str]:
    """Read a feature of `arms add`.

    >>> pair("brand=north face")
    ('brand', 'north face')
    """
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ValueError(f"must be name=value, not {text!r}")
    return name.strip(), value


def features_of_pairs(
    pairs: Sequence[tuple[str, str]], declared: Sequence[Feature] | None, where: str
) -> dict[str, Value]:
    """Return the features of one ad, from pairs of name and text; any features if `declared` is None."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--feature {name}: the feature is given twice")
    (features,) = typed_features([(where, dict(pairs))], declared, as_text=True)
    return features


def typed_features(
    rows: Sequence[Placed], declared: Sequence[Feature] | None, *, as_text: bool
) -> list[dict[str, Value]]:
    """Return the features of every row as numbers and texts; raise `InputError` if they do not fit.

    With `as_text`, as in CSV, all values are texts, and some of them mean numbers. `declared` is None if the rows may
    have any features, as long as all have the same.
    """
    for where, row in rows:
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise InputError(f"{where}, {name}: a feature must be a number or a text")
            if isinstance(value, str) and not value.strip():
                raise InputError(f"{where}, {name}: the cell is empty, and every ad needs a value")
            if not isinstance(value, str) and not math.isfinite(value):
                raise InputError(f"{where}, {name}: must be a finite number, not {value}")
    numbers = _number_columns(rows, declared, as_text)
    typed = [
        (where, {name: _typed(where, name, value, numbers, declared, as_text) for name, value in row.items()})
        for where, row in rows
    ]
    if declared is None:
        infer(typed)  # raises if rows differ
    else:
        for where, row in typed:
            check_ad(declared, row, where)
    return [row for _, row in typed]


def _number_columns(rows: Sequence[Placed], declared: Sequence[Feature] | None, as_text: bool) -> set[str]:
    if declared is not None:
        return {feature.name for feature in declared if feature.kind == "number"}
    names = {name for _, row in rows for name in row}
    numbers = {name for name in names if all(_is_number(row.get(name, ""), as_text) for _, row in rows)}
    for where, row in rows if as_text else ():
        for name in numbers & set(row):
            if not math.isfinite(float(row[name])):
                raise InputError(f"{where}, {name}: must be a finite number, not {row[name]!r}, as in the other rows")
    return numbers


def _is_number(value: Value, as_text: bool) -> bool:
    """Whether a value means a number; nan and inf do, and are refused where numbers are expected."""
    if not isinstance(value, str):
        return True
    try:
        return as_text and float(value) is not None
    except ValueError:
        return False


def _typed(
    where: str, name: str, value: Value, numbers: Collection[str], declared: Sequence[Feature] | None, as_text: bool
) -> Value:
    if name not in numbers:
        # In a column of texts and numbers that nobody declared, numbers are texts as well.
        return f"{value:.15g}" if declared is None and not isinstance(value, str) else value
    if isinstance(value, str) and as_text:
        if not _is_number(value, as_text) or not math.isfinite(float(value)):
            hint = _POINT if _DECIMAL_COMMA.fullmatch(value.strip()) else ""
            raise InputError(f"{where}, {name}: a number is declared, not the text {value!r}{hint}")
        return float(value)
    return value


def other_fields(row: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the other fields of an entry; a table `features` stands for what it contains."""
    inner = row.get("features", {})
    nested = dict(inner) if isinstance(inner, Mapping) else {"features": inner}
    return {name: value for name, value in row.items() if name not in fields and name != "features"} | nested
