"""What was sent and what is expected of it, and the timeline of everything that was done.

Everything is found again in the topics by its bytes, not by an offset: a producer that lost the broker's answer sends
again, and both copies have to meet the same expectation.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: Topic (without prefix), key and the hash of the value.
Mark = tuple[str, bytes | None, bytes | None]


def mark(topic: str, key: bytes | None, value: bytes | None) -> Mark:
    return topic, key, None if value is None else hashlib.sha256(value).digest()


@dataclass(slots=True)
class Sent:
    """A record of the driver.

    `reasons` are those that its dead letter may give; a record without any is valid. `body` is its content if it is
    valid. `acknowledged` is the time, in milliseconds, at which the broker had it for certain.
    """

    topic: str
    reasons: frozenset[str]
    what: str
    body: dict[str, Any] | None = None
    acknowledged: int | None = None
    refused: str = ""

    @property
    def is_valid(self) -> bool:
        return not self.reasons


@dataclass(slots=True)
class Ledger:
    """All records sent, by their mark."""

    sent: dict[Mark, Sent] = field(default_factory=dict)

    def add(self, topic: str, key: bytes | None, value: bytes | None, sent: Sent) -> Sent:
        """Note a record; the second of two equal records is the same."""
        return self.sent.setdefault(mark(topic, key, value), sent)

    def valid(self, topic: str) -> list[Sent]:
        return [one for one in self.sent.values() if one.topic == topic and one.is_valid and not one.refused]

    def summary(self) -> str:
        counts = Counter(f"{one.topic}: {'valid' if one.is_valid else one.what}" for one in self.sent.values())
        return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


class Timeline:
    """What was done and found, with the second of the run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._last = ""
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Add a line, unless the last one says the same."""
        with self._lock:
            if text == self._last:
                return
            self._last = text
            stamp = time.strftime("%H:%M:%S", time.gmtime())
            self.lines.append(f"{time.monotonic() - self._began:7.2f} s  {stamp}Z  {text}")

    def __str__(self) -> str:
        with self._lock:
            return "\n".join(self.lines)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
