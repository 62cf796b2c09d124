"""Catalogues of ads: the file of --catalog and of `arms sync`, and `--feature NAME=VALUE` of `arms add`.

Rules that hold in this file:

- Where features are declared, they decide what a text means; `worker.stream.ad_features` checks the rest.
- Where none are declared, a column that is a number in every row is a number, any other is a category.
- Every error names the row and the column.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import orjson

from worker.cli.options.parser import Option, boolean
from worker.errors import InputError
from worker.logs.tables import BadRowError, read_csv, read_lines
from worker.stream.ad_features import Value, check_ad, check_listed, infer
from worker.stream.decoding import Limits
from worker.stream.features import REWARD, Feature
from worker.stream.settings import Arm

CATALOG = Option(
    "catalog",
    "ads of version 0, JSON, CSV or TOML with arm, reward and features (later changes: `adcascade arms`)",
    metavar="FILE",
)

_LONGEST_ID = Limits().max_arm_id
_DECIMAL_COMMA: Final = re.compile(r"\d+,\d+")

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
    try:
        rows = list(_rows(path))
        _check_rows(rows, declared)
        others = [(where, _other_fields(row)) for where, row in rows]
        features = _features(others, declared, as_text=_is_csv(path))
        arms = tuple(_arm(row, where, given) for (where, row), given in zip(rows, features, strict=True))
    except (orjson.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{name} {path}: cannot be read: {error}") from None
    except InputError as error:
        raise type(error)(f"{name} {error}" if str(error).startswith(path) else f"{name} {path}: {error}") from None
    repeated = [arm for arm, times in Counter(arm.arm for arm in arms).items() if times > 1]
    if repeated:
        raise InputError(f"{name} {path}: the arm {repeated[0]!r} is listed twice")
    if not arms:
        raise InputError(f"{name} {path}: has no arms")
    return arms


def _is_csv(path: str) -> bool:
    return Path(path).suffix.lower() in (".csv", ".tsv")


def _rows(path: str) -> Iterable[Placed]:
    if _is_csv(path):
        for number, row in read_csv(path):
            if isinstance(row, BadRowError):
                raise InputError(f"row {number}: {row}")
            yield f"row {number}", row
        return
    text = "".join(read_lines(path))
    content = tomllib.loads(text) if Path(path).suffix.lower() == ".toml" else orjson.loads(text)
    if isinstance(content, Mapping) and "arms" in content:
        content = content["arms"]
    if isinstance(content, Mapping):
        content = [{"arm": arm, "reward": reward} for arm, reward in content.items()]
    if not isinstance(content, list):
        raise InputError("must have a list of arms, or a table of arm to reward")
    yield from ((f"entry {number}", row) for number, row in enumerate(content, start=1))


#: Fields of an arm, with other names that are common for them.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "arm": ("id", "ad", "ad_id", "arm_id", "name", "sku", "item", "product"),
    "reward": ("revenue", "cpc", "bid", "payout"),  # the price of a product is a feature
    "active": ("enabled", "is_active"),
}


def _check_names(names: Iterable[str], where: str) -> None:
    """Raise `InputError` if a field is missing, or seems to be there under another name."""
    others = [name for name in names if name not in FIELDS]
    for field, aliases in FIELDS.items():
        if field in names:
            continue
        alike = [name for name in others if name.lower().strip() in (field, *aliases)]
        alike = alike or get_close_matches(field, others, n=1, cutoff=0.7)
        if alike or field != "active":
            wanted = ": add what a click on the ad earns, such as your CPC" if field == "reward" else ""
            guess = f"; if {alike[0]!r} is meant, rename it to {field}" if alike else wanted
            raise InputError(f"{where} has no {field}{guess}")


def _check_rows(rows: Iterable[Placed], declared: Sequence[Feature] | None) -> None:
    known = {feature.name for feature in declared or ()} - set(FIELDS)  # the revenue may be declared as a feature
    checked: set[tuple[str, ...]] = set()  # most entries have the same fields
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise InputError(f"{where} must have arm and reward")
        if (names := tuple(name for name in row if name not in known)) not in checked:
            _check_names(names, where)
            checked.add(names)


def _arm(row: Mapping[str, Any], where: str, features: Mapping[str, Value]) -> Arm:
    reward, active = row["reward"], row.get("active", True)
    if isinstance(reward, str):
        reward = _read_number(reward, f"{where}, reward")
    try:
        active = boolean(active) if isinstance(active, str) else active
        arm = Arm(arm=row["arm"], reward=reward, active=active, features=tuple(features.items()))
        check_id(arm.arm)
    except ValueError as error:
        raise InputError(f"{where}, active: {error}") from None
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return arm


def check_id(arm: str) -> None:
    """Raise `InputError` for an arm id that is refused in feedback."""
    if not 0 < len(arm) <= _LONGEST_ID or not arm.isprintable():
        raise InputError(f"an arm id has 1 to {_LONGEST_ID} printable characters")


def _read_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        hint = "; write a decimal point, not a comma" if _DECIMAL_COMMA.fullmatch(text.strip()) else ""
        reason = f"{text!r} is not a number{hint}" if text.strip() else "the cell is empty"
        raise InputError(f"{where}: {reason}") from None


# ── features of ads ───────────────────────────────────────────────────────────────────────────────────────────────────


def features_of_pairs(
    pairs: Sequence[tuple[str, str]], declared: Sequence[Feature] | None, where: str
) -> dict[str, Value]:
    """Return the features of one ad, from pairs of name and text; any features if `declared` is None."""
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise InputError(f"--feature {name}: the feature is given twice")
    for name in (feature.name for feature in declared or ()):
        if name not in {REWARD, *dict(pairs)}:
            raise InputError(f"{where} has no {name}, a declared feature of ads: give --feature {name}=VALUE")
    (features,) = _features([(where, dict(pairs))], declared, as_text=True)
    return features


def _features(rows: Sequence[Placed], declared: Sequence[Feature] | None, *, as_text: bool) -> list[dict[str, Value]]:
    """Return the features of every row as numbers and texts; raise `InputError` if they do not fit.

    With `as_text`, as in CSV, all values are texts, and some of them mean numbers. `declared` is None if the rows may
    have any features, as long as all have the same.
    """
    if declared is None:
        names = {name for _, row in rows for name in row}
        numbers = {name for name in names if all(_means_number(row.get(name, ""), as_text) for _, row in rows)}
    else:
        numbers = {feature.name for feature in declared if feature.kind == "number"}
    typed: list[tuple[str, dict[str, Value]]] = []
    for where, row in rows:
        features = {name: _feature(row[name], f"{where}, {name}", as_text and name in numbers) for name in row}
        if declared is not None:
            check_ad(declared, features, where)
            check_listed(declared, features, where)
        else:
            # In a column of texts and numbers that nobody declared, numbers are texts as well.
            mixed = {name: value for name, value in features.items() if name not in numbers}
            features |= {name: f"{value:.15g}" for name, value in mixed.items() if not isinstance(value, str)}
        typed.append((where, features))
    if declared is None:
        infer(typed)  # raises if rows differ
    return [features for _, features in typed]


def _means_number(value: Any, as_text: bool) -> bool:
    """Return whether a value means a number; nan and inf do, and are refused where numbers are expected."""
    try:
        return not isinstance(value, str) or (as_text and isinstance(float(value), float))
    except ValueError:
        return False


#: Numbers that true and false stand for, where all values are texts.
_BOOLEANS: Final = {"true": "1", "false": "0"}


def _feature(value: Any, where: str, is_number: bool) -> Value:
    if not isinstance(value, int | float | str):
        raise InputError(f"{where}: a feature must be a number, a text, true or false")
    if isinstance(value, str) and not value.strip():
        raise InputError(f"{where}: the cell is empty, and every ad needs a value")
    checked = float(value) if isinstance(value, bool) else value
    if is_number and isinstance(value, str):
        checked = _read_number(_BOOLEANS.get(value.strip().lower(), value), where)
    if not isinstance(checked, str) and not math.isfinite(checked):
        raise InputError(f"{where}: must be a finite number, not {value}")
    return checked


def _other_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry that are features; a table `features` stands for what it contains."""
    inner = row.get("features", {})
    nested = dict(inner) if isinstance(inner, Mapping) else {"features": inner}
    return {name: value for name, value in row.items() if name not in FIELDS and name != "features"} | nested
