"""What the reading of a log reports: mismatches, and its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

from worker.console import ProgressBar

#: Mismatches that are kept; all are counted.
MOST_LISTED: Final = 20

_TICK: Final = 1000  # items between two updates of a progress bar

Kind: TypeAlias = Literal["decision", "opened", "version", "line"]

Item = TypeVar("Item")

# ── mismatches ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A recorded fact that the replay does not reproduce.

    `expected` is the result of the replay, `found` the content of the log; `line` is 0 if no single line is concerned.
    """

    kind: Kind
    name: str
    expected: Any
    found: Any
    _: KW_ONLY
    line: int = 0
    session: str | None = None
    position: int | None = None
    version: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        if self.kind in ("decision", "opened"):
            at = f", position {self.position}" if self.position else ""
            what = f"{self.kind} of session {self.session}{at} (version {self.version})"
        else:
            what = f"version {self.version}" if self.version is not None else "record"
        return f"{where}{what}: {self.name}: expected {_short(self.expected)}, found {_short(self.found)}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 160 else f"{text[:157]}…"


@dataclass(slots=True)
class Findings:
    """Count all mismatches and keep the first.

    >>> findings = Findings()
    >>> findings.add(Mismatch("decision", "arm", "a", "b", session="s", position=1, version=3))
    >>> print(findings.count, findings.first[0])
    1 decision of session s, position 1 (version 3): arm: expected a, found b
    """

    count: int = 0
    first: list[Mismatch] = field(default_factory=list)

    def add(self, mismatch: Mismatch) -> None:
        """Count a mismatch."""
        self.count += 1
        if len(self.first) < MOST_LISTED:
            self.first.append(mismatch)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the first mismatches in their JSON form."""
        return [{k: v for k, v in asdict(mismatch).items() if v is not None} for mismatch in self.first]


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ticking(items: Iterable[Item], bar: ProgressBar) -> Iterator[Item]:
    """Yield the items and advance the bar now and then."""
    count = 0
    for item in items:
        yield item
        count += 1
        if count == _TICK:
            bar.advance(_TICK)
            count = 0
    bar.advance(count)
