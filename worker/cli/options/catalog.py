"""The ads of version 0: the option --catalog and its file."""

from __future__ import annotations

import csv
import io
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from worker.cli.options.parser import Option, boolean
from worker.console import read_file
from worker.errors import InputError
from worker.stream.decoding import Limits
from worker.stream.settings import Arm

CATALOG = Option(
    "catalog",
    "ads of version 0, JSON, CSV or TOML with arm and reward (later changes: `adcascade arms`)",
    metavar="FILE",
)

_LONGEST_ID = Limits().max_arm_id


def read_arms(path: str | None) -> tuple[Arm, ...]:
    """Read the arms of version 0.

    JSON and TOML have a list ``arms`` of ``{arm, reward, active?}``, or a table of arm to reward; JSON may also be the
    list alone. CSV has a header with ``arm`` and ``reward``, and optionally ``active``.
    """
    if path is None:
        return ()
    content = read_file(path, "--catalog")
    try:
        text = content.decode("utf-8-sig")
        rows = list(_READERS.get(Path(path).suffix.lower(), _json)(text))
        arms = tuple(_arm(row, number) for number, row in enumerate(rows, start=1))
    except (UnicodeDecodeError, orjson.JSONDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise InputError(f"--catalog {path}: cannot be read: {error}") from None
    except InputError as error:
        raise InputError(f"--catalog {path}: {error}") from None
    repeated = [arm for arm, times in Counter(arm.arm for arm in arms).items() if times > 1]
    if repeated:
        raise InputError(f"--catalog {path}: the arm {repeated[0]!r} is listed twice")
    if not arms:
        raise InputError(f"--catalog {path}: has no arms")
    return arms


def _json(text: str) -> Iterable[Any]:
    return _rows(orjson.loads(text))


def _toml(text: str) -> Iterable[Any]:
    return _rows(tomllib.loads(text))


def _csv(text: str) -> Iterable[Any]:
    rows = csv.DictReader(io.StringIO(text), strict=True)
    if not {"arm", "reward"} <= set(rows.fieldnames or ()):
        raise InputError("the first line must name the columns arm and reward")
    return list(rows)


_READERS = {".json": _json, ".toml": _toml, ".csv": _csv}


def _rows(content: Any) -> Iterable[Any]:
    if isinstance(content, Mapping) and "arms" in content:
        content = content["arms"]
    if isinstance(content, Mapping):
        return [{"arm": arm, "reward": reward} for arm, reward in content.items()]
    if not isinstance(content, list):
        raise InputError("must have a list of arms, or a table of arm to reward")
    return content


def _arm(row: Any, number: int) -> Arm:
    if not isinstance(row, Mapping) or not {"arm", "reward"} <= row.keys():
        raise InputError(f"entry {number} must have arm and reward")
    reward, active = row["reward"], row.get("active", True)
    try:
        reward = float(reward) if isinstance(reward, str) else reward
        active = boolean(active) if isinstance(active, str) else active
    except ValueError as error:
        raise InputError(f"entry {number}: {error}") from None
    arm = Arm(arm=row["arm"], reward=reward, active=active)
    if len(arm.arm) > _LONGEST_ID or not arm.arm.isprintable():
        raise InputError(f"entry {number}: an arm id has at most {_LONGEST_ID} printable characters")
    return arm
