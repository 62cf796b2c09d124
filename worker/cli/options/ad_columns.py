"""Features of ads as people write them: further columns of a catalogue, and `--feature name=value`.

Rules that hold in this file:

- Where features are declared, they decide what a text means; `worker.stream.ad_features` checks the rest.
- Where none are declared, a column that is a number in every row is a number, any other is a category.
- Every error names the row and the column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from worker.errors import InputError
from worker.stream.ad_features import Value, check_ad, infer
from worker.stream.features import Feature

#: A row with its place in a file, for error messages.
Placed = tuple[str, dict[str, Any]]

DECIMAL_COMMA: Final = re.compile(r"\d+,\d+")


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
            hint = "; write a decimal point, not a comma" if DECIMAL_COMMA.fullmatch(value.strip()) else ""
            raise InputError(f"{where}, {name}: a number is declared, not the text {value!r}{hint}")
        return float(value)
    return value


def other_fields(row: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return what an entry has beside its own fields; a table `features` stands for what it contains."""
    inner = row.get("features", {})
    nested = dict(inner) if isinstance(inner, Mapping) else {"features": inner}
    return {name: value for name, value in row.items() if name not in fields and name != "features"} | nested
