"""The active troubles of a process: counted, logged at a bounded rate, and shown while they are active."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from worker.stream.topology import Tally
from worker.stream.troubles import LONGEST_EXAMPLE, TROUBLES, TroubleKind

log = logging.getLogger(__name__)

#: Seconds for which a report counts. The alert waits one minute, so a single report is enough for it.
ACTIVE: Final = 180.0
#: Seconds between two log lines of a kind.
BETWEEN_LINES: Final = 60.0


@dataclass(frozen=True, slots=True)
class ActiveTrouble:
    """A trouble that is active: its kind, the reports of the last minutes, their basis, and the last example."""

    name: str
    kind: TroubleKind
    times: int
    out_of: int
    example: str
    lasting: bool

    @property
    def detail(self) -> str:
        """How often it happens, and the example, in whole sentences; empty if there is neither."""
        of, example = self.kind.of, self.example.rstrip(".")
        noun = "feedback records" if of == "feedback" else of
        share = f"{self.times:,} of {self.out_of:,} {noun} in the last minutes." if self.kind.share else ""
        shown = example[:1].upper() + example[1:] if self.lasting else f"For example: {example}"
        return " ".join(part for part in (share, f"{shown}." if example else "") if part)

    @property
    def sentence(self) -> str:
        """What is wrong, an example, and what to do."""
        return " ".join(part for part in (self.kind.meaning, self.detail, self.kind.remedy) if part)


@dataclass(slots=True)
class _Kind:
    example: str = ""
    lasting: bool = False
    logged: float = float("-inf")
    since_line: int = 0


class TroubleLog:
    """The reports of one process; safe to call from any thread.

    Troubles that happen are reported with `add`, or with `observe` for a whole batch. Troubles that last are reported
    with `set` when they begin, and with `clear` when they end.

    >>> troubles = TroubleLog(clock=lambda: 0.0)
    >>> troubles.set("clock", "an hour ahead")
    >>> [active.name for active in troubles.active()]
    ['clock']
    >>> troubles.clear("clock")
    >>> troubles.active()
    []
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._kinds = {name: _Kind() for name in TROUBLES}
        #: Of the last minutes, by the second: reports by kind, and what the shares of kinds refer to.
        self._recent: dict[int, Counter[str]] = {}

    def add(self, name: str, example: str, times: int = 1) -> None:
        """Report a trouble that happened."""
        self._report(name, example, times, lasting=False)

    def set(self, name: str, example: str) -> None:
        """Report a trouble that lasts until `clear`, or until an empty example; another report replaces the example."""
        if example:
            self._report(name, example, 1, lasting=True)
        else:
            self.clear(name)

    def _report(self, name: str, example: str, times: int, *, lasting: bool) -> None:
        now, kind = self._clock(), self._kinds[name]
        with self._lock:
            if not lasting:
                self._count(now, {name: times})
            elif kind.lasting:
                times = 0  # counted when it began
            kind.lasting |= lasting
            kind.since_line += times
            # Names of arms and errors of the system may be part of it, and it goes into a line of the log.
            kind.example = "".join(one if one.isprintable() else "?" for one in example[:LONGEST_EXAMPLE])
            line = self._line(name, kind, now)
        if line:
            log.warning("%s", line)

    def _count(self, now: float, times: Mapping[str, int]) -> None:
        second = int(now)
        if second not in self._recent:
            recent = {then: counts for then, counts in self._recent.items() if now - then <= ACTIVE}
            self._recent = {**recent, second: Counter()}
        self._recent[second].update(times)

    def _times(self, now: float, name: str) -> int:
        return sum(counts[name] for second, counts in self._recent.items() if now - second <= ACTIVE)

    def observe(self, tally: Tally) -> None:
        """Count a batch and report its troubles."""
        ended = tally.ended.total() - tally.ended["empty"]
        records = tally.arrivals + tally.feedback
        if records or ended:
            counts = {"records": records, "arrivals": tally.arrivals, "feedback": tally.feedback, "sessions": ended}
            with self._lock:
                self._count(self._clock(), counts)
        for name, times, example in tally.troubles:
            self.add(name, example, times)

    def clear(self, name: str) -> None:
        """Report that a lasting trouble is over."""
        with self._lock:
            kind = self._kinds[name]
            over, kind.lasting = kind.lasting, False
            kind.logged = float("-inf") if over else kind.logged
        if over:
            log.info("trouble is over: %s", name)

    def _line(self, name: str, kind: _Kind, now: float) -> str:
        if now - kind.logged < BETWEEN_LINES or not (active := self._active(name, kind, now)):
            return ""
        kind.logged, times, kind.since_line = now, kind.since_line, 0
        return f"trouble {name}{f' ({times} times)' if times > 1 else ''}: {active.sentence}"

    def _active(self, name: str, kind: _Kind, now: float) -> ActiveTrouble | None:
        spec, recent, out_of = TROUBLES[name], self._times(now, name), self._times(now, TROUBLES[name].of)
        if not kind.lasting and (recent < spec.least or recent <= spec.share * out_of):
            return None
        return ActiveTrouble(name, spec, recent or 1, max(out_of, recent), kind.example, kind.lasting)

    def active(self) -> list[ActiveTrouble]:
        """Return the active troubles, the worst first."""
        now = self._clock()
        with self._lock:
            found = [self._active(name, kind, now) for name, kind in self._kinds.items()]
        return sorted((one for one in found if one), key=lambda trouble: trouble.kind.level != "bad")
