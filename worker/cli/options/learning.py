"""Options of serving and learning: every field of `LearningSettings`, the arms to begin with, the limits on input."""

from __future__ import annotations

import argparse
import csv
import io
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from worker.bandit.estimators import ESTIMATORS
from worker.bandit.policies import BONUSES, POLICIES
from worker.cli.options.parser import Option, boolean, integer, number
from worker.errors import InputError
from worker.stream.codec import Limits
from worker.stream.parameters import SETTINGS, UNANSWERED, Arm, LearningSettings

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


class Duration(int):
    """A time span in milliseconds, shown as people write it.

    >>> str(Duration(60_000)), str(Duration(500)), str(Duration(90_000))
    ('60s', '500ms', '90s')
    """

    def __str__(self) -> str:
        for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("s", 1_000)):
            if self and self % size == 0:
                return f"{int(self) // size}{unit}"
        return f"{int(self)}ms"


def duration(text: str) -> Duration:
    """Read a time span with its unit.

    >>> int(duration("1.5s")), int(duration("2 h")), int(duration("0"))
    (1500, 7200000, 0)
    """
    if text.strip() == "0":
        return Duration(0)
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"must be a time with a unit, such as 60s, 500ms, 2h or 7d, not {text!r}")
    span = float(found[1]) * _UNITS[found[2]]
    if not span.is_integer():
        raise ValueError(f"must be whole milliseconds, not {text}")
    return Duration(span)


def beta(text: str) -> float | str:
    """Read a number of standard deviations, or `theory`.

    >>> beta("1.5"), beta("theory")
    (1.5, 'theory')
    """
    if text == "theory":
        return text
    try:
        return float(number(least=0)(text))
    except ValueError as error:
        raise ValueError(f"{error} (or theory)") from None


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(LearningSettings)}


def _option(name: str, help: str, **more: Any) -> Option:
    return Option(name=name, help=help, default=_DEFAULTS[name.replace("-", "_")], **more)


def _span(name: str, help: str) -> Option:
    return Option(name=name, help=help, parse=duration, default=Duration(_DEFAULTS[name.replace("-", "_")]))


DIM = Option(
    name="dim", help="context features d; by default as the published parameters have it", parse=integer(least=1)
)
CATALOG = Option(
    name="catalog",
    help="the ads of version 0: JSON, CSV or TOML with arm and reward; later ones come by `adcascade arms`",
    metavar="FILE",
)

LEARNING = (
    DIM,
    _option("horizon", "most displays H in a session", parse=integer(least=1)),
    _option("repeats", "whether a session may show an arm twice", flag=True),
    _option("policy", "how slates are chosen", choices=POLICIES),
    _option("epsilon", "share of random choices (epsilon-greedy)", parse=number(least=0, most=1)),
    _option("bonus", "what is added to Q to explore", choices=BONUSES),
    _option("beta", "exploration: a number of standard deviations, or theory", parse=beta),
    _option("estimator", "how a window is folded", choices=ESTIMATORS),
    _option("ridge", "precision λ of the prior", parse=number(above=0)),
    _option("forgetting", "γ per fold, for drifting users; 1 is off", parse=number(above=0, most=1)),
    _option("warmup", "folds before which slates are random", parse=integer(least=0)),
    _option("horizon-episodes", "episodes T that exploration is spread over", parse=integer(least=2)),
    _option("random-share", "share of sessions served at random, to evaluate with", parse=number(least=0, most=1)),
    _option("salt", "of the stable hashes that choose at random"),
    _span("session-timeout", "how long after its arrival feedback of a session counts"),
    _span("lateness", "how late a record may come"),
    _span("window", "length of an episode"),
    _option("unanswered", "displays without feedback: ignored, or counted as passed", choices=UNANSWERED),
)

_LIMITS = Limits()
LIMITS = (
    Option(
        name="max-record-bytes",
        help="largest input record",
        parse=integer(least=1),
        default=_LIMITS.max_record_bytes,
    ),
    Option(name="max-norm", help="largest norm of [context; arm]", parse=number(least=1), default=_LIMITS.max_norm),
    Option(
        name="max-ahead",
        help="how far an event may lie after its record's timestamp",
        parse=duration,
        default=Duration(_LIMITS.max_ahead_ms),
    ),
)


def learning_settings(options: argparse.Namespace, dim: int) -> LearningSettings:
    """Return the settings that the options give, for contexts of `dim` numbers."""
    values = {name: getattr(options, name) for name in SETTINGS if name != "dim"}
    plain: dict[str, Any] = {
        name: int(value) if isinstance(value, Duration) else value for name, value in values.items()
    }
    settings = LearningSettings(dim=dim, **plain)
    if settings.bonus == "paper" and not settings.repeats and settings.policy in ("ucbbp", "aucbbp"):
        raise InputError("--bonus paper contradicts --no-repeats: there, exploring means optimistic probabilities")
    return settings


def limits(options: argparse.Namespace) -> Limits:
    """Return the limits that the options give."""
    return Limits(
        max_record_bytes=options.max_record_bytes, max_norm=options.max_norm, max_ahead_ms=int(options.max_ahead)
    )


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arms(path: str | None) -> tuple[Arm, ...]:
    """Read the arms of version 0.

    JSON and TOML: a list ``arms`` of ``{arm, reward, active?}``, or a table of arm to reward; JSON also the list alone.
    CSV: a header with ``arm`` and ``reward``, and perhaps ``active``.
    """
    if path is None:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = list(_READERS.get(Path(path).suffix.lower(), _json)(text))
        arms = tuple(_arm(row, place) for place, row in enumerate(rows, start=1))
    except OSError as error:
        raise InputError(f"--catalog {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, orjson.JSONDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise InputError(f"--catalog {path}: cannot be read: {error}") from None
    except InputError as error:
        raise InputError(f"--catalog {path}: {error}") from None
    repeated = [arm for arm, times in Counter(arm.arm for arm in arms).items() if times > 1]
    if repeated:
        raise InputError(f"--catalog {path}: the arm {repeated[0]!r} is there twice")
    if not arms:
        raise InputError(f"--catalog {path}: there are no arms in it")
    return arms


def _json(text: str) -> Iterable[Any]:
    return _listed(orjson.loads(text))


def _toml(text: str) -> Iterable[Any]:
    return _listed(tomllib.loads(text))


def _csv(text: str) -> Iterable[Any]:
    rows = csv.DictReader(io.StringIO(text), strict=True)
    if not {"arm", "reward"} <= set(rows.fieldnames or ()):
        raise InputError("the first line must name the columns arm and reward")
    return list(rows)


_READERS = {".json": _json, ".toml": _toml, ".csv": _csv}


def _listed(content: Any) -> Iterable[Any]:
    if isinstance(content, Mapping) and "arms" in content:
        content = content["arms"]
    if isinstance(content, Mapping):
        return [{"arm": arm, "reward": reward} for arm, reward in content.items()]
    if not isinstance(content, list):
        raise InputError("there must be a list of arms, or a table of arm to reward")
    return content


def _arm(row: Any, place: int) -> Arm:
    if not isinstance(row, Mapping) or not {"arm", "reward"} <= row.keys():
        raise InputError(f"entry {place} must have arm and reward")
    reward, active = row["reward"], row.get("active", True)
    try:
        reward = float(reward) if isinstance(reward, str) else reward
        active = boolean(active) if isinstance(active, str) else active
    except ValueError as error:
        raise InputError(f"entry {place}: {error}") from None
    arm = Arm(arm=row["arm"], reward=reward, active=active)
    if len(arm.arm) > _LIMITS.max_arm_id or not arm.arm.isprintable():
        raise InputError(f"entry {place}: an arm id has at most {_LIMITS.max_arm_id} printable characters")
    return arm
